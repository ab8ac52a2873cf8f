"""Gate and up of an MLP for few tokens on Pallas' Triton backend (see ``lib.streams``): a program has some units."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.lib import streams
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.streams import Config, slower

__all__ = ["default_config", "refusal", "slower", "swiglu"]

ROWS = 64  # of gate and of up in a program


def default_config(weight: Any) -> Config:
    """The fastest measured (BENCH.md): steps of 64 inputs, or 128 where no multiprocessor gets two programs.

    Those must have as much on its way as several: a quarter of Qwen3-8B's weight, as each of four GPUs has it, takes an
    H100 21.8 us, and 27.1 with steps of 64.
    """
    is_one_round = weight.shape[0] * weight.shape[2] // ROWS <= _compat.sm_count()
    return Config(rows=ROWS, depth=128 if is_one_round else 64, num_stages=4)


def refusal(x: Any, weight: Any) -> str | None:
    """Why the Triton backend cannot do this call, or None."""
    return streams.refusal(x, weight.shape[3], weight.shape[2], default_config(weight))


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def swiglu(
    x: Float[Array, "*T D"], weight: Float[Array, "E 2 I D"], *, config: Config | None = None, interpret: bool = False
) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.swiglu``."""
    config = config or default_config(weight)
    parts, _, units, width = weight.shape
    if reason := streams.refusal(x, width, units, config):
        raise NotImplementedError(reason)
    tokens = tokens_of(x)
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], parts * units), x.dtype)
    operands = _compat.vary_alike(x.reshape(tokens, width), weight.reshape(-1, width))
    [out] = _compat.triton_call(
        functools.partial(_swiglu, units=units, config=config),
        grid=(parts * units // config.rows,),
        out_shape=[_compat.out_like((tokens, parts * units), x.dtype, operands[0])],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="swiglu",
    )(*operands)
    return out.reshape(*x.shape[:-1], parts * units)


def _swiglu(x: Any, weight: Any, out: Any, *, units: int, config: Config) -> None:
    """One program; each part has the rows of gate in front of those of up."""
    first = pl.program_id(0) * config.rows
    unit = first + jnp.arange(config.rows, dtype=jnp.int32)
    gate = unit + first // units * units
    products = streams.products(x, weight, [gate, gate + units], config.depth)
    opened, up = (product.astype(out.dtype).astype(jnp.float32) for product in products)
    streams.store(opened / (1 + jnp.exp(-opened)) * up, out, unit)
