"""Anthropic's bodies as the chats that they ask for, without a server."""

import pytest

from dflash_jax.serve.api.anthropic.events import SIGNATURE
from dflash_jax.serve.api.openai.chat import chat_text
from dflash_jax.serve.protocol import APIError, CountTokensRequest, MessagesRequest, parse
from tests.pairs import write_byte_tokenizer
from tests.serve.qwen35 import CLOSED, state_of

REFERENCE = {"type": "tool_reference", "tool_name": "a"}
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}
READ = {
    "type": "function",
    "function": {"name": "read", "description": "Reads.", "parameters": {"type": "object"}},
}


def chat_of(messages=HI, **fields):
    return parse(MessagesRequest, {"max_tokens": 9, "messages": messages, **fields}).chat()


def messages_of(messages=HI, **fields):
    """The chat's messages, without the second name of reasoning."""
    chat = chat_of(messages, **fields)
    return [{key: value for key, value in m.items() if key != "reasoning_content"} for m in chat.messages]


def text(words, **fields):
    return {"type": "text", "text": words, **fields}


# ---- Messages


def test_a_system_prompt_is_the_first_message_and_the_billing_header_is_none():
    expected = {"role": "system", "content": "One.\nTwo."}
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=abc")
    cached = text("One.", cache_control={"type": "ephemeral"})
    for system in (
        "One.\nTwo.",
        [cached, text("Two.")],
        [billing, cached, text("Two.")],
        [text(""), text("One.\nTwo.")],
    ):
        assert messages_of(system=system) == [expected, *HI]
    for system in (None, "", [], [billing]):
        assert messages_of(system=system) == HI
    assert messages_of(system=f"{billing['text']}\nOne.\nTwo.") == [expected, *HI]


def test_a_system_message_stays_where_it_is():
    late = {"role": "system", "content": [text("Now in French.")]}
    expected = [*HI, {"role": "system", "content": "Now in French."}, {"role": "user", "content": "Go"}]
    assert messages_of([*HI, late, {"role": "user", "content": [text("Go")]}]) == expected


def test_a_turn_with_tools_and_reasoning():
    turns = [
        {"role": "user", "content": [text("One."), text("Two.", cache_control={"type": "ephemeral"})]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
                {"type": "redacted_thinking", "data": "AAAA"},
                text("I "),
                text("read."),
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
                {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("first"), text("second")]},
                text("By the way:"),
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_3"},
                {"type": "tool_result", "tool_use_id": "toolu_4", "content": [REFERENCE]},
                text("Go on."),
            ],
        },
    ]
    user, assistant, *rest = messages_of(turns)
    assert user == {"role": "user", "content": "One.\nTwo."}
    calls = assistant.pop("tool_calls")
    assert assistant == {"role": "assistant", "content": "I read.", "reasoning": "Hm."}
    assert [(call["id"], call["type"]) for call in calls] == [("toolu_1", "function"), ("toolu_2", "function")]
    assert calls[0]["function"] == {"name": "read", "arguments": {"path": "a"}}
    assert calls[1]["function"] == {"name": "now", "arguments": {}}
    assert rest == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "first\nsecond"},
        {"role": "user", "content": "By the way:"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no clock"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "tool", "tool_call_id": "toolu_4", "content": "The tool a can be called now."},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("content", "continues"),
    [("It is", True), ([text("It "), text("is")], True), ("", False), ([{"type": "redacted_thinking"}], False)],
)
def test_an_answer_that_has_begun_is_continued(content, continues):
    chat = chat_of([*HI, {"role": "assistant", "content": content}])
    assert (chat.continue_final_message, chat.add_generation_prompt) == (continues, not continues)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages=[]"),
        ({"messages": ["Hi"]}, "messages.0='Hi' is no message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role='tool'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content=None"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages.0.content.0='Hi' is no block"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text=None"),
        ({"messages": [{"role": "user", "content": [text("a"), IMAGE]}]}, "messages.0.content.1.type='image'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.content.0.type='image'"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0.content.0.type='image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "0.tool_use_id=None"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "0.name=None"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "", "input": 1}]}]},
            "content.0.name=''",
        ),
        ({"system": 7}, "system=7"),
        ({"system": [IMAGE]}, "system.0.type='image'"),
        ({"tools": "read"}, "tools='read'"),
        ({"tools": ["read"]}, "tools.0='read' is no tool"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name=None"),
        ({"tools": [{"name": "a", "input_schema": 1}]}, "tools.0.input_schema=1"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "write"}}, "'write', which is not in tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice='required' needs tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type='some'"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"thinking": {"type": 7}}, "thinking.type=7"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "has no schema"),
    ],
)
def test_what_is_refused_is_named(fields, words):
    with pytest.raises(APIError) as info:
        chat_of(**{"messages": HI} | fields)
    assert words in info.value.message
    assert info.value.status == 400


def test_a_conversation_as_a_template_writes_it(tmp_path):
    """Blocks of thinking and late system messages reach a template of Qwen's, which refuses the latter itself."""
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a"}}
    turns = [
        *HI,
        {"role": "system", "content": "Late."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
    ]
    state = state_of(write_byte_tokenizer(tmp_path))
    prompt = chat_text(state, chat_of(turns, system=[text("Be."), text("Brief.")], thinking={"type": "disabled"}))
    assert prompt == (
        "<|im_start|>system\nBe.\nBrief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>system\nLate.<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n"
        "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n{CLOSED}"
    )
    begun = chat_text(state, chat_of([*HI, {"role": "assistant", "content": "It is"}]))
    assert begun.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nIt is")


# ---- Other fields


def test_tools_and_their_choice():
    search = {"type": "web_search_20250305", "name": "web_search"}
    chat = chat_of(tools=[TOOL, search, TOOL | {"type": "custom", "name": "write", "description": None}])
    write = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
    assert (chat.tools, chat.tool_choice, chat.parallel_tool_calls) == ([READ, write], "auto", True)
    assert parse(MessagesRequest, {"max_tokens": 9, "messages": HI, "tools": [TOOL, search]}).skipped_tools == [
        "web_search_20250305"
    ]
    for choice, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert chat_of(tools=[TOOL], tool_choice={"type": choice}).tool_choice == expected
    named = chat_of(tools=[TOOL], tool_choice={"type": "tool", "name": "read", "disable_parallel_tool_use": True})
    assert (named.tool_name, named.parallel_tool_calls) == ("read", False)
    for tools in (None, [], [search]):
        without = chat_of(tools=tools, tool_choice={"type": "auto"})
        assert (without.tools, without.tool_choice) == (None, "none")


def test_fields_of_sampling():
    chat = chat_of(stop_sequences=["END"], temperature=0.5, top_p=0.9, top_k=7, stream=True, seed=3)
    fields = chat.sampling_fields()
    assert (fields["stop"], fields["temperature"], fields["top_p"], fields["top_k"]) == (["END"], 0.5, 0.9, 7)
    assert (fields["max_tokens"], fields["seed"], chat.stream, chat.n) == (9, 3, True, 1)


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}),
        ({"type": "between_tools"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        (None, {}),
    ],
)
def test_thinking_is_told_to_the_template(thinking, expected):
    assert chat_of(thinking=thinking).template_kwargs({}) == expected
    more = chat_of(thinking=thinking, chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert more.template_kwargs({}) == {"enable_thinking": True, "a": 1}


def test_a_schema_of_the_text():
    config = {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    (demand,) = chat_of(output_config=config).demands()
    assert demand.params == {"json": {"type": "object"}}
    assert chat_of(output_config={"effort": "high"}).demands() == []


def test_what_anthropic_has_beyond_is_ignored():
    beyond = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "container": None,
        "n": 4,  # means nothing in this API
        "whatever_beta": {"a": [1]},
    }
    chat = chat_of(**beyond)
    assert chat.model_dump() == chat_of().model_dump()


def test_tokens_are_counted_of_the_same_chat():
    body = {"messages": HI, "system": "Be.", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted, asked = parse(CountTokensRequest, body).chat(), chat_of(**body)
    assert (counted.messages, counted.template_kwargs({})) == (asked.messages, asked.template_kwargs({}))
