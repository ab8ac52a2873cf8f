"""Targets with Gated DeltaNet: however a request is cut, beside whatever it runs, its answer is the reference's.

The reference is one forward pass of the same weights over prompt and answer, with the whole recurrence from zeros; the
golden cases tie it to another implementation. Numbers in comments are those of `hybrid.md`-style bugs that other
engines shipped: each test fails when the bug is put in.
"""

import json
import shutil
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.models.target import TargetModel
from dflash_jax.state.pages import extend_hashes
from dflash_jax.weights.safetensors import list_tensors
from tests.conftest import ON_GPU
from tests.pairs import (
    GOLDEN,
    assert_empty,
    choose_lengths,
    empty_cache,
    golden_cases,
    golden_llm,
    greedy,
    in_parts,
    prompt,
    tokens_of,
)
from tests.test_failures import break_steps

PAIR = "q35_dense"
BLOCK = 8
CASES = golden_cases(PAIR)
PROMPTS = [prompt(*case["input_ids"]) for case in CASES]
EXPECTED = [case["output_ids"] for case in CASES]
TAILS = range(1, BLOCK + 3)  # tokens of the last chunk of a prompt
LONGEST = 256  # tokens of the reference's one program


@pytest.fixture(scope="module")
def llm():
    """Pages of 16 tokens: prompts of the cases have several, and a block of 8 fits one."""
    return golden_llm(PAIR, page_size=16, max_num_seqs=16)  # room for the sliding pages of every case


@pytest.fixture(scope="module")
def plain_llm():
    """An engine like the hybrid pair's, without a drafter."""
    return golden_llm(PAIR, drafter=False, page_size=16, max_num_seqs=16)


@cache
def reference():
    """Argmax of the logits after each token of a padded sequence."""
    engine = golden_llm(PAIR, drafter=False, max_num_seqs=1).engine
    model = TargetModel(engine.target.config).bind({"params": engine.target.params})

    @jax.jit
    def run(tokens, length):
        positions = jnp.where(jnp.arange(LONGEST) < length, jnp.arange(LONGEST), -1)[None]
        hidden, _, _ = model(tokens[None], positions, empty_cache(model.config, LONGEST))
        return model.logits(hidden)[0].argmax(axis=-1)

    return run


def assert_follows(prompt_ids, answer):
    """Whether every token of a greedy answer is the reference's argmax."""
    tokens = [*prompt_ids, *answer]
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    likeliest = np.asarray(reference()(padded, len(tokens)))
    assert answer
    assert list(answer) == likeliest[len(prompt_ids) - 1 : len(tokens) - 1].tolist()


def cached_tokens(outputs):
    return [output.metrics.num_cached_tokens for output in outputs]


def test_a_hit_restores_states_and_changes_nothing(llm):
    first = in_parts(llm, PROMPTS, greedy(80))
    again = in_parts(llm, PROMPTS, greedy(80))
    for outputs in (first, again):
        assert tokens_of(outputs) == EXPECTED
        for output, case in zip(outputs, CASES, strict=True):  # the drafter's context is restored, too
            lengths = output.metrics.acceptance_lengths
            assert lengths[:-1] == case["acceptance_lengths"][: len(lengths) - 1]
    assert cached_tokens(again) == [(len(case["input_ids"]) - 1) // 16 * 16 for case in CASES]
    stats = llm.engine.stats
    assert stats.num_snapshot_hits == 3  # two prompts are shorter than a page
    assert stats.num_snapshots_taken > stats.num_snapshots > 0  # longer ones have replaced shorter ones
    salted = in_parts(llm, [p | {"cache_salt": "tenant"} for p in PROMPTS], greedy(80))
    assert (tokens_of(salted), cached_tokens(salted)) == (EXPECTED, [0] * len(CASES))
    assert_empty(llm.engine)


def test_the_next_turn_begins_where_the_answer_ended(llm):
    turns = [[*case["input_ids"], *case["output_ids"], 3, 1, 4] for case in CASES]
    in_parts(llm, PROMPTS, greedy(80))
    outputs = in_parts(llm, [prompt(*turn) for turn in turns], greedy(20))
    for turn, output, case in zip(turns, outputs, CASES, strict=True):
        assert_follows(turn, output.outputs[0].token_ids)
        processed = len(case["input_ids"]) + 79  # all but the last emitted token
        assert output.metrics.num_cached_tokens == processed // 16 * 16
    assert_empty(llm.engine)


def test_prompts_that_branch_share_what_they_have_in_common(llm):
    trunk = np.random.default_rng(1).integers(2, 130, 100).tolist()
    for branch, expected in ((5, 0), (6, 0), (7, 96)):  # the second finds keys, and leaves a state where they end
        tokens = [*trunk, *[branch] * 40]
        (output,) = llm.generate([prompt(*tokens)], greedy(8))
        assert output.metrics.num_cached_tokens == expected
        assert_follows(tokens, output.outputs[0].token_ids)


@pytest.mark.parametrize("tokens", [7, pytest.param(64, marks=pytest.mark.long)])
def test_one_by_one_in_chunks(tokens):
    llm = golden_llm(PAIR, page_size=16, max_num_seqs=16, max_num_batched_tokens=tokens)
    assert tokens_of(in_parts(llm, PROMPTS, greedy(80), most=1)) == EXPECTED


@pytest.mark.long
def test_after_preemption():
    """`test_engine.py` preempts smaller hybrids at every stage."""
    llm = golden_llm(
        PAIR, page_size=8, max_model_len=232, kv_cache_memory_bytes=950_000, state_cache_fraction=0.2, max_num_seqs=4
    )
    llm.compile(PROMPTS, greedy(80))  # so that all run side by side from the first round
    outputs = llm.generate(PROMPTS, greedy(80))
    assert llm.engine.scheduler.num_preemptions > 0
    assert tokens_of(outputs) == EXPECTED
    assert_empty(llm.engine)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.long)])
def test_over_devices(devices):
    """Two key heads divide over 2 devices; over 4 the recurrence is replicated, and the rest is split."""
    llm = golden_llm(PAIR, tensor_parallel_size=devices, max_num_seqs=2, page_size=16)
    for _ in range(2):  # the second restores snapshots
        assert tokens_of(in_parts(llm, PROMPTS[2:], greedy(80), most=1)) == EXPECTED[2:]
    kept = llm.engine.runner.caches.states.kept[0].state
    assert {shard.data.shape[1] for shard in kept.addressable_shards} == {4 // devices if devices == 2 else 4}


@pytest.mark.parametrize("length", TAILS)
def test_short_prompts_are_no_rounds(llm, length):
    """A prompt of as many tokens as a block is prefilled, also in a slot that holds another's state."""
    llm.generate(PROMPTS[3:4], greedy(4))  # leaves a state in the first slot
    tokens = np.random.default_rng(length).integers(2, 130, length).tolist()
    (output,) = llm.generate([prompt(*tokens)], greedy(12))
    assert_follows(tokens, output.outputs[0].token_ids)


@pytest.mark.long
def test_rounds_of_any_length_follow_each_other(monkeypatch):
    """Each round folds what the one before left, whether that verified a block, a part of it or the anchor alone."""
    llm = golden_llm(PAIR, num_speculative_tokens=None, page_size=16, max_num_seqs=16)
    order = iter([8, 1, 8, 8, 2, 1, 1, 8, 4, 1] * 100)
    choose_lengths(monkeypatch, llm.engine, lambda _: next(order))
    assert tokens_of(in_parts(llm, PROMPTS[3:], greedy(80), most=1)) == EXPECTED[3:]


def test_drafted_and_plain_requests_in_one_batch(llm):
    params = [greedy(80, speculation=index % 2 == 0) for index in range(len(PROMPTS))]
    assert tokens_of(in_parts(llm, PROMPTS, params)) == EXPECTED


def test_tails_of_chunks_and_rounds_of_every_length_side_by_side(monkeypatch):
    """A prompt of 32 + n tokens ends with a chunk of n, as its last page boundary is a stop: 8.1 to 8.5.

    Two run at a time, so that each but the first begins beside a round of another, in a slot that held a third's state.
    Prompts are beginnings of golden texts, where the drafter is often right.
    """
    llm = golden_llm(PAIR, num_speculative_tokens=None, page_size=16, max_num_seqs=16)
    rng = np.random.default_rng(4)
    choose_lengths(monkeypatch, llm.engine, lambda _: int(rng.choice([8, 4, 2, 1], p=[0.6, 0.1, 0.1, 0.2])))
    texts = [(CASES[case]["input_ids"] + EXPECTED[case], first + n) for case, first in ((0, 0), (2, 32)) for n in TAILS]
    rng.shuffle(texts)
    requests = [
        llm.frontend.request(prompt(*text[:n]) | {"cache_salt": str(n)}, greedy(12, speculation=i % 3 > 0))
        for i, (text, n) in enumerate(texts)
    ]
    waiting = [sequence for request in requests for sequence in request.sequences]
    while waiting or not llm.engine.is_idle:
        if waiting and len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting) < 2:
            llm.engine.add([waiting.pop()])
        llm.engine.step()
    for (text, n), request in zip(texts, requests, strict=True):
        assert request.sequences[0].output.token_ids == text[n : n + 12]
    lengths = Counter(length for request in requests for length in request.output().metrics.acceptance_lengths)
    assert min(lengths[1], lengths[2], lengths[4], lengths[8]) > 2
    assert_empty(llm.engine)


def test_nan_ends_its_request_alone_and_reaches_no_snapshot(tmp_path):
    """The embedding of one token is NaN: of one request in its prompt, before a snapshot, of another in its answer."""
    poison, folder = 70, tmp_path / "target"
    shutil.copytree(GOLDEN / PAIR / "target", folder)
    tensors = {name: np.array(info.load()) for name, info in list_tensors(folder).items()}
    tensors["model.language_model.embed_tokens.weight"][poison] = np.nan
    tensors["lm_head.weight"][poison] = 0  # so that nobody drafts it
    save_file(tensors, folder / "model.safetensors")
    options = {"dtype": "float32", "page_size": 16, "max_num_seqs": 16, "num_speculative_tokens": BLOCK - 1}
    llm = LLM(folder, GOLDEN / PAIR / "draft", **options)
    trunk = CASES[4]["input_ids"]
    culprits = [[*trunk[:70], poison, *trunk[70:]], trunk[:47]]
    params = [greedy(20), greedy(20, logit_bias={poison: 100}), *[greedy(20)] * len(PROMPTS)]
    for _ in range(2):
        outputs = llm.generate([*(prompt(*text) for text in culprits), *PROMPTS], params)
        for output, emitted in zip(outputs, ([], [poison]), strict=False):
            completion = output.outputs[0]
            assert (completion.finish_reason, completion.token_ids) == ("error", emitted)
            assert "NaN" in completion.error
        assert tokens_of(outputs[2:]) == [answer[:20] for answer in EXPECTED]
        while not llm.engine.is_idle:
            llm.engine.step()
        assert_empty(llm.engine)
        for of_page in (*extend(culprits[0])[4:], *extend([*culprits[1], poison])[2:]):  # from the poison on
            assert llm.engine.scheduler.pools[2].known([of_page]) == []
    assert outputs[0].metrics.num_cached_tokens <= 64
    assert outputs[-2].metrics.num_cached_tokens == 48  # of one whose pages no culprit shared


def test_a_step_that_fails_once_costs_no_state(llm, monkeypatch, caplog):
    """States and tapes were donated to it: sequences begin anew, and so does the prefix cache."""
    caplog.set_level("CRITICAL", logger="dflash_jax")
    calls = []
    break_steps(
        monkeypatch, "greedy_round" if ON_GPU else "verify_commit", lambda *_: calls.append(1) or len(calls) == 3
    )
    assert tokens_of(llm.generate(PROMPTS, greedy(20))) == [answer[:20] for answer in EXPECTED]
    assert len(calls) > 3


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory):
    """The golden pair, allowed 8,192 tokens."""
    folder = tmp_path_factory.mktemp("long")
    shutil.copytree(GOLDEN / PAIR, folder / PAIR)
    for name in ("target", "draft"):
        file = folder / PAIR / name / "config.json"
        file.chmod(0o644)
        file.write_text(file.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 8192'))
    return folder / PAIR / "target", folder / PAIR / "draft"


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_do_not_drift_over_thousands_of_tokens(long_pair, temperature):
    """Accepted tokens are folded in the order of plain decoding, so neither tokens nor states ever part."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=4096, ignore_eos=True)
    states, answers = [], []
    for models in (long_pair, long_pair[:1]):
        llm = LLM(*models, dtype="float32", max_num_seqs=1, enable_prefix_caching=False)
        (output,) = llm.generate(PROMPTS[:1], params)
        answers.append(output.outputs[0].token_ids)
        # The last step of a request has folded all tokens but its own; both end with rounds of one token.
        llm.generate([prompt(*CASES[0]["input_ids"], *answers[-1][:-1])], greedy(1))
        states.append(states_of(llm, slot=0))
    assert answers[0] == answers[1]
    for drafted, plain in zip(*states, strict=True):
        np.testing.assert_allclose(drafted, plain, rtol=0, atol=1e-5)


def states_of(llm, slot):
    """States of every layer of a slot."""
    recurrent = llm.engine.runner.caches.states
    return [np.asarray(recurrent.kept[place.pool].state[place.first_row + slot]) for place in recurrent.places if place]


def test_folded_states_are_those_of_plain_decoding(llm, plain_llm):
    """Products of other shapes round their inputs otherwise; the recurrence adds nothing to that."""
    states = []
    for engine in (llm, plain_llm):
        engine.generate(PROMPTS[3:4], greedy(40))
        pool = engine.engine.scheduler.pools[2]
        hashes = extend(CASES[3]["input_ids"] + CASES[3]["output_ids"][:35])
        (unit,) = pool.known([hashes[95 // 16]])  # the snapshot after 96 tokens
        states.append(states_of(engine, slot=16 + unit))
    for drafted, decoded in zip(*states, strict=True):
        np.testing.assert_allclose(drafted, decoded, rtol=0, atol=1e-5)


def extend(tokens):
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 16)
    return hashes


@pytest.mark.long
def test_a_long_conversation_computes_only_what_is_new(long_pair):
    """20 turns of 200 tokens behind a long system prompt, as agents have them."""
    options = {"dtype": "float32", "max_num_seqs": 1, "num_speculative_tokens": BLOCK - 1}
    llm, plain = LLM(*long_pair, **options), LLM(*long_pair, **options, enable_prefix_caching=False)
    rng = np.random.default_rng(2)
    tokens = rng.integers(2, 130, 2000).tolist()
    for turn in range(20):
        tokens += rng.integers(2, 130, 20).tolist()
        answers = [each.generate([prompt(*tokens)], greedy(200))[0] for each in (llm, plain)]
        assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
        if turn:
            assert answers[0].metrics.num_cached_tokens >= 0.95 * len(tokens)
        tokens += answers[0].outputs[0].token_ids


def test_seeded_answers_do_not_depend_on_drafts(llm, plain_llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)
    assert tokens_of(in_parts(llm, PROMPTS, params)) == tokens_of(in_parts(plain_llm, PROMPTS, params))


def test_prompt_logprobs_go_through_the_whole_model(llm):
    (output,) = llm.generate(PROMPTS[3:4], greedy(4, prompt_logprobs=1))
    tokens = CASES[3]["input_ids"]
    assert len(output.prompt_logprobs) == len(tokens)
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    likeliest = np.asarray(reference()(padded, len(tokens)))
    for i in range(1, len(tokens)):
        ranks = {entry.rank: token for token, entry in output.prompt_logprobs[i].items()}
        assert tokens[i] in output.prompt_logprobs[i]
        assert ranks[1] == likeliest[i - 1]


def test_the_engine_says_what_states_take(caplog):
    with caplog.at_level("INFO", logger="dflash_jax"):
        engine = golden_llm(PAIR, max_num_seqs=2).engine
    config = json.loads((GOLDEN / PAIR / "target" / "config.json").read_text())["text_config"]
    assert config["layer_types"].count("linear_attention") == 6
    state, tape = 4 * 4 * 16 * 16, 4 * (3 + BLOCK) * 128 + 4 * BLOCK * 4 * 2
    assert f"Recurrent states: {6 * (state + tape) / 2**20:,.1f} MiB a sequence" in caplog.text
    assert engine.layout.groups[2].num_units > 0
