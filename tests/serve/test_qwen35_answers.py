"""Answers to chats whose template opens reasoning in the prompt, or closes it, or leaves it to the model."""

import pytest

from dflash_jax.text.parsing import prompt_reasoning
from tests.pairs import write_byte_tokenizer
from tests.serve.qwen35 import HI, SMALL, STRINGS, TEMPLATE, answer, choice_of, delta_of, state_of

OFF, ON = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("qwen35"))


@pytest.mark.parametrize(
    ("template", "body", "text", "reasoning", "content"),
    [
        (TEMPLATE, {}, "hm\n</think>\n\nYes.", "hm\n", "\n\nYes."),
        (TEMPLATE, {}, "hm", "hm", None),
        (TEMPLATE, ON, "hm</think>Yes.", "hm", "Yes."),
        (TEMPLATE, OFF, "Yes.", None, "Yes."),
        (TEMPLATE, OFF, "See <think> and </think>.", None, "See <think> and </think>."),
        (TEMPLATE, {"reasoning_effort": "none"}, "Yes.", None, "Yes."),
        (TEMPLATE, {"separate_reasoning": False}, "hm</think>Yes.", None, "hm</think>Yes."),
        (SMALL, {}, "Yes.", None, "Yes."),
        (SMALL, ON, "hm</think>Yes.", "hm", "Yes."),
        (SMALL, OFF, "Yes.", None, "Yes."),
        (STRINGS, {}, "Yes.", None, "Yes."),
        (STRINGS, {}, "<think>hm</think>Yes.", "hm", "Yes."),
    ],
)
def test_reasoning_begins_where_the_template_has_opened_it(folder, template, body, text, reasoning, content):
    state = state_of(folder, template)
    message = answer(state, text, **body)
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert message.get("reasoning_content") == reasoning
    choice, _ = choice_of(state, **body)  # and character by character
    deltas = [delta_of(state, char, None) for char in text] + [delta_of(state, "")]
    pieces = [chunk["delta"] for delta in deltas for chunk in choice.chunks(delta)]
    for key, whole in (("reasoning", reasoning), ("reasoning_content", reasoning), ("content", content)):
        assert "".join(piece.get(key) or "" for piece in pieces) == (whole or "")


def continued(content: str) -> dict:
    return {"messages": [*HI, {"role": "assistant", "content": content}], "continue_final_message": True}


def test_an_answer_that_goes_on_may_speak_of_tags(folder):
    message = answer(state_of(folder), " is it.</think>", **continued("The tag <think>"))
    assert (message.get("reasoning"), message["content"]) == (None, " is it.</think>")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>user\nwhy <think>", None),  # no turn of the assistant has begun
        ("<|im_start|>user\n<think>", None),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\nThe tag <think>", False),
        ("<|im_start|>assistant\nThe tag <think>", None),
        ("<|im_start|>assistant\n<think>\nIt ends with", True),
        ("[INST] why <think>? [/INST]", None),
        ("<｜Assistant｜><think>\n", True),
        ("<｜Assistant｜><think>\n\n</think>\n\n", False),
    ],
)
def test_only_what_the_template_has_opened_counts(prompt, expected):
    assert prompt_reasoning(prompt) is expected


@pytest.mark.parametrize("body", [{}, OFF])
def test_calls(folder, body):
    state = state_of(folder)
    thought = "" if body else "hm</think>\n\n"
    message = answer(state, f"{thought}Look.\n{CALL}\n{CALL}", tools=TOOLS, **body)
    assert message.get("reasoning") == (None if body else "hm")
    assert message["content"].strip() == "Look."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}] * 2


def test_a_call_in_unfinished_reasoning(folder):
    state = state_of(folder)
    choice, job = choice_of(state, tools=TOOLS)
    whole = choice.whole(delta_of(state, f"hm {CALL}"))
    assert whole["finish_reason"] == "tool_calls"
    message = whole["message"]
    assert (message["reasoning"], message["content"]) == ("hm ", None)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    # The tokens of this tokenizer are bytes, so that the last one of the tag tells that there is a call.
    assert job.num_reasoning_tokens == len("hm <tool_call")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("hm</think>Yes.", len("hm</think>")),
        ("hm", len("hm")),
        (f"hm</think>{CALL}", len("hm</think>")),
        (f"hm {CALL} no</think>Yes.", len(f"hm {CALL} no</think>")),
        ("say <tool_call> only", len("say <tool_call> only")),
    ],
)
def test_reasoning_is_counted(folder, text, number):
    state = state_of(folder)
    for chunks in ([text], list(text)):
        choice, job = choice_of(state, tools=TOOLS)
        for chunk in chunks:
            choice.chunks(delta_of(state, chunk, None))
        choice.chunks(delta_of(state, ""))
        assert job.num_reasoning_tokens == number


@pytest.mark.parametrize(("reason", "calls"), [("stop", 1), ("length", 0)])
def test_a_call_without_closing_tags_counts_if_the_model_has_ended(folder, reason, calls):
    text = CALL.partition("</function>")[0]
    state = state_of(folder)
    choice = choice_of(state, tools=TOOLS, **OFF)[0].whole(delta_of(state, text, reason))
    assert len(choice["message"].get("tool_calls", ())) == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "length")
    assert choice["message"]["content"] == (None if calls else text)
