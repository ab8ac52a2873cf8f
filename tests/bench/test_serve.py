"""The whole command against a scripted server on a real socket."""

import json

import pytest

from dflash_jax.bench.__main__ import main
from tests.bench.mock_server import BLOCK, DONE, GOOD, Mock, Reply, delta, event, serving, text, usage
from tests.phases import lines, phases


@pytest.fixture
def mock():
    with serving(Mock()) as server:
        yield server


def bench(mock, tmp_path, *arguments, prompts=4):
    """Exit status and result of a run."""
    path = tmp_path / "result.json"
    fixed = ["--num-prompts", prompts, "--random-input-len", 3, "--random-output-len", 4, "--num-warmups", 0]
    status = main(["serve", "--base-url", mock.url, *map(str, [*fixed, *arguments]), "--output", str(path)])
    return status, json.loads(path.read_text()) if path.exists() else None


def test_counts_and_settings(mock, tmp_path):
    status, result = bench(mock, tmp_path, "--api-key", "secret", "--ignore-eos", "--extra-body", '{"top_k": 5}')
    assert status == 0
    assert (result["completed"], result["failed"], result["errors"]) == (4, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 16)
    assert result["output_throughput"] == pytest.approx(16 / result["duration"])
    assert result["num_ended_early"] == 0
    assert result["server"] == {"base_url": mock.url, "endpoint": "/v1/completions", "version": "1.2.3"}
    assert result["settings"]["api_key"] == "***"
    assert "secret" not in json.dumps(result)
    assert result["settings"]["request_rate"] == "inf"
    for body in mock.bodies:
        assert len(body.pop("prompt")) == 3
        assert body == {
            "model": "mock",
            "max_tokens": 4,
            "temperature": 0.0,
            "ignore_eos": True,
            "top_k": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    assert {headers["authorization"] for headers in mock.headers} == {"Bearer secret"}


SPREADS = {f"{s}_{m}_ms" for s in ("mean", "p50", "p90", "p99") for m in ("ttft", "tpot", "itl", "icl", "e2el")}
KEYS = SPREADS | {
    *("command", "date", "model", "versions", "server", "settings", "warnings", "acceptance", "generator"),
    *("duration", "completed", "failed", "errors", "max_concurrent_requests", "num_ended_early", "tokens_per_chunk"),
    *("total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
}


def test_the_shape_of_the_result(mock, tmp_path):
    _, result = bench(mock, tmp_path, "--save-detailed")
    assert set(result) == KEYS | {"requests"}
    assert sorted(result["generator"]) == sorted(
        ["mean_loop_lag_ms", "p50_loop_lag_ms", "p90_loop_lag_ms", "p99_loop_lag_ms", "max_loop_lag_ms", "cpu_cores"]
    )
    first = result["requests"][0]
    assert (first["completion_tokens"], first["finish_reason"], first["error"]) == (4, "length", None)
    assert 0 <= first["start"] <= first["arrivals"][0][0] <= first["end"] <= result["duration"] + first["start"]
    assert set(bench(mock, tmp_path)[1]) == KEYS


def test_chat_sends_words(mock, tmp_path):
    pieces = [delta(role="assistant", content=""), delta(content="hi"), usage(4), DONE]
    mock.reply = lambda body, number: Reply(pieces)
    status, result = bench(mock, tmp_path, "--endpoint", "chat", "--model", "given")
    assert (status, result["total_output_tokens"], result["model"]) == (0, 16, "given")
    assert all(len(body["messages"][0]["content"].split()) == 3 for body in mock.bodies)
    assert all(body["max_completion_tokens"] == 4 for body in mock.bodies)


def test_every_failure_is_counted_and_none_is_throughput(mock, tmp_path, capsys):
    replies = [
        Reply(status=503),
        Reply([text("a"), usage(100)], drops=True),
        Reply([text("a"), event(error={"message": "boom"}), DONE]),
        Reply([text("a"), DONE]),
        Reply(status=400),
        Reply(status=503),
        GOOD,
    ]
    mock.reply = lambda body, number: replies[number]
    status, result = bench(mock, tmp_path, "--max-concurrency", 1, "--save-detailed", prompts=7)
    assert status == 1
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (1, 6, 4)
    counts = {kind: failure["count"] for kind, failure in result["errors"].items()}
    assert counts == {"HTTP 503": 2, "disconnected": 1, "error in stream": 1, "no usage": 1, "HTTP 400": 1}
    assert [r["error_kind"] for r in result["requests"]][-1] is None
    shown = capsys.readouterr()
    assert "failed: 2 x HTTP 503" in shown.out
    assert "boom" in shown.out
    assert phases(shown.err) == [
        *("importing modules", "making the workload", f"asking {mock.url} for its models", "measuring"),
    ]
    assert lines(shown.err)[-1].startswith("measuring: 7 of 7, 6 failed, in ")
    assert lines(shown.out) == []


def test_concurrency_is_bounded_and_reached(mock, tmp_path):
    mock.reply = lambda body, number: Reply(GOOD.pieces, pause=0.01)
    status, result = bench(mock, tmp_path, "--max-concurrency", 3, prompts=12)
    assert (status, result["completed"]) == (0, 12)
    assert mock.most_active == 3
    assert result["max_concurrent_requests"] == 3


def test_open_loop_sends_whatever_has_become_of_the_others(mock, tmp_path):
    mock.reply = lambda body, number: Reply(GOOD.pieces, pause=0.05)
    status, result = bench(mock, tmp_path, "--request-rate", 2000, prompts=8)
    assert (status, result["completed"]) == (0, 8)
    assert mock.most_active == 8


def test_warm_ups_are_not_measured_and_stop_the_run_if_they_fail(mock, tmp_path, capsys):
    _, result = bench(mock, tmp_path, "--num-warmups", 2)
    assert (len(mock.bodies), result["completed"], result["total_output_tokens"]) == (6, 4, 16)
    mock.reply = lambda body, number: Reply(status=404)
    (tmp_path / "result.json").unlink()
    assert bench(mock, tmp_path, "--num-warmups", 1) == (2, None)
    assert len(mock.bodies) == 7
    assert "a warm-up request failed: HTTP 404" in capsys.readouterr().err


def test_acceptance_of_requests_comes_before_the_counters(mock, tmp_path, capsys):
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    mock.metrics = lambda: "\n".join(f"vllm:spec_decode_{name}_total {1 + 10 * len(mock.bodies)}" for name in names)
    _, result = bench(mock, tmp_path)
    assert (result["acceptance"]["source"], result["acceptance"]["num_drafts"]) == ("prometheus", 40)
    reported = Reply([text("a"), usage(4, metrics={"speculative_decoding": BLOCK}), DONE])
    mock.reply = lambda body, number: reported if number % 2 else GOOD
    _, result = bench(mock, tmp_path)
    assert (result["acceptance"]["source"], result["acceptance"]["histogram"]) == ("requests", [2, 0, 2, 0, 0, 2])
    assert "acceptance is of the 2 requests of 4 that reported it." in result["warnings"]
    assert "mean acceptance length 3.33 tokens over 6 rounds" in capsys.readouterr().out


def test_early_ends_are_pointed_out(mock, tmp_path):
    _, result = bench(mock, tmp_path, "--random-output-len", 5)
    assert result["num_ended_early"] == 4
    assert result["warnings"][0].startswith("4 of 4 answers have fewer tokens than asked for")


def test_a_late_event_loop_is_pointed_out(mock, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_jax.bench.serve.MOST_LAG", -1.0)
    _, result = bench(mock, tmp_path)
    assert any("event loop" in warning for warning in result["warnings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-concurrency", "0"], "--max-concurrency=0"),
        (["--request-rate", "0"], "--request-rate=0.0"),
        (["--endpoint", "embeddings"], "--endpoint 'embeddings'"),
        (["--extra-body", '{"n": 2}'], "n above 1"),
        (["--request-timeout", "0"], "--request-timeout=0.0"),
        (["--output", "/no/such/folder/x.json"], "make the folder first"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(mock, arguments, words, capsys):
    assert main(["serve", "--base-url", mock.url, "--num-warmups", "0", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert mock.bodies == []


@pytest.mark.parametrize(
    "arguments", [["--max-concurrency", "1", "--request-rate", "1"], ["--extra-body", "[]"], ["--extra-body", "{"], []]
)
def test_bad_command_lines(arguments):
    with pytest.raises(SystemExit):
        main(["serve", *arguments] if arguments else [])


def test_no_server(capsys):
    assert main(["serve", "--base-url", "http://127.0.0.1:1"]) == 2
    assert "cannot be listed (cannot connect: 127.0.0.1:1" in capsys.readouterr().err
