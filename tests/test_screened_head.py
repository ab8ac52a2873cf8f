"""A target whose head has an 8-bit copy: drafts come from the copy, answers are those of the head."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.engine.device import model as model_module
from dflash_jax.engine.device.model import Model, screened
from dflash_jax.engine.device.steps import bind_target
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.weights.formats.screened import ScreenedHead, is_worth_it
from dflash_jax.weights.loader import load_params
from pallas_kernels import screen_of
from pallas_kernels.registry import Device
from tests.pairs import (
    OF_TWO_LAYERS,
    TWO_LAYERS,
    golden_cases,
    golden_llm,
    greedy,
    prompt,
    tokens_of,
    write_model,
)

HOPPER = Device("cuda", (9, 0))


@pytest.fixture
def worthwhile(monkeypatch):
    """Copies are kept for every head, as if kernels read them faster."""
    monkeypatch.setattr(model_module, "is_worth_it", lambda *args: True)


def mean_length(lengths):
    return np.mean(np.concatenate(list(lengths)))


def test_answers_are_the_heads_and_drafts_are_as_good(worthwhile):
    cases = golden_cases("qwen3_swa_tied")
    llm = golden_llm("qwen3_swa_tied", draft_quantization="fp8")
    target, draft = llm.engine.runner.params
    assert "lm_head" not in draft
    for found, expected in zip(target["screen"], screen_of(target["embed_tokens"]), strict=True):
        np.testing.assert_array_equal(found, expected)
    outputs = llm.generate([prompt(*case["input_ids"]) for case in cases], greedy(80))
    assert tokens_of(outputs) == [case["output_ids"] for case in cases]
    in_full = mean_length(case["acceptance_lengths"] for case in cases)
    assert mean_length(output.metrics.acceptance_lengths for output in outputs) >= 0.97 * in_full


def test_drafts_come_from_the_copy(worthwhile):
    """A copy that says something else changes drafts, and no answer."""
    cases = golden_cases("qwen3_swa_tied")[:1]
    llm = golden_llm("qwen3_swa_tied", draft_quantization="fp8")
    runner = llm.engine.runner
    (target, draft), screen = runner.params, runner.params[0]["screen"]
    runner.params = target | {"screen": screen._replace(values=jnp.roll(screen.values, 1, axis=0))}, draft
    runner.replace_draft(Model(llm.engine.spec.draft, draft, None))  # hands the parameters over to steps
    [output] = llm.generate([prompt(*cases[0]["input_ids"])], greedy(80))
    assert tokens_of([output]) == [cases[0]["output_ids"]]
    assert mean_length([output.metrics.acceptance_lengths]) < 1.2


def small_target(folder, head="lm_head", **changes):
    """A small target and its drafter; engines of them plan with what is left for keys and values."""
    models = ("target", TWO_LAYERS), ("draft", OF_TWO_LAYERS)
    folders = [write_model(folder / name, model | changes, seed) for seed, (name, model) in enumerate(models)]
    engine = LLM(*folders, max_num_seqs=1).engine
    target = Model(engine.spec.target, load_params(folders[0], engine.spec.target, jnp.float32), None)
    return target, engine.spec.draft, engine.config, target.params[head]


@pytest.mark.parametrize(
    ("quantization", "own_vocabulary", "room", "is_kept"),
    [
        ("fp8", False, 0.1, True),  # in place of the drafter's own
        ("fp8", True, 0.1, False),
        (None, False, 1.1, True),
        (None, False, 0.9, False),
        ("int4", False, 0.9, False),
        ("int4", False, 1.1, True),
    ],
)
def test_it_is_kept_where_memory_has_room(
    tmp_path, monkeypatch, worthwhile, quantization, own_vocabulary, room, is_kept
):
    target, draft, config, head = small_target(tmp_path)
    monkeypatch.setattr(model_module, "free_bytes", lambda *args: int(20 * room * head.size))
    draft = replace(draft, draft_vocab_size=20 if own_vocabulary else None)
    config = replace(config, draft_quantization=quantization)
    kept = screened(target, draft, config, Mesh.of(1))
    assert ("screen" in kept.params) == is_kept
    assert "screen" not in target.params


def test_cpus_keep_none(tmp_path):
    target, draft, config, _ = small_target(tmp_path)
    assert screened(target, draft, replace(config, draft_quantization="fp8"), Mesh.of(1)) is target


def test_which_heads_are_worth_a_copy():
    assert is_worth_it(248_320, 5120, jnp.bfloat16, HOPPER)
    assert not is_worth_it(248_320, 5120, jnp.float32, HOPPER)
    assert not is_worth_it(49_152, 576, jnp.bfloat16, HOPPER)
    for device in (Device("cpu"), Device("cuda", (8, 9)), Device("cuda", (10, 0))):
        assert not is_worth_it(248_320, 5120, jnp.bfloat16, device)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(("vocabulary", "is_split"), [(64, True), (61, False)])
def test_devices_share_it_as_they_share_the_head(tmp_path, worthwhile, vocabulary, is_split):
    target, draft, config, head = small_target(tmp_path, vocab_size=vocabulary)
    mesh = Mesh.of(4)
    params = target.params | {"lm_head": jax.device_put(head, mesh.place(("V", "D"), head.shape))}
    kept = screened(replace(target, params=params), draft, replace(config, draft_quantization="fp8"), mesh)
    if not is_split:
        assert "screen" not in kept.params
        return
    for found, expected in zip(kept.params["screen"], screen_of(head), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert found.addressable_shards[0].data.size * 4 == found.size


def test_the_two_heads_of_a_target(tmp_path):
    target, _, _, head = small_target(tmp_path)
    spec = LLM(*(tmp_path / name for name in ("target", "draft")), max_num_seqs=1).engine.spec
    plain = bind_target(target.params, spec)
    assert plain.head is plain.draft_head is target.params["lm_head"]
    model = bind_target(target.params | {"screen": screen_of(head)}, spec)
    assert isinstance(model.head, ScreenedHead)
    assert (model.head.is_exact, model.draft_head.is_exact) == (True, False)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, head.shape[1])), head.dtype)
    np.testing.assert_array_equal(model.logits(hidden), plain.logits(hidden))
    for one, other in zip(model.likeliest(hidden), plain.likeliest(hidden), strict=True):
        np.testing.assert_array_equal(one, other)
