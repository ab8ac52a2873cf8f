"""The product of few tokens on Pallas' Triton backend (see ``lib.streams``): a program for some rows of the weight."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import _compat
from pallas_kernels.lib import streams
from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.lib.streams import Config


def default_config(weight: Any) -> Config:
    """The fastest measured (BENCH.md): 32 rows where each multiprocessor gets one program of them, else 64.

    The ring of a program fills the shared memory of a multiprocessor: 160 programs of 32 rows ([5120, ...]) would take
    the 132 of Hopper two rounds, the second nearly empty.
    """
    is_one_round = len(weight) // 32 <= _compat.sm_count()
    return Config(rows=32, depth=256, num_stages=6) if is_one_round else Config(rows=64, depth=256, num_stages=4)


def slower(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why XLA's product is measured faster, or None."""
    del dtype
    return streams.slower(x, weight)


def refusal(x: Any, weight: Any, dtype: Any) -> str | None:
    """Why the Triton backend cannot do this call, or None; any dtype of the result will do."""
    del dtype
    return streams.refusal(x, weight.shape[1], len(weight), default_config(weight))


@functools.partial(jax.jit, static_argnames=("dtype", "config", "interpret"))
def product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    dtype: DTypeLike | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*T O"]:
    """See ``pallas_kernels.product``."""
    config = config or default_config(weight)
    if reason := streams.refusal(x, weight.shape[1], len(weight), config):
        raise NotImplementedError(reason)
    tokens, rows, dtype = tokens_of(x), len(weight), dtype or x.dtype
    if tokens == 0:
        return jnp.zeros((*x.shape[:-1], rows), dtype)
    operands = _compat.vary_alike(x.reshape(tokens, -1), weight)
    [out] = _compat.triton_call(
        functools.partial(_product, config=config),
        grid=(rows // config.rows,),
        out_shape=[_compat.out_like((tokens, rows), dtype, operands[0])],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="product",
    )(*operands)
    return out.reshape(*x.shape[:-1], rows)


def _product(x: Any, weight: Any, out: Any, *, config: Config) -> None:
    row = pl.program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    [products] = streams.products(x, weight, [row], config.depth)
    streams.store(products, out, row)
