"""Tool calls and JSON never change: not by the drafter, not by streaming, not by what else runs."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import httpx
import pytest

PROMPTS = (
    "You may reproduce and distribute copies of the",
    "7. Disclaimer of Warranty. Unless required by",
    "8. Limitation of Liability. In no event",
    "How is the weather in Oslo, in Łódź and in 東京?",
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
ROOM = {
    "type": "object",
    "properties": {
        "nights": {"type": "integer", "minimum": 1, "maximum": 99},
        "sea": {"type": "boolean"},
        "guests": {"type": "array", "items": {"enum": ["a", "b", "the Licensor"]}, "maxItems": 3},
    },
    "required": ["nights", "sea", "guests"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "book", "parameters": ROOM}},
]
# What models write when they may call tools, as a regular expression: the parser of calls reads it.
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Za-z ]{1,12}"\}\}\n</tool_call>'
WRITTEN = rf"[^<]{{60}}({CALL}\n?){{1,2}}"  # the text before is what the drafter foresees
KINDS = {
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "book"}}},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "auto": {"tools": TOOLS, "structured_outputs": {"regex": WRITTEN}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "room", "schema": ROOM}}},
}


def bodies(number: int) -> list[dict]:
    """Requests that differ in what they ask for, how hot they sample, their seed and their prompt."""
    kinds = [*KINDS.values()]
    return [
        kinds[i % len(kinds)]
        | {
            "messages": [{"role": "user", "content": f"{i}: {PROMPTS[i // len(kinds) % len(PROMPTS)]}"}],
            "temperature": (0, 0.7, 1.5)[i % 3],
            "seed": i,
            "max_tokens": 96,
        }
        for i in range(number)
    ]


def whole(choice: dict) -> dict:
    """A choice without the ids of its calls, which are made up anew for each answer."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {"content": message["content"] or "", "calls": calls, "finish_reason": choice["finish_reason"]}


def joined(lines) -> dict:
    """The choice that the chunks of a stream make.

    Pieces of a call that is cut off have left before it was known, and its text follows them: they are left out.
    """
    content, calls, finish = "", [], None
    for line in lines:
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for piece in choice["delta"].get("tool_calls") or ():
            if piece["index"] == len(calls):
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    calls = [call for call in calls if is_json(call["arguments"])]
    return {"content": content, "calls": calls, "finish_reason": finish}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_joined_is_whole():
    """The readers themselves agree."""
    pieces = [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a"'}}]
    more = [{"index": 0, "function": {"arguments": ": 1}"}}]
    lines = [
        "data: " + json.dumps({"choices": [{"delta": {"tool_calls": calls}, "finish_reason": finish}]})
        for calls, finish in ((pieces, None), (more, "tool_calls"))
    ]
    call = {"id": "b", "function": {"name": "f", "arguments": '{"a": 1}'}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    assert joined([*lines, "data: [DONE]"]) == whole(choice)


def answers_of(live, asked: list[dict], *, drafts: bool) -> tuple[dict[tuple[int, bool], dict], int]:
    """The answers by request and by whether they were streamed, eight at a time, and how many drafts were accepted."""
    jobs = [*product(range(len(asked)), (False, True))]
    random.Random(drafts).shuffle(jobs)

    def answer(http: httpx.Client, number: int, streams: bool) -> tuple[dict, int]:
        reply = http.post("/v1/chat/completions", json=asked[number] | {"speculation": drafts, "stream": streams})
        assert reply.status_code == 200, reply.text
        if streams:
            return joined(reply.text.splitlines()), 0
        spec = reply.json()["metrics"]["speculative_decoding"]
        assert drafts or not spec["num_draft_tokens"]
        return whole(reply.json()["choices"][0]), spec["num_accepted_draft_tokens"]

    with httpx.Client(base_url=live.base, timeout=300) as http, ThreadPoolExecutor(8) as threads:
        got = [*threads.map(lambda job: answer(http, *job), jobs)]
    return {job: choice for job, (choice, _) in zip(jobs, got, strict=True)}, sum(accepted for _, accepted in got)


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.long)])
def test_the_same_bytes_whatever_drafts_streams_or_runs_beside(live, tight, number):
    # The bias is against white space between the parts of JSON, which the model would write without end.
    asked = [body | ({} if "structured_outputs" in body else {"logit_bias": tight}) for body in bodies(number)]
    plain, _ = answers_of(live, asked, drafts=False)  # apart: beside drafted requests these would be drafted, too
    drafted, accepted = answers_of(live, asked, drafts=True)
    for i in range(number):
        alike = {json.dumps(answers[i, streams]) for answers in (plain, drafted) for streams in (False, True)}
        assert len(alike) == 1, (asked[i], alike)
    answered = [plain[i, False] for i in range(number)]
    assert sum(bool(choice["calls"]) for choice in answered) >= 0.7 * number
    assert sum(choice["finish_reason"] != "length" for choice in answered) >= 0.7 * number
    assert len({json.dumps(choice) for choice in answered}) >= 0.6 * number
    assert accepted > number  # the comparison says something
