"""The bugs that cost other implementations their acceptance, put in on purpose.

Each must leave the answer as it is (a drafter cannot change it) and spoil the acceptance lengths of the
reference, so that the golden tests would fail.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine.device import steps
from dflash_jax.engine.device.slots import DEFERRED, Slots
from dflash_jax.engine.programs.store import programs
from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.spec import LayerSpec
from dflash_jax.weights import drafter
from pallas_kernels.lib.norm import rms_norm
from tests.pairs import choose_lengths, empty_cache, golden_cases, golden_llm, greedy, prompt, tokens_of

PAIR = "qwen3_swa_tied"
CASE = golden_cases(PAIR)[3]  # 61 prompt tokens; the drafter is right about every block of 16
BLOCK = 16
CHUNK = 12  # of prefill
MASK_TOKEN = 191
PAGE = 8


def patch_context(monkeypatch, change):
    """`change(features, positions)` is what reaches the drafter's context instead."""
    original = DraftModel.write_context

    def write_context(self, features, positions, cache):
        return original(self, *change(features, positions), cache)

    monkeypatch.setattr(DraftModel, "write_context", write_context)


def patch_draft(monkeypatch, change):
    """`change(slots)` is what the drafter believes instead."""
    original = steps.draft_block

    def draft_block(target, draft, slots, positions, cache):
        believed = change(slots)
        return original(target, draft, believed, positions + (believed.length - slots.length)[:, None], cache)

    monkeypatch.setattr(steps, "draft_block", draft_block)


def patch_config(monkeypatch, change):
    """The drafter's configuration is read as `change(config)` instead."""
    original = drafter.draft_config
    monkeypatch.setattr(drafter, "draft_config", lambda *args, **options: change(original(*args, **options)))


def patch_masks(monkeypatch, change):
    patch_config(monkeypatch, lambda config: replace(config, layers=tuple(map(change, config.layers))))


def non_causal(layer):
    return LayerSpec.attention(layer.window, causal=False)


def patch_taps(monkeypatch, change):
    patch_config(monkeypatch, lambda config: replace(config, target_layer_ids=tuple(change(config.target_layer_ids))))


def block_kv_left_in_the_cache(monkeypatch):
    def skip_rounds(features, positions):
        return features, jnp.full_like(positions, -1) if features.shape[1] == BLOCK else positions

    patch_context(monkeypatch, skip_rounds)


def moved(slots, by):
    """Slots that believe in another length."""
    return Slots(slots.packed.at[:, 1].add(by))


def length_counts_unverified_tokens(monkeypatch):
    patch_draft(monkeypatch, lambda slots: moved(slots, BLOCK - 1))


def context_and_block_share_positions(monkeypatch):
    patch_draft(monkeypatch, lambda slots: moved(slots, -1))


def crop_at_the_wrong_end(monkeypatch):
    def keep_the_end(features, positions):
        return (features[:, ::-1] if features.shape[1] == BLOCK else features), positions

    patch_context(monkeypatch, keep_the_end)


def later_prefill_chunks_leave_no_context(monkeypatch):
    def first_chunk_only(features, positions):
        if features.shape[1] == BLOCK:  # a round
            return features, positions
        return features, jnp.where(positions < CHUNK, positions, -1)

    patch_context(monkeypatch, first_chunk_only)


def trained_window_ignored(monkeypatch):
    patch_masks(monkeypatch, lambda layer: LayerSpec.attention(None, causal=layer.mixer.causal))


def sliding_layers_not_causal(monkeypatch):
    patch_masks(monkeypatch, non_causal)


def full_layers_causal_in_the_block(monkeypatch):
    patch_masks(monkeypatch, lambda layer: LayerSpec.attention(layer.window, causal=True))


def tap_ids_shifted_by_one(monkeypatch):
    patch_taps(monkeypatch, lambda ids: (i + 1 for i in ids))


def taps_in_another_order(monkeypatch):
    patch_taps(monkeypatch, reversed)


def rows_predict_the_next_token(monkeypatch):
    original = DraftModel.__call__

    def shifted(self, block, positions, cache):
        hidden, cache = original(self, block, positions, cache)
        return jnp.roll(hidden, 1, axis=1), cache

    monkeypatch.setattr(DraftModel, "__call__", shifted)


def anchor_slot_holds_the_mask(monkeypatch):
    patch_draft(monkeypatch, lambda slots: Slots(slots.packed.at[:, 0].set(MASK_TOKEN)))


def context_goes_through_the_input_norm(monkeypatch):
    def normed(self, context):
        eps = self.config.rms_norm_eps
        return [
            layer.self_attn.keys_values(rms_norm(context, layer.norms["input_layernorm"], eps)) for layer in self.layers
        ]

    monkeypatch.setattr(DraftModel, "_context_heads", normed)


def rope_of_another_theta(monkeypatch):
    patch_config(monkeypatch, lambda config: replace(config, rope=replace(config.rope, theta=1e6)))


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

RARELY = {  # each compiles a pair anew; of every kind of bug another one is always put in
    context_and_block_share_positions,
    crop_at_the_wrong_end,
    later_prefill_chunks_leave_no_context,
    sliding_layers_not_causal,
    full_layers_causal_in_the_block,
    taps_in_another_order,
    anchor_slot_holds_the_mask,
    rope_of_another_theta,
}


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.__name__, marks=pytest.mark.long if bug in RARELY else ()) for bug in BUGS]
)
def test_bug_would_be_caught(monkeypatch, bug):
    bug(monkeypatch)
    llm = golden_llm(PAIR, max_num_batched_tokens=CHUNK, max_num_seqs=1)
    cases = golden_cases(PAIR)
    outputs = llm.generate([prompt(*case["input_ids"]) for case in cases], greedy(40))
    assert tokens_of(outputs) == [case["output_ids"][:40] for case in cases]
    found = [output.metrics.acceptance_lengths for output in outputs]
    assert [lengths[:-1] for lengths in found] != [
        case["acceptance_lengths"][: len(lengths) - 1] for case, lengths in zip(cases, found, strict=True)
    ]


def test_healthy_code_has_the_acceptance_of_the_reference():
    llm = golden_llm(PAIR, max_num_batched_tokens=CHUNK, max_num_seqs=1)
    output = llm.generate(prompt(*CASE["input_ids"]), greedy(80))[0]
    assert output.metrics.acceptance_lengths[:4] == CASE["acceptance_lengths"][:4] == [BLOCK] * 4


@pytest.mark.parametrize("plain", [0, 1, 3, DEFERRED, DEFERRED + 3], ids="{} plain rounds".format)
def test_drafter_context_holds_features_and_nothing_of_the_block(plain):
    """After a round with drafts, every position below n holds what write_context gives for the whole text at once."""
    llm = golden_llm(PAIR, page_size=PAGE, max_num_seqs=1)
    engine, text = llm.engine, CASE["input_ids"] + CASE["output_ids"]
    kept = {}
    enqueue = engine._enqueue_round
    lengths = itertools.cycle([1] * plain + [BLOCK])

    def spy(planned):
        changed = enqueue(planned)
        if planned.length > 1:
            scheduler, runner = engine.scheduler, engine.runner
            kept["full"], kept["sliding"] = (table[0].copy() for table in scheduler.tables)
            caches = runner.caches.draft
            kept["keys"], kept["places"] = [np.asarray(k) for k in caches.keys], caches.places
            kept["length"] = int(runner.slots.length[0])
        return changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_enqueue_round", spy)
        choose_lengths(patch, engine, lambda _: next(lengths))
        llm.generate(prompt(*CASE["input_ids"]), greedy(40))

    length = kept["length"]
    target, draft = steps.bind(engine.runner.params, engine.spec)

    @jax.jit
    def context(tokens):
        positions = jnp.arange(length)[None]
        taps = draft.config.target_layer_ids
        _, features, _ = target(tokens, positions, empty_cache(target.config, length), taps)
        return draft.write_context(features, positions, empty_cache(draft.config, length))

    expected = context(jnp.array([text[:length]]))
    for (group, pool, first_page), wanted in zip(kept["places"], expected.keys, strict=True):
        table, keys = kept["sliding"] if group else kept["full"], kept["keys"][pool][first_page:]
        for position in range(length):
            page, offset = table[position // PAGE], position % PAGE
            if page >= 0:
                np.testing.assert_allclose(keys[page, :, offset], wanted[0, position], atol=5e-5)
        kept_positions = sum(table[position // PAGE] >= 0 for position in range(length))
        assert kept_positions == length if not group else 12 <= kept_positions < length


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.parametrize(
    "other",
    [
        lambda config: replace(config, target_layer_ids=tuple(reversed(config.target_layer_ids))),
        lambda config: replace(config, layers=tuple(map(non_causal, config.layers))),
    ],
    ids=["taps", "masks"],
)
def test_taps_and_masks_are_part_of_the_compile_key(monkeypatch, other):
    def compiled_after(token):
        llm = golden_llm(PAIR, max_num_seqs=1)
        llm.compile(prompt(token), greedy(4))
        llm.generate(prompt(token), greedy(4))
        return programs().num_compiled

    before = compiled_after(5)
    assert compiled_after(6) == before > 0
    patch_config(monkeypatch, other)
    assert compiled_after(5) == 2 * before
