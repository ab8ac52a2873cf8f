"""Responses without a server: what chat a body becomes, and which events a chat's pieces become."""

import asyncio

import pytest

from dflash_jax.serve.answers.events import ChatEvent
from dflash_jax.serve.api.openai.responses_events import ResponseEvents
from dflash_jax.serve.http.streaming import EventStream, event, named_event
from dflash_jax.serve.protocol import APIError, ResponsesRequest, parse
from dflash_jax.serve.protocol.response_items import seal, unseal
from dflash_jax.serve.protocol.response_tools import Toolbox
from dflash_jax.text.parsing import Delta, ToolCallDelta

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "?", "parameters": CITY, "strict": False}
CLOCK = {"type": "function", "name": "clock"}
CHAT_WEATHER = {"type": "function", "function": {"name": "weather", "description": "?", "parameters": CITY}}
CHAT_CLOCK = {"type": "function", "function": {"name": "clock"}}
USER = {"role": "user", "content": "Hi"}


def chat_of(**body):
    request = parse(ResponsesRequest, {"input": "Hi"} | body)
    return request.chat(Toolbox.of(request.tools))


def messages_of(*items, **body):
    return chat_of(input=list(items), **body).messages


def refusal(**body) -> APIError:
    with pytest.raises(APIError) as refused:
        chat_of(**body)
    assert refused.value.status == 400
    return refused.value


# ---- Items


def test_a_text_and_instructions():
    assert chat_of().messages == [USER]
    assert chat_of(instructions="Be brief.").messages == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
@pytest.mark.parametrize("part", ["input_text", "output_text"])
def test_messages(role, part):
    content = [{"type": part, "text": "a", "annotations": []}]
    for item in ({"type": "message", "role": role, "content": content}, {"role": role, "content": "a"}):
        assert messages_of(item) == [{"role": role, "content": "a"}]
    parts = messages_of({"role": role, "content": [*content, {"type": part, "text": "b"}]})[0]["content"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def call(call_id="c1", name="weather", arguments='{"city": "Rome"}', **further):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **further}


def chat_call(call_id="c1", name="weather", arguments=None):
    arguments = {"city": "Rome"} if arguments is None else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_items_of_an_assistant_are_one_turn():
    messages = messages_of(
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "See:"}]},
        call(),
        call("c2", "clock", ""),
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    )
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "See:",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [chat_call(), chat_call("c2", "clock", {})],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]


def test_a_result_ends_the_turn():
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    messages = messages_of(call(), result, call("c2"), USER, {"role": "assistant", "content": "Go."})
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert [message.get("tool_calls") for message in messages[::2]] == [[chat_call()], [chat_call("c2")], None]


def test_reasoning_behind_a_call_is_a_turn_of_its_own():
    first, second = messages_of(call(), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]})
    assert (first["tool_calls"], "reasoning" in first) == ([chat_call()], False)
    assert second["reasoning"] == "Hm."


def test_sealed_reasoning_comes_back_and_that_of_others_does_not():
    text = "Größe 日本"
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal(text)}
    assert messages_of(USER, item)[1]["reasoning"] == text
    for foreign in ("gAAAAB", "dflash:%", "dflash:/w==", 7):
        assert unseal(foreign) == ""
        assert messages_of(USER, item | {"encrypted_content": foreign}) == [USER]


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        ({"type": "web_search_call", "id": "ws"}, "input.0.type", "'web_search_call'"),
        ({"type": "item_reference", "id": "x"}, "input.0.type", "when they set store=false"),
        ({"id": "x"}, "input.0.type", "None"),
        ({"type": ["message"]}, "input.0.type", "['message']"),
        ({"role": "tool", "content": "a"}, "input.0.role", "'tool'"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.0.content.0.type", "'input_image'"),
        ({"role": "user", "content": 7}, "input.0.content", "7"),
        (call(arguments="{"), "input.0.arguments", "not valid JSON"),
        (call(arguments="7"), "input.0.arguments", "JSON object"),
        (call(call_id=None), "input.0.call_id", "non-empty string"),
        (call(name=""), "input.0.name", "non-empty string"),
        ({"type": "function_call_output", "output": "a"}, "input.0.call_id", "non-empty string"),
        ({"type": "reasoning", "summary": "a"}, "input.0.summary", "list of parts"),
        ({"type": "reasoning", "encrypted_content": "gAAAAB"}, "input", "no message"),
    ],
)
def test_items_that_are_refused(item, param, says):
    error = refusal(input=[item])
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize("value", [[], 7, ["Hi"], {"role": "user"}])
def test_no_input(value):
    assert refusal(input=value).param == "input"


# ---- Tools


def test_functions_are_taken_and_others_passed_over():
    chat = chat_of(tools=[WEATHER, {"type": "web_search"}, {"type": "custom", "name": "patch"}, CLOCK])
    assert chat.tools == [CHAT_WEATHER, CHAT_CLOCK]
    assert chat.tool_choice == "auto"
    assert Toolbox.of([{"type": "web_search"}, {"type": "custom"}]).skipped == {"web_search", "custom"}
    for choice in (None, "auto", "none"):
        without = chat_of(tools=[{"type": "web_search"}], tool_choice=choice)
        assert (without.tools, without.tool_choice) == (None, "none")


def test_a_namespace_gives_its_functions_and_is_told_again():
    space = {"type": "namespace", "name": "mcp", "description": "?", "tools": [CLOCK, WEATHER, {"type": "custom"}]}
    box = Toolbox.of([space, WEATHER])
    assert [*box.tools] == ["clock", "mcp__weather", "weather"]
    assert box.origins == {"clock": ("mcp", "clock"), "mcp__weather": ("mcp", "weather"), "weather": ("", "weather")}
    items = [USER, call(namespace="mcp"), call(), call(name="gone")]
    (_, turn) = messages_of(*items, tools=[space, WEATHER])
    assert [made["function"]["name"] for made in turn["tool_calls"]] == ["mcp__weather", "weather", "gone"]


def test_choices():
    tools = [WEATHER, CLOCK]
    for choice in ("auto", "none", "required"):
        assert chat_of(tools=tools, tool_choice=choice).tool_choice == choice
    assert chat_of(tools=tools, tool_choice={"type": "function", "name": "clock"}).tool_name == "clock"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    chat = chat_of(tools=[*tools, {"type": "web_search"}], tool_choice=allowed)
    assert (chat.tools, chat.tool_choice) == ([CHAT_CLOCK], "required")
    allowed["tools"].append({"type": "web_search"})
    assert chat_of(tools=[*tools, {"type": "web_search"}], tool_choice=allowed).tools == [CHAT_CLOCK]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [WEATHER | {"parameters": []}]}, "tools.0.parameters"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{}]}]}, "tools.0.tools.0.name"),
        ({"tools": [{"type": 7}]}, "tools.0"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [7]}]}, "tools.0.tools.0"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK]}},
            "tool_choice.tools.0",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_tools_that_are_refused(body, param):
    assert refusal(**body).param == param


# ---- Other fields


def test_fields_become_those_of_a_chat():
    chat = chat_of(
        model="m",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        reasoning={"effort": "low", "summary": "auto"},
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_obfuscation": False},
        seed=3,
        text={"format": {"type": "json_schema", "name": "n", "schema": CITY, "strict": True}, "verbosity": "low"},
    )
    assert (chat.model, chat.temperature, chat.top_p, chat.seed) == ("m", 0.5, 0.9, 3)
    assert (chat.reasoning_effort, chat.parallel_tool_calls, chat.stream) == ("low", False, True)
    assert chat.sampling_fields()["max_tokens"] == 7
    assert chat.demands() == [("text.format", {"json": CITY})]
    assert chat_of(text={"format": {"type": "json_object"}}).demands() == [("text.format", {"json_object": True})]
    assert chat_of(text={"format": {"type": "text"}}).demands() == []
    forced = {"text": {"format": {"type": "json_object"}}, "tools": [WEATHER]}
    for choice in ("required", {"type": "function", "name": "weather"}):
        assert [demand.name for demand in chat_of(tool_choice=choice, **forced).demands()] == ["tool_choice"]


ACCEPTED = {
    "metadata": {"a": "b"}, "store": True, "user": "me", "include": ["reasoning.encrypted_content"],
    "truncation": "auto", "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
    "client_metadata": {"a": "b"}, "previous_response_id": None, "background": False, "max_tool_calls": 3,
}  # fmt: skip


def test_fields_that_change_nothing():
    chat = chat_of(**ACCEPTED)
    assert chat.messages == [USER]
    echo = parse(ResponsesRequest, {"input": "Hi", **ACCEPTED}).echo()
    assert (echo["metadata"], echo["user"], echo["prompt_cache_key"], echo["store"]) == ({"a": "b"}, "me", "k", False)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items of earlier turns in input"),
        ({"conversation": "conv_1"}, "conversation", "send the items of earlier turns in input"),
        ({"background": True}, "background", "stores no answers"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"messages": [USER]}, "messages", "use input"),
        ({"top_logprobs": 2}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "no schema"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "'extreme'"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "cannot write"),
    ],
)
def test_fields_that_are_refused(body, param, says):
    error = refusal(**body)
    assert error.param == param
    assert says in error.message


# ---- Events


def play(deltas, finish="stop", origins=None, is_sealed=False):
    """The events of a chat that gives these pieces, one at a time."""
    events = ResponseEvents({"id": "resp_1", "object": "response"}, origins or {}, is_sealed=is_sealed)
    played = [*events.begin()]
    for delta in deltas:
        assert not [*events.begin()]
        played += events.read(ChatEvent([delta], None))
    played += events.end(finish, {"usage": 1})
    assert [event["sequence_number"] for event in played] == list(range(len(played)))
    return played


def names_of(events):
    return [event["type"].removeprefix("response.") for event in events]


def text_names(what):
    return ["output_item.added", "content_part.added", *[f"{what}.delta"] * 2, f"{what}.done", "content_part.done"]


def test_events_of_a_text():
    events = play([Delta(content="Go "), Delta(content="on.")])
    assert names_of(events) == [
        "created", "in_progress", *text_names("output_text"), "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["response"]["status"] for event in (*events[:2], events[-1])] == [*["in_progress"] * 2, "completed"]
    ids = {event["item_id"] for event in events[3:8]} | {events[2]["item"]["id"], events[8]["item"]["id"]}
    assert len(ids) == 1
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert events[6]["text"] == events[7]["part"]["text"] == "Go on."
    response = events[-1]["response"]
    assert response["output"] == [events[8]["item"]]
    assert response["output"][0]["content"][0]["text"] == "Go on."
    assert (response["usage"], response["incomplete_details"]) == (1, None)


def test_events_of_reasoning_and_calls():
    first, second = ToolCallDelta(0, "c0", "mcp__f"), ToolCallDelta(1, "c1", "g", "{}")
    deltas = [
        Delta(reasoning="H"), Delta(reasoning="m."), Delta(content="A"), Delta(content="B"), Delta(tool_call=first),
        Delta(tool_call=ToolCallDelta(0, arguments='{"a"')), Delta(tool_call=ToolCallDelta(0, arguments=": 1}")),
        Delta(tool_call=second),
    ]  # fmt: skip
    events = play(deltas, "tool_calls", {"mcp__f": ("mcp", "f"), "g": ("", "g")}, is_sealed=True)
    arguments = "function_call_arguments"
    assert names_of(events) == [
        "created", "in_progress",
        *text_names("reasoning_text"), "output_item.done",
        *text_names("output_text"), "output_item.done",
        "output_item.added", *[f"{arguments}.delta"] * 2, f"{arguments}.done", "output_item.done",
        "output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    reasoning, message, call_f, call_g = events[-1]["response"]["output"]
    assert (reasoning["content"], reasoning["summary"]) == ([{"type": "reasoning_text", "text": "Hm."}], [])
    assert unseal(reasoning["encrypted_content"]) == "Hm."
    assert message["content"][0]["text"] == "AB"
    assert (call_f["call_id"], call_f["namespace"], call_f["name"]) == ("c0", "mcp", "f")
    assert call_f["arguments"] == '{"a": 1}'
    assert (call_g["call_id"], call_g["name"], call_g["arguments"], "namespace" in call_g) == ("c1", "g", "{}", False)
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    assert {*places} == {0, 1, 2, 3}
    back = messages_of(USER, *events[-1]["response"]["output"])[1]  # what came is what a client may send back
    assert (back["reasoning"], back["content"], len(back["tool_calls"])) == ("Hm.", "AB", 2)


def test_events_of_a_cut():
    events = play([Delta(reasoning="Hm."), Delta(content="Go")], "length")
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert (last["response"]["status"], last["response"]["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_nothing_is_an_empty_message_unless_it_was_cut():
    (message,) = play([])[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""
    assert play([], "length")[-1]["response"]["output"] == []
    assert play([], "abort")[-1]["response"]["status"] == "cancelled"


def test_a_malformed_call_is_never_done():
    begun = Delta(tool_call=ToolCallDelta(0, "c0", "f", "{"))
    events = play([begun, Delta(tool_call=ToolCallDelta(0, retracted=True)), Delta(content="<tool_call>")])
    assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"] == ["message"]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]


@pytest.mark.parametrize(("status", "code"), [(500, "server_error"), (400, "invalid_prompt")])
def test_events_of_a_failure(status, code):
    events = ResponseEvents({"id": "resp_1"}, {}, is_sealed=False)
    played = [*events.fail(APIError("It broke.", status, param="x"))]
    assert names_of(played) == ["created", "in_progress", "error", "failed"]
    assert played[2] == {
        "type": "error", "code": code, "message": "It broke.", "param": "x", "sequence_number": 2,
    }  # fmt: skip
    assert played[3]["response"]["error"] == {"code": code, "message": "It broke."}
    assert played[3]["response"]["status"] == "failed"


def test_a_stream_that_breaks_ends_with_the_events_of_a_failure():
    events = ResponseEvents({"id": "resp_1"}, {}, is_sealed=False)

    async def broken():
        for begun in events.begin():
            yield named_event(begun)
        raise APIError("It broke.", 503)

    async def read():
        stream = await EventStream.of(broken(), failure=lambda error: map(named_event, events.fail(error)))
        return [block async for block in stream.body_iterator]

    names = [block.split(b"\n")[0] for block in asyncio.run(read())]
    assert names == [
        b"event: response.created", b"event: response.in_progress", b"event: error", b"event: response.failed",
    ]  # fmt: skip
    assert named_event({"type": "a"}) == b"event: a\n" + event({"type": "a"})
