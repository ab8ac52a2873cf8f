"""OpenAI's own client against the server: chats, completions, logprobs, tools, reasoning and structured outputs."""

import asyncio
import json
import math

import openai
import pytest

from tests.serve.live import NAME, Thing, says

LICENCE = "You may reproduce and distribute copies of the"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
REASONED = "<think>\nRome it is.\n</think>\n\nGo to Rome."


def chat(client, messages=HI, **options):
    return client.chat.completions.create(model=NAME, messages=messages, **{"max_tokens": 200} | options)


def complete(client, prompt=LICENCE, **options):
    return client.completions.create(model=NAME, prompt=prompt, **{"temperature": 0} | options)


def test_a_chat(client):
    answer = chat(client, temperature=0, max_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.model == NAME
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content.strip()
    usage = answer.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    again = chat(client, temperature=0, max_completion_tokens=12, extra_body={"unknown_field": 1}, user="me")
    assert again.choices[0].message.content == choice.message.content


def test_the_async_client_is_answered_the_same(client, live):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{live.base}/v1", api_key="none", timeout=120) as client_:
            complete_answer = chat(client_, temperature=0, max_tokens=12)
            stream = chat(client_, temperature=0, max_tokens=12, stream=True)
            answer, chunks = await asyncio.gather(complete_answer, stream)
            return answer.choices[0].message.content, [chunk async for chunk in chunks]

    text, chunks = asyncio.run(ask())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert text == chat(client, temperature=0, max_tokens=12).choices[0].message.content


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve(model.id)) == (NAME, model)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_seed_reproduces_every_completion(client):
    options = {"prompt": "The", "n": 3, "temperature": 1, "seed": 7, "max_tokens": 8}
    texts = [choice.text for choice in complete(client, **options).choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in complete(client, **options).choices] == texts
    alone = [complete(client, **options | {"n": 1, "seed": 7 + i}).choices[0].text for i in range(3)]
    assert alone == texts  # completion i has seed + i


def test_prompts_of_every_kind_give_the_same(client, live):
    other = "Unless required by applicable law or"
    ids, other_ids = (live.post("/tokenize", {"prompt": text})[1]["tokens"] for text in (LICENCE, other))
    answers = [complete(client, prompt, max_tokens=6) for prompt in (LICENCE, ids, [LICENCE, other], [ids, other_ids])]
    first = answers[0].choices[0].text
    assert [answer.choices[0].text for answer in answers] == [first] * 4
    assert answers[2].choices[1].text == answers[3].choices[1].text
    assert answers[3].usage.prompt_tokens == len(ids) + len(other_ids)
    assert answers[3].usage.completion_tokens == 12


def test_choices_of_a_batch_come_prompt_by_prompt(client):
    options = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 4, "extra_body": {"return_token_ids": True}}
    choices = complete(client, ["The", LICENCE], **options).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    lengths = [len(choice.prompt_token_ids) for choice in choices]
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
    alone = complete(client, LICENCE, **options).choices
    assert [choice.text for choice in choices[2:]] == [choice.text for choice in alone]


def test_a_stop_string_is_cut_off_unless_it_is_asked_for(client):
    text = complete(client, max_tokens=24).choices[0].text
    stop = text[12:18]
    cut = complete(client, max_tokens=24, stop=["never", stop]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[: text.index(stop)], "stop", stop)
    kept = complete(client, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == cut.text + stop


def test_a_stop_token_is_told(client):
    first = complete(client, max_tokens=3, extra_body={"return_token_ids": True}).choices[0]
    stop = first.token_ids[1]
    choice = complete(client, max_tokens=9, extra_body={"stop_token_ids": [stop], "return_token_ids": True}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == first.token_ids[:2]


def check_alternatives(logprob, top, number):
    """The likeliest come first, the token's logprob among them if it belongs there; probabilities sum to at most 1."""
    logprobs = [entry.logprob for entry in top]
    assert len(logprobs) == number
    assert logprobs == sorted(logprobs, reverse=True)
    assert sum(map(math.exp, logprobs)) <= 1 + 1e-5
    assert logprob <= logprobs[0] + 1e-6
    assert logprob in logprobs or logprob <= logprobs[-1]


def test_logprobs_of_a_chat(client):
    choice = chat(client, temperature=1, seed=1, max_tokens=10, logprobs=True, top_logprobs=4).choices[0]
    assert len(choice.logprobs.content) == 10
    for entry in choice.logprobs.content:
        check_alternatives(entry.logprob, entry.top_logprobs, 4)
        assert bytes(entry.bytes).decode() == entry.token
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    plain = chat(client, temperature=1, seed=1, max_tokens=10, logprobs=True).choices[0]
    assert plain.message.content == choice.message.content
    assert [entry.top_logprobs for entry in plain.logprobs.content] == [[]] * 10


def test_bytes_of_tokens_inside_characters(client):
    outputs = {"structured_outputs": {"choice": ["日本語"]}}
    choice = chat(client, logprobs=True, top_logprobs=1, extra_body=outputs).choices[0]
    entries = choice.logprobs.content
    assert len(entries) > 3
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == choice.message.content == "日本語"


def test_logprobs_of_a_completion(client):
    choice = complete(client, max_tokens=8, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(8)]
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert list(top.values()) == sorted(top.values(), reverse=True)  # greedy: the token is the likeliest
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())
    as_ids = complete(client, max_tokens=8, logprobs=1, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    assert all(token.startswith("token_id:") for token in as_ids.logprobs.tokens)
    assert as_ids.logprobs.text_offset == logprobs.text_offset


def test_echo_scores_a_prompt_as_lm_eval_asks(client, live):
    text = f"{LICENCE} 日本 Work"
    ids = live.post("/tokenize", {"prompt": text})[1]["tokens"]
    choice = complete(client, [ids], max_tokens=1, logprobs=1, echo=True, seed=1234).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(text)
    lengths = {
        len(column)
        for column in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    }
    assert lengths == {len(ids) + 1}
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    assert logprobs.tokens[0] == "You"
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token == "\ufffd" or choice.text[offset:].startswith(token)  # else a part of a character
    parts = [offset for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True) if token == "\ufffd"]
    assert set(parts) == {text.index("日"), text.index("本")}
    # Greedy continuations are scored as they were generated.
    choice = complete(client, max_tokens=5, logprobs=1, extra_body={"return_token_ids": True}).choices[0]
    context = live.post("/tokenize", {"prompt": LICENCE})[1]["tokens"]
    scored = complete(client, context + choice.token_ids, max_tokens=1, logprobs=1, echo=True).choices[0].logprobs
    assert scored.token_logprobs[len(context) : -1] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)
    for logprob, top in zip(
        scored.token_logprobs[len(context) : -1], scored.top_logprobs[len(context) : -1], strict=True
    ):
        assert logprob == max(top.values())


def test_echo_without_tokens(client):
    extra = {"return_token_ids": True}
    choice = complete(client, max_tokens=0, echo=True, logprobs=0, extra_body=extra).choices[0]
    assert (choice.text, choice.finish_reason, choice.token_ids) == (LICENCE, "length", [])
    assert "".join(choice.logprobs.tokens) == LICENCE
    assert len(choice.logprobs.token_logprobs) == len(choice.prompt_token_ids)
    choices = complete(client, ["The", LICENCE], max_tokens=0, echo=True).choices
    assert [choice.text for choice in choices] == ["The", LICENCE]
    cut = complete(client, max_tokens=0, echo=True, extra_body=extra | {"truncate_prompt_tokens": 2}).choices[0]
    assert len(cut.prompt_token_ids) == 2
    assert LICENCE.endswith(cut.text)
    assert 0 < len(cut.text) < len(LICENCE)


def test_prompt_logprobs_and_token_ids(client):
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    answer = chat(client, temperature=0, max_tokens=4, extra_body=extra)
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert len(rest) + 1 == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    for token_id, alternatives in zip(answer.prompt_token_ids[1:], rest, strict=True):
        assert alternatives[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
    assert len(answer.choices[0].token_ids) == 4
    choice = complete(client, max_tokens=4, extra_body=extra).choices[0]
    assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)


def test_parse_into_a_model(client, tight):
    options = {"response_format": Thing, "max_tokens": 200, "seed": 2, "logit_bias": tight}
    answer = client.chat.completions.parse(model=NAME, messages=HI, **options)
    thing = answer.choices[0].message.parsed
    assert isinstance(thing, Thing)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model=NAME, messages=HI, **options) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == thing


def test_any_json_object(client, tight):
    options = {"response_format": {"type": "json_object"}, "extra_body": {"regex": None}, "logit_bias": tight}
    choice = chat(client, temperature=0, max_tokens=60, **options).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"structured_outputs": {"regex": "(cat|dog){2}"}}, {"catcat", "catdog", "dogcat", "dogdog"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, {"ab", "ac"}),
        ({"structured_outputs": {"json": {"const": 7}}}, {"7"}),
        ({"regex": "[xy]"}, {"x", "y"}),
    ],
)
def test_structured_outputs(client, extra, allowed):
    choice = chat(client, temperature=1, seed=4, extra_body=extra).choices[0]
    assert choice.message.content in allowed
    assert choice.finish_reason == "stop"


def test_a_required_tool(client, tight):
    options = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": tight, "seed": 1}
    choice = chat(client, tools=[WEATHER], **options).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments).keys() == {"city", "days"}


def test_a_named_tool(client, tight):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(client, tools=[TIME, WEATHER], tool_choice=choice, logit_bias=tight, seed=1).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("parallel", [True, False])
def test_the_models_own_calls(client, parallel):
    text = f"Let me see.\n{CALL}\n{CALL_TIME}"
    options = {"tools": [WEATHER, TIME], "parallel_tool_calls": parallel, "extra_body": says(text)}
    choice = chat(client, **options).choices[0]
    names = [call.function.name for call in choice.message.tool_calls]
    assert names == (["get_weather", "get_time"] if parallel else ["get_weather"])
    assert choice.message.content == "Let me see."
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome", "days": 2}
    assert len({call.id for call in choice.message.tool_calls}) == len(names)
    ignored = chat(client, tools=[WEATHER], tool_choice="none", extra_body=says(text)).choices[0]
    assert (ignored.message.content, ignored.message.tool_calls) == (text, None)
    assert ignored.finish_reason == "stop"


def test_a_conversation_with_calls_goes_on(client):
    first = chat(client, tools=[WEATHER], extra_body=says(CALL)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    answer = chat(client, [*HI, first.model_dump(exclude_none=True), result], tools=[WEATHER], extra_body=says("Sun."))
    assert answer.choices[0].message.content == "Sun."


def test_reasoning_is_told_apart(client):
    answer = chat(client, extra_body=says(REASONED))
    message = answer.choices[0].message
    assert message.reasoning == message.reasoning_content == "\nRome it is.\n"
    assert message.content == "\n\nGo to Rome."
    reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < reasoning_tokens < answer.usage.completion_tokens
    ids = chat(client, extra_body=says(REASONED) | {"return_token_ids": True}).choices[0].token_ids
    detokenized = client.post("/../detokenize", body={"tokens": ids[:reasoning_tokens]}, cast_to=object)["prompt"]
    assert detokenized.startswith("<think>\nRome it is.\n</think>")
    assert len(detokenized) - len("<think>\nRome it is.\n</think>") < 3


def test_reasoning_can_be_left_out_or_left_in(client):
    without = chat(client, extra_body=says(REASONED) | {"include_reasoning": False}).choices[0].message
    assert without.content == "\n\nGo to Rome."
    assert not hasattr(without, "reasoning")
    within = chat(client, extra_body=says(REASONED) | {"separate_reasoning": False}).choices[0].message
    assert within.content == REASONED
    answer = chat(client, extra_body=says("Rome."))
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
