"""Conversations under templates like Qwen3.5's: system turns, tools, parts, reasoning of earlier turns and efforts."""

import json
import random

import pytest

from dflash_jax.base.errors import RequestError
from tests.pairs import write_byte_tokenizer
from tests.serve.qwen35 import ASKED, CLOSED, EFFORTS, HI, OPEN, SMALL, STRINGS, TEMPLATE, prompt_of, state_of

CALL = {"id": "c", "type": "function", "function": {"name": "book", "arguments": '{"city": "Rome", "nights": 2}'}}
CALLED = "<tool_call>\n<function=book>\n<parameter=city>\nRome\n</parameter>\n<parameter=nights>\n2\n</parameter>\n"
CALLED += "</function>\n</tool_call>"
LOOP = [  # an agent that has called a tool twice at once
    {"role": "user", "content": "Book"},
    {"role": "assistant", "reasoning": "Where?", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "ok"},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "full"}]},
]
LOOP_TEXT = (
    "<|im_start|>user\nBook<|im_end|>\n"
    f"<|im_start|>assistant\n<think>\nWhere?\n</think>\n\n{CALLED}\n{CALLED}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nok\n</tool_response>\n<tool_response>\nfull\n</tool_response><|im_end|>\n"
)


def system(text: str, role: str = "system") -> dict:
    return {"role": role, "content": text}


def turn(text: str) -> str:
    return f"<|im_start|>system\n{text}<|im_end|>\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("qwen35"))


@pytest.fixture(scope="module")
def state(folder):
    return state_of(folder)


def test_a_tool_loop(state):
    assert prompt_of(state, LOOP) == LOOP_TEXT + OPEN


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns(state, key):
    past = [*HI, {"role": "assistant", "content": "Yes.", key: "hm"}, *HI]
    dropped = f"{ASKED}<|im_start|>assistant\nYes.<|im_end|>\n{ASKED}{OPEN}"
    kept = f"{ASKED}<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.<|im_end|>\n{ASKED}{OPEN}"
    assert prompt_of(state, past) == dropped
    assert prompt_of(state, past, chat_template_kwargs={"preserve_thinking": True}) == kept


def test_an_empty_field_does_not_hide_the_other_one(state):
    said = {"role": "assistant", "content": "", "reasoning": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    assert "<think>\nhm\n</think>" in prompt_of(state, [*HI, said])


# ---- System turns


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_late_system_turn_stays_where_it_is(state, role):
    late = [system("Be good."), *LOOP, system(" Hurry.\n", role)]
    assert prompt_of(state, late) == turn("Be good.") + LOOP_TEXT + turn("Hurry.") + OPEN
    further = [*late, {"role": "assistant", "content": "Done."}, system([{"type": "text", "text": "A"}, "B"]), *HI]
    text = prompt_of(state, further, chat_template_kwargs={"preserve_thinking": True})
    assert text.startswith(turn("Be good.") + LOOP_TEXT + turn("Hurry."))  # nothing is prefilled anew
    assert text.endswith("Done.<|im_end|>\n" + turn("AB") + ASKED + OPEN)


def test_several_developer_messages_first(state):
    messages = [system("One.", "developer"), system("Two.", "developer"), *HI]
    assert prompt_of(state, messages) == turn("One.") + turn("Two.") + ASKED + OPEN


def test_a_template_that_knows_developers_gets_them(folder):
    knows = STRINGS + "{# it takes 'developer' #}"
    assert prompt_of(state_of(folder, knows), [system("a", "developer"), *HI]) == "<developer>a<user>Hi"
    assert prompt_of(state_of(folder, STRINGS), [system("a", "developer"), *HI]) == "<system>a<user>Hi"
    assert prompt_of(state_of(folder, STRINGS), [*HI, system("a")]) == "<user>Hi<system>a"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([system("a"), system("b")], "No user query found"),
        ([*HI, system("a"), {"role": "critic", "content": "b"}], "Unexpected message role"),
    ],
)
def test_other_refusals_of_the_template_stand(state, messages, words):
    with pytest.raises(RequestError, match=words):
        prompt_of(state, messages)


# ---- Parts


def test_parts_are_joined_as_the_template_joins_them(folder, state):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]}]
    assert prompt_of(state, parts) == f"<|im_start|>user\nab<|im_end|>\n{OPEN}"
    assert prompt_of(state_of(folder, STRINGS), parts) == "<user>a\nb"
    assert state.renderer.chat_text(parts, chat_template=STRINGS) == "<user>a\nb"  # as LLM.chat renders


# ---- Tools

TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "nights": {"type": "integer", "enum": [3, 1, 2]},
            },
            "required": ["nights", "city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def shuffled(value, rng: random.Random):
    """Equal JSON with the keys of its objects in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(element, rng) for element in value] if isinstance(value, list) else value


def test_tools_come_first_and_have_one_order_of_keys(state):
    messages = [system("Be good."), *HI]
    text = prompt_of(state, messages, tools=[TOOL])
    head, written, rest = text.partition("Tools:\n")[0], *text.partition("Tools:\n")[2].split("\n", 1)
    assert head == "<|im_start|>system\n"
    assert rest == f"Be good.<|im_end|>\n{ASKED}{OPEN}"
    assert json.loads(written) == TOOL  # lists keep their order
    assert written.startswith('{"type": "function", "function": {"name": "book", "description": "Books.", "parameters"')
    for seed in range(20):
        assert prompt_of(state, messages, tools=[shuffled(TOOL, random.Random(seed))]) == text


def test_tools_too_deep_to_write_are_refused(state):
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="refused"):
        state.renderer.chat_text(HI, chat_template=TEMPLATE, chat_template_kwargs={"tools": [schema]})


# ---- Thinking and its effort


@pytest.mark.parametrize(
    ("template", "body", "prompt"),
    [
        (TEMPLATE, {}, OPEN),
        (TEMPLATE, {"chat_template_kwargs": {"enable_thinking": False}}, CLOSED),
        (TEMPLATE, {"reasoning_effort": "none"}, CLOSED),
        (TEMPLATE, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, OPEN),
        (TEMPLATE, {"reasoning_effort": "high"}, OPEN),
        (SMALL, {}, CLOSED),
        (SMALL, {"chat_template_kwargs": {"enable_thinking": True}}, OPEN),
        (SMALL, {"reasoning_effort": "none"}, CLOSED),
    ],
)
def test_thinking(folder, template, body, prompt):
    assert prompt_of(state_of(folder, template), **body) == ASKED + prompt


def test_the_request_overrides_the_servers_default(folder):
    state = state_of(folder, default_chat_template_kwargs={"enable_thinking": False, "preserve_thinking": True})
    assert prompt_of(state).endswith(CLOSED)
    assert prompt_of(state, chat_template_kwargs={"enable_thinking": True}).endswith(OPEN)
    state = state_of(folder, default_chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(state, reasoning_effort="none").endswith(CLOSED)


@pytest.mark.parametrize(
    ("effort", "named"),
    [("low", "low"), ("medium", "medium"), ("xhigh", "xhigh"), ("minimal", "low"), ("high", "xhigh"), ("max", "xhigh")]
    + [(None, "xhigh")],
)
def test_efforts_get_names_that_the_template_has(folder, effort, named):
    state = state_of(folder, EFFORTS + TEMPLATE)
    assert prompt_of(state, reasoning_effort=effort) == f"effort: {named}\n{ASKED}{OPEN}"
    assert prompt_of(state, chat_template_kwargs={"reasoning_effort": effort or "xhigh"}).startswith(f"effort: {named}")


def test_no_effort_is_thinking_off_where_the_template_would_refuse_none(folder):
    text = prompt_of(state_of(folder, EFFORTS + TEMPLATE), reasoning_effort="none")
    assert text == f"effort: xhigh\n{ASKED}{CLOSED}"


@pytest.mark.parametrize("effort", ["none", "minimal", "high", "max"])
def test_a_template_with_other_names_gets_the_effort_as_it_is(folder, effort):
    assert prompt_of(state_of(folder, "{{ reasoning_effort }}"), reasoning_effort=effort) == effort
    names = "{{ 'much' if reasoning_effort == 'high' else 'xhigh' }}"
    assert prompt_of(state_of(folder, names), reasoning_effort="high") == "much"


def test_an_effort_that_is_no_word_reaches_the_template(folder):
    assert prompt_of(state_of(folder, "{{ reasoning_effort }}"), chat_template_kwargs={"reasoning_effort": 5}) == "5"
