"""The embedded hybrid as it is described: kinds of layers, and bytes of target and drafter."""

import math
from pathlib import Path

import pytest
from embedded_architectures import DENSE, HYBRID, MAX_LENGTH

from dflash_jax.spec import GatedDelta, check_draft_fits, target_config
from dflash_jax.train.command import parse
from dflash_jax.train.config import draft_config_of
from dflash_jax.weights.export import QUANTIZED
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table

PRESET = Path(__file__).parents[2] / "configs/train/embedded_hybrid.yaml"
MASK = 1  # of the embedded tokenizer


def stored_megabytes(config):
    """Megabytes of weights in fp8, with a float32 scale a row and the rest in bfloat16, as `save_model` writes them."""
    shapes = {name: checkpoint_shape(axes, config) for name, axes in checkpoint_table(config).items()}
    narrow = {name for name in shapes if name.endswith(QUANTIZED)}
    return sum(math.prod(s) + 4 * s[0] if n in narrow else 2 * math.prod(s) for n, s in shapes.items()) / 1e6


def test_three_layers_of_gated_deltanet_to_one_of_attention():
    target = target_config(HYBRID)
    assert [isinstance(layer.mixer, GatedDelta) for layer in target.layers] == [True, True, True, False] * 2
    delta = target.layers[0].mixer
    assert (delta.value_heads, delta.key_dim, delta.value_dim) == (2 * delta.key_heads, 32, 32)
    assert target.max_position_embeddings == 8192 > target_config(DENSE).max_position_embeddings == MAX_LENGTH


def test_the_pair_is_as_small_as_it_should_be():
    """So that a package can hold it: 3.4 MB, where the embedded pair has 16."""
    target = target_config(HYBRID)
    preset = parse(["--config", str(PRESET), "--target", "T", "--data", "D", "--out", "O"])
    draft = draft_config_of(preset, target, MASK)
    check_draft_fits(target, draft, str(PRESET))
    assert stored_megabytes(target) == pytest.approx(2.8, abs=0.05)
    assert stored_megabytes(draft) == pytest.approx(0.65, abs=0.05)
    assert {layer for layer in draft.target_layer_ids if isinstance(target.layers[layer].mixer, GatedDelta)}
    assert {layer for layer in draft.target_layer_ids if not isinstance(target.layers[layer].mixer, GatedDelta)}
