"""Streams: the shape of chunks, that they add up to the complete answer, and what happens when a client leaves."""

import json
import threading
from contextlib import closing

import httpx
import pytest

from tests.serve.live import NAME, says

LICENCE = "You may reproduce and distribute copies of the"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
ENDLESS = {"prompt": LICENCE, "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "speculation": False}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
CALLS = (
    'Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
WORLD = "Größe: 日本語 🌊 👩‍🚀 and é中文"


def events(live, path, body):
    """The data of each event, decoded but for the last, which must be [DONE]; every line must be framed."""
    with httpx.stream("POST", live.base + path, json=body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = b"".join(answer.iter_raw()).split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks[:-2])
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]


def chat_chunks(live, **options):
    return events(live, "/v1/chat/completions", CHAT | options)


def complete_chunks(live, **options):
    return events(live, "/v1/completions", {"prompt": LICENCE, "temperature": 0} | options)


def choices(chunks):
    return [choice for chunk in chunks for choice in chunk["choices"]]


def joined(chunks, index=0):
    """The text of a completion."""
    own_choices = [choice for choice in choices(chunks) if choice["index"] == index]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in own_choices
    )


def accumulated(chunks):
    """The text of the one completion, after each chunk."""
    shown, texts = "", []
    for choice in choices(chunks):
        shown += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts.append(shown)
    return texts


def test_the_shape_of_a_chat(live):
    chunks = chat_chunks(live, temperature=0, max_tokens=12, stream_options={"include_usage": True})
    *contents, last = chunks
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", chunks[0]["created"], NAME)
    }
    first, *others = choices(contents)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert first["finish_reason"] is None
    assert all(choice["delta"].keys() <= {"content"} for choice in others)
    assert all("usage" not in chunk for chunk in contents)
    assert [choice["finish_reason"] for choice in others] == [None] * (len(others) - 1) + ["length"]
    assert "stop_reason" in others[-1]
    assert all("stop_reason" not in choice for choice in others[:-1])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 12
    assert last["usage"]["prompt_tokens_details"].keys() == {"cached_tokens"}
    assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == 15
    answer = live.post("/v1/chat/completions", CHAT | {"temperature": 0, "max_tokens": 12})[1]
    assert joined(chunks) == answer["choices"][0]["message"]["content"]


def test_the_end_comes_once_and_last_where_everything_comes_at_once(live):
    first, last = choices(chat_chunks(live, temperature=0, max_tokens=1))
    assert (first["delta"]["role"], first["finish_reason"]) == ("assistant", None)
    assert (last["delta"].keys(), last["finish_reason"]) == ({"content"}, "length")


def test_usage_so_far_in_every_chunk(live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunks in (
        chat_chunks(live, temperature=0, max_tokens=12, stream_options=options),
        complete_chunks(live, max_tokens=12, stream_options=options),
    ):
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert counts[0] < 12


def test_without_being_asked_no_usage(live):
    chunks = complete_chunks(live, max_tokens=5)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_completions_side_by_side_are_those_of_a_whole_answer(live):
    options = {"prompt": ["The", "Work"], "n": 2, "temperature": 1, "seed": 11, "max_tokens": 10}
    answers = live.post("/v1/completions", options)[1]["choices"]
    chunks = complete_chunks(live, **options)
    assert [joined(chunks, index) for index in range(4)] == [choice["text"] for choice in answers]
    indices = [choice["index"] for choice in choices(chunks)]
    assert indices != sorted(indices)  # they come side by side
    for index in range(4):
        reasons = [choice["finish_reason"] for choice in choices(chunks) if choice["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + [answers[index]["finish_reason"]]


def test_chats_side_by_side(live):
    options = {"n": 2, "temperature": 1, "seed": 11, "max_tokens": 10}
    answers = live.post("/v1/chat/completions", CHAT | options)[1]["choices"]
    chunks = chat_chunks(live, **options)
    assert [joined(chunks, index) for index in range(2)] == [choice["message"]["content"] for choice in answers]
    for index in range(2):
        own_choices = [choice for choice in choices(chunks) if choice["index"] == index]
        assert ["role" in choice["delta"] for choice in own_choices] == [True] + [False] * (len(own_choices) - 1)


@pytest.mark.parametrize("included", [False, True])
def test_no_part_of_a_stop_string_leaves(live, included):
    """A beginning of a stop string is held back too, until the text goes on in another way."""
    text = "ab STO ab STOP ab STOPPED cd"
    stop = "STOPPED"
    for path, fields in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        body = fields | says(text) | {"stop": [stop], "include_stop_str_in_output": included, "max_tokens": 99}
        chunks = events(live, path, body)
        *earlier, final = accumulated(chunks)
        before = text[: text.index(stop)]
        assert len(set(earlier)) > 5
        assert all(before.startswith(shown) for shown in earlier)
        assert final == before + (stop if included else "")
        last = choices(chunks)[-1]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_every_chunk_is_whole_characters(live, path):
    if path == "/generate":
        regex = {"text": "x", "sampling_params": {"regex": WORLD, "max_new_tokens": 99}}
        shown = [event["text"] for event in events(live, path, regex)]
    else:
        shown = accumulated(
            events(live, path, says(WORLD) | {"max_tokens": 99} | (CHAT if "chat" in path else {"prompt": "x"}))
        )
    assert shown[-1] == WORLD
    assert all(WORLD.startswith(text) for text in shown)
    assert len(set(shown)) > 5


def test_logprobs_and_token_ids_of_chunks_join_up(live):
    options = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "temperature": 0, "max_tokens": 12}
    answer = live.post("/v1/chat/completions", CHAT | options)[1]
    chunks = chat_chunks(live, **options)
    entries = [entry for choice in choices(chunks) for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == [e["token"] for e in answer["choices"][0]["logprobs"]["content"]]
    ids = [token for choice in choices(chunks) for token in choice.get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    options = {"logprobs": 2, "echo": True, "max_tokens": 12, "temperature": 0, "prompt": f"{LICENCE} 日"}
    answer = live.post("/v1/completions", options)[1]["choices"][0]
    chunks = complete_chunks(live, **options)
    assert joined(chunks) == answer["text"]
    for name in ("tokens", "text_offset", "token_logprobs"):
        parts = [entry for choice in choices(chunks) for entry in choice["logprobs"][name]]
        assert parts == (pytest.approx(answer["logprobs"][name]) if "log" in name else answer["logprobs"][name])


@pytest.mark.parametrize("parallel", [True, False])
def test_fragments_of_calls_join_up(live, parallel):
    chunks = chat_chunks(live, tools=TOOLS, parallel_tool_calls=parallel, **says(CALLS))
    calls = {}
    for choice in choices(chunks):
        for piece in choice["delta"].get("tool_calls", []):
            if piece["index"] not in calls:
                assert piece["type"] == "function"
                calls[piece["index"]] = {"id": piece["id"], "name": piece["function"]["name"], "arguments": ""}
            else:
                assert "id" not in piece
                assert "name" not in piece["function"]
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    expected = [("get_weather", {"city": "Rome", "days": [1, 2]}), ("get_time", {})][: 2 if parallel else 1]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == expected
    assert len({call["id"] for call in calls.values()}) == len(expected)
    assert joined(chunks) == "Hm."
    assert choices(chunks)[-1]["finish_reason"] == "tool_calls"


def test_reasoning_comes_under_both_names(live):
    text = "<think>\nHm.\n</think>\n\nYes."
    chunks = chat_chunks(live, stream_options={"include_usage": True}, **says(text))
    deltas = [choice["delta"] for choice in choices(chunks)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "\nHm.\n"
    assert joined(chunks) == "\n\nYes."
    usage = chunks[-1]["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    hidden = chat_chunks(live, include_reasoning=False, **says(text))
    assert not any(choice["delta"].keys() & {"reasoning", "reasoning_content"} for choice in choices(hidden))
    assert joined(hidden) == "\n\nYes."


def test_tokens_tell_who_made_them(live):
    chunks = complete_chunks(live, max_tokens=40, return_token_sources=True, stream_options={"include_usage": True})
    tokens = [token for choice in choices(chunks) for token in choice["tokens"]]
    assert "".join(token["text"] for token in tokens) == joined(chunks)
    accepted = chunks[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert sum(token["drafted"] for token in tokens) == accepted > 0


@pytest.mark.parametrize("known_as", ["request_id", "id"])
def test_abort_by_id_ends_a_stream_with_what_it_has(live, known_as):
    body = ENDLESS | {"stream": True, "request_id": f"mine-{known_as}"}
    with httpx.stream("POST", f"{live.base}/v1/completions", json=body, timeout=120) as answer:
        assert answer.headers["x-request-id"] == f"mine-{known_as}"
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        first = json.loads(next(lines))
        assert first["id"] == f"cmpl-mine-{known_as}"
        wanted = first["id"] if known_as == "id" else f"mine-{known_as}"
        assert live.post("/abort_request", {"rid": wanted}) == (200, {})
        *others, done = lines
    assert done == "[DONE]"
    assert json.loads(others[-1])["choices"][0]["finish_reason"] == "abort"
    live.wait_until(live.is_idle)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_what_it_held(live, streams, n):
    aborted = of_reason(live, "abort")
    body = ENDLESS | {"stream": streams, "n": n, "temperature": 1, "seed": 1}
    with closing(httpx.Client(timeout=120)) as client:
        if streams:
            with client.stream("POST", f"{live.base}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{live.base}/v1/completions", json=body, timeout=1.5)
    live.wait_until(live.is_idle)
    assert of_reason(live, "abort") == aborted + n


def of_reason(live, reason):
    lines = live.get("/metrics")[1].decode().splitlines()
    matching = [line for line in lines if "request_success_total{" in line and f'finished_reason="{reason}"' in line]
    return float(matching[0].rsplit(" ", 1)[1]) if matching else 0.0


def test_requests_of_the_same_id_run_side_by_side_and_are_aborted_together(live):
    """X-Request-Id names requests that belong together, such as the calls of one trace, and may repeat."""
    header = {"x-request-id": "one-trace"}
    with httpx.Client(base_url=live.base, headers=header, timeout=120) as client:
        body = ENDLESS | {"stream": True}
        with (
            client.stream("POST", "/v1/completions", json=body) as one,
            client.stream("POST", "/v1/completions", json=body | {"request_id": "one-trace"}) as two,
        ):
            texts = []
            for answer in (one, two):
                assert (answer.status_code, answer.headers["x-request-id"]) == (200, "one-trace")
                texts.append(line.removeprefix("data: ") for line in answer.iter_lines() if line)
            assert [json.loads(next(lines))["id"] for lines in texts] == ["cmpl-one-trace"] * 2
            short = client.post("/v1/completions", json=ENDLESS | {"max_tokens": 2}).json()  # a third, which ends
            assert short["choices"][0]["finish_reason"] == "length"
            assert live.post("/abort_request", {"rid": "one-trace"}) == (200, {})
            for lines in texts:
                *_, last, done = lines
                assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    live.wait_until(live.is_idle)


def test_abort_all(live):
    answers = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(live.post("/v1/completions", ENDLESS | {"rid": f"all-{i}"})))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    live.wait_until(lambda: live.metric("num_requests_running") == 2)
    live.post("/abort_request", {"abort_all": True})
    for thread in threads:
        thread.join(60)
    assert [answer["choices"][0]["finish_reason"] for _, answer in answers] == ["abort"] * 2
