"""The bugs that cost other implementations their acceptance, put in on purpose.

Each must leave the answer as it is (a drafter cannot change it) and spoil the acceptance lengths of the
reference, so that the golden tests would fail.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import LayerMask
from dflash_jax.engine import round as steps
from dflash_jax.models.dflash import DraftModel
from dflash_jax.models.layers import DecoderLayer, rms_norm
from tests.pairs import golden_cases, golden_llm, greedy, prompt, tokens_of

PAIR = "qwen3_swa_tied"
CASE = golden_cases(PAIR)[3]  # 61 prompt tokens; the drafter is right about every block of 16
BLOCK = 16


@pytest.fixture(autouse=True)
def fresh_compiles():
    """A compiled step does not notice that the code behind it was patched."""
    for compiled in (steps.run_round, steps.prefill_chunk):
        compiled.clear_cache()
    yield
    for compiled in (steps.run_round, steps.prefill_chunk):
        compiled.clear_cache()


def patch_context(monkeypatch, change):
    """`change(features, positions)` is what reaches the drafter's context instead."""
    original = DraftModel.write_context

    def write_context(self, features, positions, cache):
        return original(self, *change(features, positions), cache)

    monkeypatch.setattr(DraftModel, "write_context", write_context)


def patch_draft(monkeypatch, change):
    """`change(slots)` is what the drafter believes instead."""
    original = steps.draft_block
    monkeypatch.setattr(
        steps,
        "draft_block",
        lambda target, draft, slots, cache, block: original(target, draft, change(slots), cache, block),
    )


def patch_config(llm, **changes):
    draft = llm.engine.draft
    llm.engine.draft = replace(draft, config=replace(draft.config, **changes))


def block_kv_left_in_the_cache(monkeypatch, llm):
    def skip_rounds(features, positions):
        return features, jnp.full_like(positions, -1) if features.shape[1] == BLOCK else positions

    patch_context(monkeypatch, skip_rounds)


def length_counts_unverified_tokens(monkeypatch, llm):
    patch_draft(monkeypatch, lambda slots: replace(slots, length=slots.length + BLOCK - 1))


def context_and_block_share_positions(monkeypatch, llm):
    patch_draft(monkeypatch, lambda slots: replace(slots, length=slots.length - 1))


def crop_at_the_wrong_end(monkeypatch, llm):
    def keep_the_end(features, positions):
        return (features[:, ::-1] if features.shape[1] == BLOCK else features), positions

    patch_context(monkeypatch, keep_the_end)


def later_prefill_chunks_leave_no_context(monkeypatch, llm):
    def first_chunk_only(features, positions):
        if features.shape[1] == BLOCK:  # a round
            return features, positions
        return features, jnp.where(positions < features.shape[1], positions, -1)

    llm.engine.config = replace(llm.engine.config, max_num_batched_tokens=32)
    patch_context(monkeypatch, first_chunk_only)


def trained_window_ignored(monkeypatch, llm):
    patch_config(llm, layers=tuple(LayerMask(mask.mask, None) for mask in llm.engine.draft.config.layers))


def sliding_layers_not_causal(monkeypatch, llm):
    patch_config(llm, layers=tuple(LayerMask("block", mask.window) for mask in llm.engine.draft.config.layers))


def full_layers_causal_in_the_block(monkeypatch, llm):
    patch_config(llm, layers=tuple(LayerMask("causal", mask.window) for mask in llm.engine.draft.config.layers))


def tap_ids_shifted_by_one(monkeypatch, llm):
    patch_config(llm, target_layer_ids=tuple(i + 1 for i in llm.engine.draft.config.target_layer_ids))


def taps_in_another_order(monkeypatch, llm):
    patch_config(llm, target_layer_ids=tuple(reversed(llm.engine.draft.config.target_layer_ids)))


def rows_predict_the_next_token(monkeypatch, llm):
    original = DraftModel.__call__

    def shifted(self, block, positions, cache):
        hidden, cache = original(self, block, positions, cache)
        return jnp.roll(hidden, 1, axis=1), cache

    monkeypatch.setattr(DraftModel, "__call__", shifted)


def anchor_slot_holds_the_mask(monkeypatch, llm):
    mask = llm.engine.draft.config.mask_token_id
    patch_draft(monkeypatch, lambda slots: replace(slots, anchor=jnp.full_like(slots.anchor, mask)))


def context_goes_through_the_input_norm(monkeypatch, llm):
    original = DecoderLayer.write_context

    def normed(self, context, rope, positions, cache):
        context = rms_norm(context, self.norms["input_layernorm"], self.config.rms_norm_eps)
        return original(self, context, rope, positions, cache)

    monkeypatch.setattr(DecoderLayer, "write_context", normed)


def rope_of_another_theta(monkeypatch, llm):
    rope = llm.engine.draft.config.rope
    patch_config(llm, rope=replace(rope, theta=rope.theta * 100))


BUGS = [
    block_kv_left_in_the_cache,
    length_counts_unverified_tokens,
    context_and_block_share_positions,
    crop_at_the_wrong_end,
    later_prefill_chunks_leave_no_context,
    trained_window_ignored,
    sliding_layers_not_causal,
    full_layers_causal_in_the_block,
    tap_ids_shifted_by_one,
    taps_in_another_order,
    rows_predict_the_next_token,
    anchor_slot_holds_the_mask,
    context_goes_through_the_input_norm,
    rope_of_another_theta,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_bug_would_be_caught(monkeypatch, bug):
    llm = golden_llm(PAIR)
    bug(monkeypatch, llm)
    cases = golden_cases(PAIR)
    outputs = llm.generate([prompt(*case["input_ids"]) for case in cases], greedy(80))
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    found = [output.metrics.acceptance_lengths for output in outputs]
    assert [lengths[:-1] for lengths in found] != [
        case["acceptance_lengths"][: len(lengths) - 1] for case, lengths in zip(cases, found, strict=True)
    ]


def test_healthy_code_has_the_acceptance_of_the_reference():
    output = golden_llm(PAIR).generate(prompt(*CASE["input_ids"]), greedy(80))[0]
    assert output.metrics.acceptance_lengths[:4] == CASE["acceptance_lengths"][:4] == [BLOCK] * 4


def test_drafter_context_holds_features_and_nothing_of_the_block():
    """After a round, every position below n holds what write_context gives for the whole text at once."""
    llm = golden_llm(PAIR)
    engine, text = llm.engine, CASE["input_ids"] + CASE["output_ids"]
    kept = {}
    original = steps.run_round

    def spy(params, slots, caches, *, spec):
        kept["slots"], kept["caches"], emitted = original(params, slots, caches, spec=spec)
        kept["length"], kept["keys"] = int(kept["slots"].length[0]), [np.asarray(k) for k in kept["caches"].draft.keys]
        return kept["slots"], kept["caches"], emitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_jax.engine.engine.run_round", spy)
        llm.generate(prompt(*CASE["input_ids"]), greedy(40))

    length = kept["length"]
    spec = steps.StepSpec(engine.target.config, engine.draft.config, BLOCK, "greedy", None)
    target, draft = steps.bind((engine.target.params, engine.draft.params), spec)
    positions = jnp.arange(length)[None]
    empty = engine._make_caches(1, length)
    _, features, _ = target(jnp.array([text[:length]]), positions, empty.target, draft.config.target_layer_ids)
    expected = draft.write_context(features, positions, empty.draft)
    for found, wanted in zip(kept["keys"], expected.keys, strict=True):
        np.testing.assert_allclose(found[0, :length], wanted[0], atol=2e-5)


@pytest.mark.parametrize("shared", ["target_layer_ids", "layers"])
def test_taps_and_masks_are_part_of_the_compile_key(shared):
    llm = golden_llm(PAIR)
    config = llm.engine.draft.config
    other = {
        "target_layer_ids": tuple(reversed(config.target_layer_ids)),
        "layers": tuple(LayerMask("block", mask.window) for mask in config.layers),
    }
    llm.generate(prompt(5), greedy(4))
    before = steps.run_round._cache_size()
    llm.generate(prompt(6), greedy(4))
    assert steps.run_round._cache_size() == before
    patch_config(llm, **{shared: other[shared]})
    llm.generate(prompt(5), greedy(4))
    assert steps.run_round._cache_size() == before + 1
