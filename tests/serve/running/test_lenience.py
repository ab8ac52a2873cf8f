"""What clients of other servers send, and mistakes that a message can mend."""

import gzip
import json
import re
import socket

import httpx
import pytest

from tests.serve.live import NAME

HI = [{"role": "user", "content": "You may reproduce and distribute copies of the"}]
LICENCE = "You may reproduce and distribute copies of the"
COMPRESSED = gzip.compress(b'{"prompt": "a"}', mtime=0)  # part of names of tests, so without a time


def test_numbers_as_text_and_with_a_fraction_of_zero(live):
    exact = {"prompt": LICENCE, "max_tokens": 4, "temperature": 0, "seed": 1, "top_p": 0.5}
    loose = exact | {"max_tokens": 4.0, "temperature": "0", "seed": "1", "top_p": "0.50", "model": "", "n": "1"}
    answers = [live.post("/v1/completions", body) for body in (exact, loose)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"] == answers[1][1]["choices"]
    assert answers[1][1]["usage"]["completion_tokens"] == 4
    for value in ("4.5", "four", 4.5, True, "", "٤", " 4"):
        status, answer = live.post("/v1/completions", exact | {"max_tokens": value})
        assert (status, answer["error"]["param"]) == (400, "max_tokens"), value


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"grammar": 'root ::= "Work" | "Works"'}, "Work"),
        ({"json_schema": {"enum": ["Work"]}}, '"Work"'),
        ({"json_schema": '{"enum": ["Work"]}', "grammar": ""}, '"Work"'),
        (
            {"typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "cache_prompt": True, "grammar": 'root ::= "W"'},
            "W",
        ),
    ],
)
def test_the_fields_of_llama_cpp_that_have_a_counterpart(live, fields, text):
    status, answer = live.post("/v1/chat/completions", {"messages": HI, "temperature": 0} | fields)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].startswith(text)


def test_a_penalty_by_the_name_of_llama_cpp(live):
    def text(**fields):
        return live.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 40, "temperature": 0} | fields)[1]

    assert text(repeat_penalty=2.5)["choices"] == text(repetition_penalty=2.5)["choices"] != text()["choices"]
    assert text(repeat_penalty=-1)["error"]["param"] == "repeat_penalty"


@pytest.mark.parametrize("field", ["typical_p", "mirostat", "dry_multiplier", "xtc_probability", "top_n_sigma"])
def test_the_others_are_refused(live, field):
    status, answer = live.post("/v1/chat/completions", {"messages": HI, field: 2})
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
def test_meta_info_of_a_chat_has_the_acceptance(live, stream):
    """What `dflash benchmark openai` reads."""
    body = {"messages": HI, "max_tokens": 64, "temperature": 0, "return_meta_info": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    _, raw = live.ask("POST", "/v1/chat/completions", json.dumps(body).encode())
    answer = json.loads(raw.decode().strip().split("data: ")[-2] if stream else raw)
    meta, spec = answer["meta_info"], answer["metrics"]["speculative_decoding"]
    assert meta["completion_tokens"] == answer["usage"]["completion_tokens"] == 64
    assert meta["spec_verify_ct"] >= spec["num_spec_steps"] > 0
    assert meta["spec_accept_length"] == 1 + spec["num_accepted_draft_tokens"] / meta["spec_verify_ct"] > 4
    assert "meta_info" not in live.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1})[1]


@pytest.mark.parametrize("start", [0, 3])
def test_top_logprobs_by_generate(live, start):
    """What lm-eval's sglang-generate reads, which takes the first of them for the greedy token."""
    body = {"text": f"{LICENCE} xylophone", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": start}
    sampling = {"sampling_params": {"max_new_tokens": 4, "temperature": 1, "sampling_seed": 5}}
    meta = live.post("/generate", body | sampling)[1]["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == meta["prompt_tokens"] - start
    assert (meta["input_token_logprobs"][0][0], meta["input_top_logprobs"][0]) == (None, None)
    inputs = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
    outputs = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    is_greedy = []
    for (logprob, token, _), top in [*inputs, *outputs]:
        assert len(top) == 2
        assert top[0][0] >= top[1][0]
        assert logprob <= top[0][0]
        is_greedy.append(token == top[0][1])
    assert set(is_greedy) == {False, True}
    without = live.post("/generate", body | sampling | {"top_logprobs_num": 0})[1]["meta_info"]
    assert without["input_token_logprobs"] == meta["input_token_logprobs"]
    assert not {"input_top_logprobs", "output_top_logprobs"} & without.keys()


def test_slashes_at_the_end(live):
    assert live.get("/v1/models/") == live.get("/v1/models")
    assert live.get("/health/")[0] == 200
    body = {"prompt": LICENCE, "max_tokens": 1}
    assert live.post("/v1/completions/", body)[0] == 200
    assert live.get("/")[0] == 200


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "use /v1/chat/completions, so a client's base URL must be http://HOST:PORT/v1 "),
        ("/v1/chat/completions/chat/completions", "use /v1/chat/completions, so a client's base URL must be "),
        ("/v1/v1/messages", "use /v1/messages, so a client's base URL must be http://HOST:PORT and"),
        ("/messages/count_tokens", "use /v1/messages/count_tokens"),
        ("/v1/", "is a base URL"),
        ("/v1/embeddings", "'/v1/embeddings' is not served"),
    ],
)
def test_a_wrong_base_url_is_told_which_path_to_use(live, path, words):
    status, answer = live.post(path, {})
    assert status == 404
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "header", "status", "words"),
    [
        (COMPRESSED, "content-encoding: gzip", 415, "compressed (content-encoding: gzip)"),
        (COMPRESSED, "x: y", 400, "not text in UTF-8"),
        (b'{"prompt": "\xff"}', "content-encoding: identity", 400, "not text in UTF-8"),
        (b'{"prompt": "a"}', "content-type: text/plain", 415, "'Content-Type: application/json'"),
    ],
)
def test_bodies_that_are_no_text_are_told_so(live, body, header, status, words):
    answer = raw_answer(live, body, header, "1.1")
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert words in answer


def raw_answer(live, body, header, version, fields="") -> str:
    host, port = live.base.removeprefix("http://").split(":")
    kind = "" if "content-type" in header else "content-type: application/json\r\n"
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\nconnection: close\r\n{kind}{header}\r\n{fields}"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_has_no_chunks(live, stream):
    """By default nginx speaks it to the servers behind it."""
    body = json.dumps({"prompt": LICENCE, "max_tokens": 12, "stream": stream, "temperature": 0}).encode()
    head, _, content = raw_answer(live, body, "x: y", "1.0").partition("\r\n\r\n")
    assert "chunked" not in head
    if stream:
        assert content.startswith("data: {")
        assert content.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(content)["usage"]["completion_tokens"] == 12


def test_an_echo_alone_costs_no_tokens(live):
    status, answer = live.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 0, "echo": True, "model": NAME})
    assert (status, answer["choices"][0]["text"]) == (200, LICENCE)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "header"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 9}, "x-session-id"),
        ("/v1/completions", {"prompt": LICENCE, "max_tokens": 9}, "session-id"),
        ("/v1/responses", {"input": LICENCE, "max_output_tokens": 9}, "session-id"),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, "x-claude-code-session-id"),
        ("/generate", {"text": LICENCE, "sampling_params": {"max_new_tokens": 9}}, "x-session-id"),
    ],
)
def test_each_turn_has_a_line_in_the_log(live, path, body, header):
    session = f"turn of {path}"
    answer = httpx.post(live.base + path, json=body, headers={header: session}, timeout=60).json()
    live.wait_until(lambda: f"(session {session})" in live.log.read_text())
    (line,) = [line for line in live.log.read_text().splitlines() if f"(session {session})" in line]
    number = r"\d+\.\d+"
    answered = rf"answer 9 tokens, {number} tokens/s, {number} a round; first token after {number} s; length"
    found = re.search(rf": prompt (\d+) tokens, {number}% cached; {answered}$", line)
    assert found, line
    usage = answer.get("usage") or answer["meta_info"]
    prompt = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert int(found[1]) == prompt


CACHED = {
    "/v1/chat/completions": lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    "/v1/completions": lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    "/v1/responses": lambda usage: usage["input_tokens_details"]["cached_tokens"],
    "/v1/messages": lambda usage: usage["cache_read_input_tokens"],
}


@pytest.mark.parametrize("path", CACHED)
def test_every_usage_tells_what_was_cached(live, path):
    text = f"{path} " + LICENCE * 20
    bodies = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text, "max_output_tokens": 1}}
    body = bodies.get(path, {"messages": [{"role": "user", "content": text}]})
    body |= {} if path == "/v1/responses" else {"max_tokens": 1}
    first, second = (live.post(path, body)[1]["usage"] for _ in range(2))
    assert CACHED[path](first) < CACHED[path](second)
    assert CACHED[path](second) > 100


def test_usage_in_every_chunk_tells_what_was_cached(live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "again " + LICENCE * 20, "max_tokens": 3, "stream": True, "stream_options": options}
    for _ in range(2):
        _, raw = live.ask("POST", "/v1/completions", json.dumps(body).encode())
    chunks = [json.loads(line) for line in raw.decode().split("data: ")[1:-1]]
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] > 100 for chunk in chunks} == {True}
