"""Figures of records with given times."""

import json

import pytest

from dflash_jax.base.acceptance import of_engine
from dflash_jax.bench.acceptance import SpeculativeDecoding, of_prometheus, of_requests
from dflash_jax.bench.stats import RequestRecord, peak_concurrency, spread, summarize


def record(*arrivals, start=0.0, end=None, tokens=1, **fields):
    pairs = [a if isinstance(a, tuple) else (a, 0) for a in arrivals]
    end = pairs[-1][0] if end is None else end
    return RequestRecord(tokens, start, end, pairs, prompt_tokens=10, completion_tokens=tokens, **fields)


def failed(start, end, kind="timeout", tokens=0):
    return RequestRecord(9, start, end, prompt_tokens=10, completion_tokens=tokens, error_kind=kind, error="why")


def test_times_of_one_request():
    r = record(2.0, 3.0, 5.0, start=0.5, tokens=7)
    assert (r.ttft, r.e2el, r.tpot) == (1.5, 4.5, 0.5)
    assert r.gaps == [1.0, 2.0]


def test_a_single_token_has_no_time_per_output_token():
    r = record(2.0, start=1.0)
    assert (r.ttft, r.tpot, r.gaps, r.inter_token) == (1.0, None, [], [])


def test_inter_token_shares_gaps_evenly_where_the_server_does_not_tell():
    # 7 tokens: the first arrival has one, the other six are divided among two gaps
    assert record(1.0, 2.5, 5.5, tokens=7).inter_token == [(0.5, 3.0), (1.0, 3.0)]


def test_inter_token_takes_what_the_server_tells_if_it_adds_up():
    arrivals = [(1.0, 1), (2.0, 4), (2.5, 0), (4.0, 2)]  # an arrival without tokens does not end a gap
    assert record(*arrivals, tokens=7).inter_token == [(0.25, 4), (1.0, 2)]
    seconds, tokens = zip(*record(*arrivals, tokens=8).inter_token, strict=True)
    assert seconds == pytest.approx((3 / 7, 1.5 / 7, 4.5 / 7))
    assert tokens == pytest.approx((7 / 3, 7 / 3, 7 / 3))


def test_mean_inter_token_latency_is_the_mean_of_tpot_for_one_request():
    r = record(1.0, 1.5, 4.0, 9.0, tokens=20)
    figures = summarize([r])
    assert figures["mean_itl_ms"] == pytest.approx(figures["mean_tpot_ms"])


def test_spread_interpolates_and_weighs():
    assert spread("x", [1.0, 2.0, 3.0]) == {"mean_x": 2.0, "p50_x": 2.0, "p90_x": pytest.approx(2.8), "p99_x": 2.98}
    heavy = spread("x", [1.0, 5.0], [98.0, 2.0])
    assert heavy == {"mean_x": pytest.approx(1.08), "p50_x": 1.0, "p90_x": 1.0, "p99_x": 5.0}
    assert set(spread("x", []).values()) == {None}


def test_failures_take_time_and_give_no_throughput():
    figures = summarize(
        [record(1.0, 2.0, tokens=6), failed(0.0, 4.0, tokens=100), failed(1.0, 2.0), failed(1, 2, "dead")]
    )
    assert figures["duration"] == 4.0
    assert (figures["completed"], figures["failed"]) == (1, 3)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (10, 6)
    assert (figures["request_throughput"], figures["output_throughput"]) == (0.25, 1.5)
    assert figures["total_token_throughput"] == 4.0
    assert figures["mean_ttft_ms"] == 1000.0
    assert list(figures["errors"].items()) == [
        ("timeout", {"count": 2, "example": "why"}),
        ("dead", {"count": 1, "example": "why"}),
    ]


def test_nothing_but_failures_is_still_json():
    figures = summarize([failed(0.0, 0.0)])
    assert figures["output_throughput"] is None
    assert figures["p99_ttft_ms"] is None
    json.dumps(figures, allow_nan=False)


def test_tokens_a_chunk_and_early_ends():
    short = record(1.0, 2.0, tokens=6)
    short.output_len = 7
    figures = summarize([short, record(1.0, 2.0, tokens=4)])
    assert figures["tokens_per_chunk"] == 2.5
    assert figures["num_ended_early"] == 1


def test_peak_concurrency_lets_one_end_before_the_next_begins():
    assert peak_concurrency([failed(0, 1), failed(1, 2), failed(1.5, 3)]) == 2


def block(steps, drafted, accepted, histogram):
    return SpeculativeDecoding(steps, drafted, accepted, histogram)


def test_acceptance_of_requests_is_summed_and_contradictions_are_left_out():
    good, other = block(3, 45, 7, [1, 0, 1, 0, 0, 1]), block(2, 30, 1, [1, 1])
    wrong = [block(4, 45, 7, [1, 0, 1, 0, 0, 1]), block(3, 45, 8, [1, 0, 1, 0, 0, 1]), block(1, 1, 2, [0, 0, 1])]
    total = of_requests([good, *wrong, other])
    assert total.to_dict() == {
        "source": "requests",
        "mean_acceptance_length": 1 + 8 / 5,
        "draft_acceptance_rate": 8 / 75,
        "num_drafts": 5,
        "num_draft_tokens": 75,
        "num_accepted_tokens": 8,
        "histogram": [2, 1, 1, 0, 0, 1],
    }
    assert of_requests(wrong) is None


def test_acceptance_of_the_engine():
    total = of_engine([1, 16, 3, 1], 60).to_dict()
    assert total["histogram"] == [2, 0, 1] + [0] * 12 + [1]
    assert (total["num_drafts"], total["num_accepted_tokens"]) == (4, 17)
    assert total["mean_acceptance_length"] == 21 / 4
    assert of_engine([], 0).to_dict()["mean_acceptance_length"] is None


def exposition(prefix, drafts, drafted, accepted):
    return (
        f"# HELP {prefix}spec_decode_num_drafts_total x\n# TYPE {prefix}spec_decode_num_drafts_total counter\n"
        f'{prefix}spec_decode_num_drafts_total{{engine="0",model_name="a b"}} {drafts - 1}.0\n'
        f'{prefix}spec_decode_num_drafts_total{{engine="1",model_name="a b"}} 1.0\n'
        f"{prefix}spec_decode_num_drafts_created 1.7e9\n"
        f"{prefix}spec_decode_num_draft_tokens_total {drafted}\n"
        f"{prefix}spec_decode_num_accepted_tokens_total {accepted:e}\n"
        f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 99\n'
    )


@pytest.mark.parametrize("prefixes", [["vllm:"], ["dflash_jax:"], ["dflash_jax:", "vllm:"], [""]])
def test_acceptance_of_prometheus_under_any_prefix_and_never_twice(prefixes):
    before = "".join(exposition(p, 10, 150, 40) for p in prefixes)
    after = "".join(exposition(p, 14, 210, 60) for p in prefixes)
    total = of_prometheus(before, after)
    assert (total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens) == (4, 60, 20)
    assert total.to_dict()["mean_acceptance_length"] == 6.0


def test_no_counters_no_acceptance():
    assert of_prometheus("", "") is None
    assert of_prometheus("", "vllm:spec_decode_num_drafts_total 3\nprocess_cpu_seconds_total 1") is None
