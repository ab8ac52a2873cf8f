"""Initial values of the parameters of a new model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def initializer(name: str) -> nn.initializers.Initializer:
    """Initial values of a parameter, by the last key of its path.

    Norms are one, biases zero, everything else N(0, 0.02). Gated DeltaNet's convolution and decays have distributions
    of their own: with these a state would be forgotten at once.
    """
    if name in GATED_DELTA:
        return GATED_DELTA[name]
    if name.endswith("norm"):
        return nn.initializers.ones
    if name.endswith("_bias") or name == "d2t":
        return nn.initializers.zeros
    return nn.initializers.normal(0.02)


def _log_of_decay(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Logarithms of numbers spread evenly from 1 to 16."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)


def _bias_of_step(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Numbers whose softplus is spread from 0.001 to 0.1, evenly in its logarithm."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(0.1)))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


def _taps(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Numbers up to 1 / sqrt(taps), so that a convolution about keeps the size of its inputs."""
    largest = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -largest, largest).astype(dtype)


# Source: the initialisation of Mamba 2 (arXiv 2405.21060), which Gated DeltaNet keeps.
GATED_DELTA: Mapping[str, nn.initializers.Initializer] = {
    "A_log": _log_of_decay,
    "dt_bias": _bias_of_step,
    "conv1d": _taps,
}
