"""The engine under load: whatever runs beside a request, is preempted, shared or aborted, its answer stays its own."""

from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflash_jax import LLM, ConfigError, SamplingParams
from tests.pairs import DRAFT, TARGET, golden_cases, golden_llm, greedy, prompt, tokens_of, write_model

VOCABULARY = 16
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "num_target_layers": 3, "max_position_embeddings": 64}
SLIDING, FULL = "sliding_attention", "full_attention"
BASES = [list(range(12)), [5] * 9, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [7]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=5, seed=2, max_tokens=11, min_tokens=4, stop_token_ids=[3, 4]),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=9, n=2, ignore_eos=True),
]


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    raw = DRAFT | SIZES | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 6, "block_size": 4}
    raw["dflash_config"] = {"target_layer_ids": [0, 2], "mask_token_id": 15}
    return write_model(folder / "target", TARGET | SIZES, 0), write_model(folder / "draft", raw, 1)


def check(engine):
    engine.scheduler.check_integrity()


def assert_empty(engine):
    assert engine.is_idle
    check(engine)
    for pool in (engine.scheduler.full, engine.scheduler.sliding):
        assert pool.num_free == pool.num_pages


@pytest.fixture(scope="session")
def machine(pair):
    """A class of state machines over engines of one shape, so that steps are compiled once."""
    alone = LLM(pair[0], max_num_seqs=1, enable_prefix_caching=False)

    @cache
    def expected(tokens, params):
        return tokens_of(alone.generate(prompt(*tokens), PARAMS[params]))

    class EngineMachine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            # 20 pages of 4 tokens: one sequence of 64 tokens and its look-ahead fits, four do not
            self.llm = LLM(*pair, max_num_seqs=4, page_size=4, max_num_batched_tokens=8, kv_cache_memory_bytes=110_000)
            self.engine, self.requests = self.llm.engine, []

        @rule(
            base=st.integers(0, len(BASES) - 1),
            cut=st.integers(1, 20),
            tail=st.lists(st.integers(0, 15), max_size=3),
            params=st.integers(0, len(PARAMS) - 1),
        )
        def add(self, base, cut, tail, params):
            tokens = (*BASES[base][:cut], *tail)
            request = self.llm._request(prompt(*tokens), PARAMS[params])
            self.requests.append((tokens, params, request))
            for sequence in request.sequences:
                self.engine.add(sequence)

        @rule(steps=st.integers(1, 6))
        def step(self, steps):
            for _ in range(steps):
                self.engine.step()
                check(self.engine)

        @rule(data=st.data())
        def abort(self, data):
            running = [r for _, _, request in self.requests for r in request.sequences if not r.finished]
            if running:
                self.engine.abort(data.draw(st.sampled_from(running)))

        @invariant()
        def integrity(self):
            check(self.engine)

        def teardown(self):
            while not self.engine.is_idle:
                self.engine.step()
                check(self.engine)
            assert_empty(self.engine)
            for tokens, params, request in self.requests:
                for sequence, wanted in zip(request.sequences, expected(tokens, params), strict=True):
                    found = sequence.output.token_ids
                    assert sequence.finished
                    aborted = sequence.output.finish_reason == "abort"
                    assert found == (wanted[: len(found)] if aborted else wanted)

    return EngineMachine


def test_every_answer_is_its_own(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None))


PAIR = "qwen3_swa_tied"


def assert_acceptance(outputs, cases):
    for output, case in zip(outputs, cases, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"]
        found = output.metrics.acceptance_lengths
        assert found[:-1] == case["acceptance_lengths"][: len(found) - 1]


@pytest.mark.parametrize("page_size", [4, 7, 64])
def test_acceptance_after_a_prefix_hit(page_size):
    """The pages of a hit hold the drafter's keys too, those of its sliding layers included."""
    cases = golden_cases(PAIR)
    llm = golden_llm(PAIR, page_size=page_size)
    prompts = [prompt(*case["input_ids"]) for case in cases]
    assert_acceptance(llm.generate(prompts, greedy(80)), cases)
    hits = []
    admit = llm.engine.scheduler.admit

    def spy():
        admitted = admit()
        hits.extend(running.prefilled for running in admitted)
        return admitted

    llm.engine.scheduler.admit = spy
    assert_acceptance(llm.generate(prompts, greedy(80)), cases)
    assert hits == [(len(case["input_ids"]) - 1) // page_size * page_size for case in cases]


def test_acceptance_after_preemption():
    cases = golden_cases(PAIR)
    llm = golden_llm(PAIR, page_size=4, max_num_seqs=4, max_model_len=160, kv_cache_memory_bytes=1_000_000)
    preempted = []
    preempt = llm.engine.scheduler.preempt_last
    llm.engine.scheduler.preempt_last = lambda: preempted.append(1) or preempt()
    outputs = llm.generate([prompt(*case["input_ids"]) for case in cases], greedy(80))
    assert preempted
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    assert_acceptance(outputs, cases)
    assert_empty(llm.engine)


def test_stream_left_early_frees_everything():
    llm = golden_llm(PAIR)
    case = golden_cases(PAIR)[0]
    for output in llm.stream(prompt(*case["input_ids"]), greedy(80)):
        if len(output.outputs[0].token_ids) > 20:
            break
    else:
        pytest.fail("nothing was streamed")
    llm.engine.step()
    assert tokens_of(llm.generate(prompt(*case["input_ids"]), greedy(80))) == [case["output_ids"]]
    while not llm.engine.is_idle:
        llm.engine.step()
    assert_empty(llm.engine)


def test_sliding_pages_stay_bounded(pair):
    """However long the text, sliding layers keep their window and the look-ahead."""
    llm = LLM(*pair, max_num_seqs=1, page_size=4)
    engine, kept = llm.engine, []
    for _ in llm.stream(prompt(*[2] * 20), greedy(40)):
        kept += [len(r.sliding) for r in engine.scheduler.running]
        check(engine)
    assert max(kept) <= engine.layout.sliding_pages <= 7


def test_too_little_memory_for_one_sequence(pair):
    with pytest.raises(ConfigError, match=r"max_model_len=64.*kv_cache_memory_bytes"):
        LLM(*pair, kv_cache_memory_bytes=10_000)
