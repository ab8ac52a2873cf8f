"""Rounds without drafts leave the drafter's context for later: when it is written, and who sees it meanwhile.

That what is written is right is in test_traps.py.
"""

import pytest

from dflash_jax.engine.device.slots import DEFERRED
from dflash_jax.engine.host.scheduler import Scheduler
from tests.pairs import around_step, choose_lengths, golden_cases, golden_llm, greedy, prompt, tokens_of

PAIR = "qwen3_swa_tied"
CASE = golden_cases(PAIR)[3]  # the drafter is right about every block of 16
PAGE = 8


@pytest.mark.long
def test_features_wait_until_there_are_as_many_as_may(monkeypatch):
    written = []

    def spy(catch_up, *arguments):
        written.append(arguments[-1].tolist())
        return catch_up(*arguments)

    around_step(monkeypatch, "catch_up", spy)
    llm = golden_llm(PAIR, max_num_seqs=1)
    llm.generate(prompt(*CASE["input_ids"]), greedy(2 * DEFERRED + 6, speculation=False))
    assert written == [[DEFERRED]] * 2
    llm.generate(prompt(*CASE["input_ids"]), greedy(40))
    assert written == [[DEFERRED]] * 2  # drafting all the time, there is nothing to wait for


def test_pages_are_shared_once_the_context_of_all_their_tokens_is_written(monkeypatch):
    remember, lacking = Scheduler.remember, []

    def spy(scheduler, running):
        remember(scheduler, running)
        assert running.remembered * PAGE <= running.length - running.deferred
        lacking.append(running.length // PAGE - running.remembered)

    monkeypatch.setattr(Scheduler, "remember", spy)
    llm = golden_llm(PAIR, page_size=PAGE, max_num_seqs=1)
    llm.generate(prompt(*CASE["input_ids"]), greedy(3 * DEFERRED, speculation=False))
    assert max(lacking) == DEFERRED // PAGE
    assert min(lacking[DEFERRED + 2 :]) < max(lacking)  # it is written at last


def test_each_sequence_gets_its_own_features():
    """The third of three starts to draft after 20 rounds, when the second is gone: slots are no rows then."""
    llm = golden_llm(PAIR, max_num_batched_tokens=128, max_num_seqs=4)
    block = llm.engine.spec.block

    def plain_at_first(rounds):
        last = rounds[-1]
        return 1 if len(last.sequence.output.token_ids) + last.in_flight < 20 else block

    def lengths(texts, tokens):
        outputs = llm.generate([prompt(*text) for text in texts], [greedy(n) for n in tokens])
        return outputs[-1].metrics.acceptance_lengths, tokens_of(outputs)[-1]

    with pytest.MonkeyPatch.context() as patch:
        choose_lengths(patch, llm.engine, plain_at_first)
        texts = [golden_cases(PAIR)[i]["input_ids"] for i in (0, 1, 3)]
        together = lengths(texts, [70, 4, 60])
        assert together == lengths(texts[2:], [60])
    assert max(together[0]) > 8
