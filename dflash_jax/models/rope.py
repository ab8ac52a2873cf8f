"""Rotary position embedding: frequencies of every supported `rope_type`, and the tables of a step's positions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.spec import DecoderConfig, RopeConfig

Rope = tuple[Float[Array, "B T H2"], Float[Array, "B T H2"]]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies of the rotated pairs in float32, and the factor that cosines and sines are multiplied by.

    There are H/2 pairs, or fewer where `rope.partial_rotary_factor` rotates the first dimensions only; frequencies are
    then spread over those.

    Sources: linear, arXiv 2306.15595; yarn, arXiv 2309.00071; llama3, Llama 3.1's reference code. Missing fields
    default as in transformers 5.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    inverse = 1.0 / rope.theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope.rope_type == "linear":
        return (inverse / rope.factor).astype(np.float32), 1.0
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((rope.original_max_position_embeddings / wavelength - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * inverse / rope.factor + smooth * inverse).astype(np.float32), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inverse, rotary_dim)
    return inverse.astype(np.float32), 1.0


def _yarn(rope: RopeConfig, inverse: np.ndarray, rotary_dim: int) -> tuple[np.ndarray, float]:
    """YaRN: high frequencies stay, low ones are interpolated, a linear ramp blends the ones between."""

    def dimension_of(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return rotary_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    blended = inverse / rope.factor * ramp + inverse * (1 - ramp)

    def magnitude(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    return blended.astype(np.float32), magnitude(rope.factor) if factor is None else factor


def rope_tables(config: DecoderConfig, positions: Int[Array, "B T"]) -> Rope:
    """Cosines and sines of absolute positions, each [B, T, H/2] in float32.

    With partial rotation the first entries are those of the rotated pairs, and the others, 1 and 0, rotate nothing:
    `weights.orders` puts the dimensions of a head in the order that this takes.
    """
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    angles = positions[..., None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    if 2 * len(inverse) == config.head_dim:
        return cos, sin
    still = [(0, 0)] * positions.ndim + [(0, config.head_dim // 2 - len(inverse))]
    return jnp.pad(cos, still, constant_values=1.0), jnp.pad(sin, still)
