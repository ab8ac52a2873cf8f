"""Prompts, lengths and arrival times: equal for equal seeds."""

import json
import math

import numpy as np
import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.bench.__main__ import parse_args
from dflash_jax.bench.workload import RandomLengths, arrival_times, load, random_requests
from dflash_jax.text.request_files import SampleRequest, read_jsonl


def draw(seed=0, ratio=0.5, vocab_size=256, **options):
    return random_requests(200, RandomLengths(40, 10, ratio), seed=seed, vocab_size=vocab_size, **options)


def test_random_ids_stay_in_their_bounds():
    requests = draw(vocab_size=7)
    assert {i for r in requests for i in r.prompt} == set(range(7))
    assert {len(r.prompt) for r in requests} <= set(range(20, 61))
    assert {r.output_len for r in requests} == set(range(5, 16))


def test_random_prompts_are_those_of_their_seed():
    assert draw() == draw()
    assert draw() != draw(seed=1)
    assert {(len(r.prompt), r.output_len) for r in draw(ratio=0.0)} == {(40, 10)}


def test_random_text_has_as_many_words():
    assert [len(r.prompt.split()) for r in draw(as_text=True)] == [len(r.prompt) for r in draw()]


@pytest.mark.parametrize(
    ("lengths", "words"),
    [((0, 1), "--random-input-len=0"), ((1, 0), "--random-output-len=0"), ((1, 1, 1.0), "range-ratio=1.0")],
)
def test_bad_lengths(lengths, words):
    with pytest.raises(ConfigError, match=words):
        RandomLengths(*lengths)


def test_poisson_arrivals():
    times = arrival_times(20_000, 50.0, seed=3)
    gaps = np.diff(times)
    assert times == arrival_times(20_000, 50.0, seed=3) != arrival_times(20_000, 50.0, seed=4)
    assert times[0] == 0.0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)  # an exponential's deviation is its mean
    assert arrival_times(3, math.inf, 0) == [0.0] * 3
    assert arrival_times(1, 5.0, 0) == [0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_bad_rates(rate):
    with pytest.raises(ConfigError, match="--request-rate"):
        arrival_times(1, rate, 0)


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_jsonl(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, {"prompt": "é"}, "", {"messages": messages, "output_tokens": 3}, {"prompt": [1, 2], "x": 1})
    assert read_jsonl(path, 7) == [SampleRequest("é", 7), SampleRequest(messages, 3), SampleRequest([1, 2], 7)]
    assert [(r.is_text, r.is_chat) for r in read_jsonl(path, 7)] == [(True, False), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 needs exactly one"),
        ({"text": "x"}, "exactly one"),
        ({"prompt": "x", "messages": []}, "exactly one"),
        ({"prompt": ""}, "'prompt' must be text"),
        ({"prompt": []}, "'prompt' must be text"),
        ({"prompt": [1, True]}, "'prompt' must be text"),
        ({"prompt": [{"role": "user"}]}, "'prompt' must be text"),
        ({"messages": "hi"}, "'messages' must be a list"),
        ({"messages": [1]}, "'messages' must be a list"),
        ({"prompt": "x", "output_tokens": 0}, "output_tokens=0"),
        ({"prompt": "x", "output_tokens": "9"}, "output_tokens='9'"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, words):
    with pytest.raises(ConfigError, match=words):
        read_jsonl(write(tmp_path, {"prompt": "fine"}, line), 7)


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="holds no request"):
        read_jsonl(write(tmp_path, ""), 7)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_jsonl(tmp_path / "missing", 7)


def workload(*arguments, as_text=False):
    return load(parse_args(["serve", *map(str, arguments)]), as_text=as_text)


def test_warm_ups_are_other_prompts():
    made = workload("--num-prompts", 3, "--num-warmups", 2, "--random-input-len", 9)
    assert (len(made.requests), len(made.warmups)) == (3, 2)
    assert not any(warmup in made.requests for warmup in made.warmups)


def test_a_file_is_taken_whole_or_repeated_with_a_warning(tmp_path):
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    jsonl = ("--dataset-name", "jsonl", "--dataset-path", path)
    once, repeated = workload(*jsonl), workload(*jsonl, "--num-prompts", 3)
    assert ([r.prompt for r in once.requests], once.warnings) == (["a", "b"], [])
    assert [r.prompt for r in repeated.requests] == ["a", "b", "a"]
    assert "prefix cache" in repeated.warnings[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-prompts", 0], "--num-prompts=0"),
        (["--num-warmups", -1], "--num-warmups=-1"),
        (["--seed", -1], "--seed=-1"),
        (["--dataset-name", "jsonl"], "needs --dataset-path"),
        (["--dataset-path", "x"], "needs --dataset-name jsonl"),
        (["--random-vocab-size", 0], "--random-vocab-size=0"),
    ],
)
def test_bad_options(arguments, words):
    with pytest.raises(ConfigError, match=words):
        workload(*arguments)
