"""Everything but chats and completions: tokens, SGLang's /generate, errors, metrics and flags."""

import json
import threading

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.live import NAME, serving

LICENCE = "You may reproduce and distribute copies of the"
HI = [{"role": "user", "content": "Hi 日本"}]
ENDLESS = {"prompt": LICENCE, "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "speculation": False}
ENDLESSLY = {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 1}


def generate(live, **body):
    status, answer = live.post("/generate", {"sampling_params": {"temperature": 0, "max_new_tokens": 8}} | body)
    assert status == 200, answer
    return answer


# ---- Tokens


def test_tokens_there_and_back(live):
    text = f"{LICENCE} 🌊 日本"
    status, answer = live.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert live.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})


def test_tokens_of_a_chat_are_those_that_a_chat_gets(live):
    tokens = live.post("/tokenize", {"messages": HI})[1]["tokens"]
    body = {"messages": HI, "max_tokens": 1, "return_token_ids": True}
    assert live.post("/v1/chat/completions", body)[1]["prompt_token_ids"] == tokens
    assert live.post("/detokenize", {"tokens": tokens})[1]["prompt"] == "Hi 日本"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}, {"prompt": 7}])
def test_nothing_to_tokenize(live, body):
    assert live.post("/tokenize", body)[0] == 400


def test_a_token_that_there_is_not(live):
    status, body = live.post("/detokenize", {"tokens": [5, 10**9]})
    assert (status, body["error"]["param"]) == (400, "tokens")


def test_a_rendered_chat_is_what_a_chat_gets(live):
    body = {"messages": HI, "max_tokens": 3, "seed": 7, "return_token_ids": True}
    status, rendered = live.post("/v1/chat/completions/render", body | {"request_id": "mine"})
    assert status == 200
    assert rendered["token_ids"] == live.post("/v1/chat/completions", body)[1]["prompt_token_ids"]
    assert (rendered["request_id"], rendered["model"]) == ("chatcmpl-mine", NAME)
    assert {"max_tokens": 3, "seed": 7}.items() <= rendered["sampling_params"].items()
    assert live.post("/v1/chat/completions/render", {"messages": HI, "n": 0})[0] == 400


def test_rendered_prompts_are_those_of_a_completion(live):
    status, rendered = live.post("/v1/completions/render", {"prompt": [LICENCE, "a"], "max_tokens": 3})
    assert status == 200
    expected = [live.post("/tokenize", {"prompt": text})[1]["tokens"] for text in (LICENCE, "a")]
    assert [prompt["token_ids"] for prompt in rendered] == expected


# ---- What routers ask


def test_loads_say_what_runs(live):
    def loads():
        return json.loads(live.get("/v1/loads?include=core,queues")[1])

    live.wait_until(live.is_idle)
    assert loads()["aggregate"]["total_reqs"] == 0
    thread = threading.Thread(target=live.post, args=["/v1/completions", ENDLESS])
    thread.start()
    live.wait_until(lambda: loads()["aggregate"]["total_running_reqs"] == 1)
    (rank,) = loads()["loads"]
    assert rank["num_waiting_reqs"] == 0
    assert rank["max_running_requests"] == 4
    assert 0 < rank["num_used_tokens"] <= rank["max_total_num_tokens"]
    assert rank["token_usage"] == pytest.approx(rank["num_used_tokens"] / rank["max_total_num_tokens"], abs=0.01)
    (older,) = json.loads(live.get("/get_load")[1])
    assert older["num_reqs"] == 1
    live.post("/abort_request", {"abort_all": True})
    thread.join(60)
    live.wait_until(lambda: loads()["aggregate"]["total_reqs"] == 0)


def test_both_names_of_the_servers_info_say_the_same(live):
    info = json.loads(live.get("/server_info")[1])
    assert info == json.loads(live.get("/get_server_info")[1])
    assert (info["served_model_name"], info["max_running_requests"], info["max_model_len"]) == (NAME, 4, 4096)


# ---- /generate


def test_generate_tells_its_speculation(live):
    answer = generate(live, text=LICENCE, sampling_params={"temperature": 0, "max_new_tokens": 40}, rid="mine")
    completed = live.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 40, "temperature": 0})[1]
    meta = answer["meta_info"]
    assert answer["text"] == completed["choices"][0]["text"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 40
    assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 40})
    histogram = meta["spec_accept_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    assert sum(k * rounds for k, rounds in enumerate(histogram)) == meta["spec_accepted_drafts"]
    assert meta["completion_tokens"] == 1 + meta["spec_verify_ct"] + meta["spec_accepted_drafts"]  # the first: prefill
    assert meta["spec_accept_length"] == 1 + meta["spec_accepted_drafts"] / meta["spec_verify_ct"]
    assert meta["spec_accept_rate"] == meta["spec_accepted_drafts"] / meta["spec_proposed_drafts"]


def test_generate_of_a_batch(live):
    ids = live.post("/tokenize", {"prompt": LICENCE})[1]["tokens"]
    one = generate(live, input_ids=ids)
    several = generate(live, input_ids=[ids, [5]], rid=["a", "b"])
    assert [answer["meta_info"]["id"] for answer in several] == ["a", "b"]
    assert several[0]["text"] == one["text"]
    params = [{"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 3, "temperature": 0}]
    answers = generate(live, text=[LICENCE, "The"], sampling_params=params)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 3]


def test_generate_streams_the_text_so_far(live):
    complete = generate(live, text=["The", LICENCE], sampling_params={"temperature": 1, "sampling_seed": 1, "n": 2})
    body = {"text": ["The", LICENCE], "sampling_params": {"temperature": 1, "sampling_seed": 1, "n": 2}, "stream": True}
    with httpx.stream("POST", f"{live.base}/generate", json=body, timeout=120) as answer:
        *chunks, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert done == "[DONE]"
    texts = [""] * 4
    for chunk in map(json.loads, chunks):
        assert chunk["text"].startswith(texts[chunk["index"]])
        texts[chunk["index"]] = chunk["text"]
    assert texts == [answer["text"] for answer in complete]


def test_generate_with_logprobs(live):
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    answer = generate(live, text=LICENCE, **options)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 8
    (nothing, first, _), *others = meta["input_token_logprobs"]
    assert nothing is None
    prompt = [first, *(token for _, token, _ in others)]
    assert prompt == live.post("/tokenize", {"prompt": LICENCE})[1]["tokens"]
    assert all(logprob <= 0 for logprob, _, _ in others)


def test_a_grammar_that_fails_takes_the_other_completions_with_it(live):
    """Some completions follow a rule that is too much for the grammar's parser; others would run on, read by nobody."""
    rules = [f'r{i}: "a" r{i} | "b"' for i in range(2200)]
    grammar = "\n".join(
        ["start: /[0-2a-e]/ big | /[3-9f-z]/ /[a-z ]*/", f"big: {' | '.join(f'r{i}' for i in range(2200))}", *rules]
    )
    body = {"prompt": "x", "temperature": 2, "seed": 2, "n": 6, "max_tokens": 3000, "min_tokens": 2900}
    status, answer = live.post("/v1/completions", body | {"structured_outputs": {"grammar": grammar}})
    assert (status, "cannot be followed any further" in answer["error"]["message"]) == (400, True)
    live.wait_until(live.is_idle, 20)


def test_one_prompt_of_a_batch_is_aborted_by_its_id(live):
    answers = []
    body = {"text": [LICENCE, LICENCE], "rid": ["one", "two"], "sampling_params": ENDLESSLY}
    thread = threading.Thread(target=lambda: answers.extend(live.post("/generate", body)[1]))
    thread.start()
    live.wait_until(lambda: live.metric("num_requests_running") == 2)
    live.post("/abort_request", {"rid": "two"})
    live.wait_until(lambda: live.metric("num_requests_running") == 1)
    live.post("/abort_request", {"rid": "one"})
    thread.join(60)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert lengths[0] > lengths[1]
    live.wait_until(live.is_idle)


# ---- Errors


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"n": 0}, "n", "n=0"),
        ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling"),
        ({"tools": []}, "tools", "at least one tool"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", ""),
        ({"max_tokens": "many"}, "max_tokens", "'many'"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"messages": []}, "messages", "at least one message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"stop": ["x"] * 17}, "stop", "limit of 16"),
        ({"best_of": 3}, "best_of", "exceeds n=1"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(live, body, param, words):
    status, answer = live.post("/v1/chat/completions", {"messages": HI} | body)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (400, "BadRequestError", 400)
    assert words in error["message"]
    assert error["param"] == param or param == "structured_outputs"
    assert answer.keys() == {"error"}


def test_other_errors_have_the_same_shape(live, client):
    for method, path, body, status, kind in (
        ("GET", "/nowhere", None, 404, "NotFoundError"),
        ("GET", "/v1/completions", None, 405, "MethodNotAllowedError"),
        ("POST", "/v1/completions", b"{", 400, "BadRequestError"),
        ("POST", "/v1/completions", b"[]", 400, "BadRequestError"),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "gpt-4"}', 404, "NotFoundError"),
        ("POST", "/start_profile", b"{}", 400, "BadRequestError"),
    ):
        got, answer = live.ask(method, path, body)
        assert got == status, path
        error = json.loads(answer)["error"]
        assert (error["type"], error["code"]) == (kind, status)
        assert error["message"]
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    assert raised.value.param == "temperature"
    assert raised.value.type == "BadRequestError"


def test_a_body_that_is_all_wrong_gets_a_short_answer(live):
    body = {"prompt": "a", "stop": [7] * 10_000, "logit_bias": {str(i): "x" * 999 for i in range(999)}, "n": "y" * 9999}
    status, answer = live.ask("POST", "/v1/completions", json.dumps(body).encode())
    assert status == 400
    assert len(answer) < 11_000


# ---- Metrics


def test_metrics_have_the_names_that_dashboards_read(live):
    live.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 30, "temperature": 0})
    text = live.get("/metrics")[1].decode()
    counters = (
        "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens spec_decode_num_drafts "
        "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos "
        "request_success state_snapshots_taken state_snapshot_hits state_snapshots_evicted"
    )
    gauges = "num_requests_running num_requests_waiting kv_cache_usage_perc state_snapshots"
    histograms = (
        "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
        "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_inference_time_seconds request_prompt_tokens request_generation_tokens "
        "request_params_n request_params_max_tokens"
    )
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for kind, names in (("counter", counters), ("gauge", gauges), ("histogram", histograms)):
        for name in names.split():
            family = families[f"dflash_jax:{name}"]
            assert family.type == kind
            labels = {"model_name": NAME, "engine": "0"}
            assert family.samples
            assert all(sample.labels.items() >= labels.items() for sample in family.samples)
    by_position = families["dflash_jax:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in by_position] == [str(k) for k in range(15)]


def test_requests_are_counted(live):
    def counts():
        families = text_string_to_metric_families(live.get("/metrics")[1].decode())
        values = {(s.name, s.labels.get("finished_reason")): s.value for family in families for s in family.samples}
        names = ("time_to_first_token_seconds_count", "request_generation_tokens_sum", "request_params_n_sum")
        success = [("request_success_total", reason) for reason in ("length", "stop", "abort", "error")]
        return [
            values.get((f"dflash_jax:{name}", reason), 0) for name, reason in [*((n, None) for n in names), *success]
        ]

    before = counts()
    live.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 5, "n": 2, "temperature": 1})
    live.post("/v1/completions", {"prompt": LICENCE, "structured_outputs": {"choice": ["x"]}, "temperature": 0})
    live.post("/v1/completions", {"prompt": LICENCE, "n": 99})
    live.post("/v1/completions", {"prompt": LICENCE, "structured_outputs": {"grammar": "start: nothing"}})
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 11, 3, 2, 1, 0, 0]


def test_the_log_has_the_line_that_people_grep(live):
    live.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 30, "temperature": 0})
    live.wait_until(lambda: "SpecDecoding metrics: Mean acceptance length: " in live.log.read_text())


# ---- Flags

ODD = (
    "--max-num-seqs=1",
    "--max-num-queued-reqs=1",
    *("--served-model-name", "first", "second"),
    "--metrics-prefix=vllm:",
    "--stream-interval=5",
    "--sse-keep-alive-interval=0.1",
    "--enable-force-include-usage",
    "--per-request-spec-decode-metrics=detailed",
    '--override-generation-config={"temperature": 1.5}',
)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A server with many flags, and with room for one running and one waiting sequence."""
    with serving(tmp_path_factory.mktemp("odd"), *ODD) as server:
        yield server


def test_every_name_of_the_model_is_known(odd):
    names = [model["id"] for model in json.loads(odd.get("/v1/models")[1])["data"]]
    assert names == ["first", "second"]
    answers = [odd.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1}) for name in names]
    assert [(status, body["model"]) for status, body in answers] == [(200, "first")] * 2
    assert odd.post("/v1/completions", {"model": "third", "prompt": "x"})[0] == 404


def test_a_request_goes_before_the_servers_defaults(odd, live):
    body = {"prompt": LICENCE, "max_tokens": 12, "seed": 3}
    greedy = live.post("/v1/completions", body)[1]["choices"][0]["text"]  # the model's own default
    assert odd.post("/v1/completions", body | {"temperature": 0})[1]["choices"][0]["text"] == greedy
    hot = odd.post("/v1/completions", body)[1]["choices"][0]["text"]
    assert hot == odd.post("/v1/completions", body | {"temperature": 1.5})[1]["choices"][0]["text"] != greedy


def test_chunks_are_as_large_as_was_asked(odd):
    body = {"prompt": "The", "max_tokens": 23, "seed": 3, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{odd.base}/v1/completions", json=body | {"speculation": False}, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    *chunks, last = map(json.loads, lines[:-1])
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [5, 5, 5, 5, 3]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [5, 10, 15, 20, 23]  # though nobody asked
    assert last["usage"]["completion_tokens"] == 23


def test_detailed_metrics(odd):
    spec = odd.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 30, "temperature": 0})[1]["metrics"]
    spec = spec["speculative_decoding"]
    assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"]
    assert sum(spec["per_step_drafted"]) == spec["num_draft_tokens"]
    assert len(spec["per_step_accepted"]) == spec["num_spec_steps"]

    def is_drafted():  # first answers may come before the programs that draft
        odd.post("/v1/completions", {"prompt": LICENCE, "max_tokens": 30, "temperature": 0})
        return "vllm:spec_decode_num_accepted_tokens_per_pos_total{" in odd.get("/metrics")[1].decode()

    odd.wait_until(is_drafted)
    assert "dflash_jax:" not in odd.get("/metrics")[1].decode()


def test_who_waits_hears_that_the_server_lives_and_who_comes_next_is_refused(odd):
    url, streamed = f"{odd.base}/v1/completions", ENDLESS | {"stream": True}
    with httpx.Client(timeout=120) as http, http.stream("POST", url, json=streamed) as running:
        lines_of_running = running.iter_lines()  # kept, since httpx closes a response whose iterator is gone
        next(lines_of_running)
        with http.stream("POST", url, json=streamed | {"max_tokens": 1}) as waiting:
            lines = (line for line in waiting.iter_lines() if line)
            assert [next(lines) for _ in range(2)] == [": keep-alive"] * 2
            status, answer = odd.post("/v1/completions", {"prompt": "y"})
            assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
            running.close()
            assert [line for line in lines if not line.startswith(":")][-1] == "data: [DONE]"
