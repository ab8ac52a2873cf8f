"""Figures of rounds that are written down by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.base.errors import DFlashError
from dflash_jax.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dflash_jax.base.values import SamplingParams
from dflash_jax.eval.acceptance import acceptance_of, measure, positions
from tests.pairs import reciter

ROUNDS = st.lists(st.integers(0, 9).flatmap(lambda drafts: st.tuples(st.integers(1, drafts + 1), st.just(drafts))))


def output(lengths, drafts=3, tokens=None, finish_reason="length", error=None):
    tokens = list(range(1 + sum(lengths))) if tokens is None else tokens
    completion = CompletionOutput(0, token_ids=tokens, finish_reason=finish_reason, error=error)
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(acceptance_lengths=lengths, draft_lengths=[drafts] * len(lengths)),
    )


def test_figures_of_two_requests():
    figures = acceptance_of([output([4, 1, 1]), output([2], finish_reason="stop")])
    assert (figures.num_requests, figures.num_tokens) == (2, 7 + 3)
    assert figures.mean_acceptance_length == (4 + 1 + 1 + 2) / 4
    assert figures.mean_acceptance_length_by_request == (2 + 2) / 2
    assert figures.acceptance_per_position == [2 / 4, 1 / 4, 1 / 4]
    assert figures.conditional_acceptance == [2 / 4, 1 / 2, 1.0]
    assert figures.rounds.histogram == [2, 1, 0, 1]
    assert figures.rounds.num_draft_tokens == 12
    assert figures.finish_reasons == {"length": 1, "stop": 1}
    assert figures.repeated_ngrams == 0


def test_a_position_that_no_round_reached_has_no_conditional_rate():
    assert positions([1, 2], [4, 4]) == ([0.5, 0, 0, 0], [0.5, 0.0, None, None])


def test_rounds_without_drafts_count_as_rounds_but_tell_nothing_of_positions():
    outputs = [output([3, 1], drafts=2), output([1, 1], drafts=0)]
    figures = acceptance_of(outputs)
    assert figures.mean_acceptance_length == 6 / 4
    assert figures.acceptance_per_position == [0.5, 0.5]


def test_nothing_is_known_of_no_rounds():
    figures = acceptance_of([output([])]).to_dict()
    names = ("mean_acceptance_length", "mean_acceptance_length_by_request", "least_repetitive_acceptance_length")
    assert [figures[name] for name in names] == [None] * 3
    assert figures["acceptance_per_position"] == figures["conditional_acceptance"] == []
    assert acceptance_of([]).repeated_ngrams is None


@given(ROUNDS)
def test_positions_against_counting_one_by_one(rounds):
    lengths, drafts = [length for length, _ in rounds], [draft for _, draft in rounds]
    drafting = [(length - 1, draft) for length, draft in rounds if draft]
    per_position, conditional = positions(lengths, drafts)
    highest = max(drafts, default=0)
    assert len(per_position) == len(conditional) == highest
    for k in range(highest):
        accepted = [draft for taken, draft in drafting if taken > k]
        reached = [draft for taken, draft in drafting if taken >= k and draft > k]
        assert per_position[k] == pytest.approx(len(accepted) / len(drafting))
        assert conditional[k] == (pytest.approx(len(accepted) / len(reached)) if reached else None)
    # accepted drafts of all positions and the bonus tokens are all tokens of rounds with drafts
    if drafting:
        emitted = sum(taken + 1 for taken, _ in drafting)
        assert (1 + sum(per_position)) * len(drafting) == pytest.approx(emitted)


def test_a_loop_does_not_flatter():
    loop = output([16, 16], drafts=15, tokens=[7] * 33)
    plain = output([2, 2], drafts=15, tokens=list(range(33)))
    figures = acceptance_of([loop, plain])
    assert figures.mean_acceptance_length == 9
    assert figures.least_repetitive_acceptance_length == 2
    assert figures.repeated_ngrams == pytest.approx((25 / 26) / 2)


def test_a_failed_completion_is_no_figure():
    with pytest.raises(DFlashError, match="no numbers"):
        acceptance_of([output([1]), output([], finish_reason="error", error="no numbers")])


def test_measure_with_an_engine():
    llm = reciter(max_model_len=64, max_num_seqs=1)
    prompt = "You may reproduce and distribute copies of the"
    figures = measure(llm, [prompt, prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert (figures.num_requests, figures.num_tokens) == (2, 40)
    # the first token of each completion belongs to no round
    assert figures.rounds.num_drafts + figures.rounds.num_accepted_tokens == 40 - 2
    assert figures.mean_acceptance_length > 2
    assert len(figures.acceptance_per_position) == 15
