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
from pallas_kernels.lib.measured import MAX_STREAM_TOKENS, is_large, tokens_of
from pallas_kernels.lib.streams import Config

LEAST_BYTES, MOST_PARTS = 1 << 24, 4  # of a weight whose product comes in parts
SHORT = Config(rows=64, depth=128, num_stages=4)  # of few inputs: all there are, or those of a part


def default_config(weight: Any) -> Config:
    """The fastest measured (BENCH.md): 32 rows where each multiprocessor gets one program of them, else 64.

    Few inputs are done with before a long ring is full: [9216, 2048] takes 16.8 us with four steps of 256 in flight and
    15.4 with four of 128, which leave room for more programs. Else the ring of a program fills the shared memory of a
    multiprocessor: 160 programs of 32 rows ([5120, ...]) would take the 132 of Hopper two rounds, the second nearly
    empty.
    """
    if weight.shape[1] < 4096 and len(weight) % SHORT.rows == 0:
        return SHORT
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
    return parts(x, weight, 1, dtype or x.dtype, config=config, interpret=interpret)[0]


def splits(x: Any, weight: Any) -> int:
    """The parts of a product on a Hopper that its caller sums: of weights of 16 to 32 MiB, to have programs enough.

    [2048, 4096] has 64 programs of 32 rows. In rounds of Qwen3.5-35B-A3B XLA takes 10.2 us for it, split and summed.
    """
    rows, width = weight.shape
    is_small = weight.size * weight.dtype.itemsize >= LEAST_BYTES and not is_large(weight)
    if not is_small or not 1 < tokens_of(x) <= MAX_STREAM_TOKENS:
        return 1
    programs = max(1, rows // SHORT.rows)
    parts = next(n for n in (1, 2, 4, 8) if n * programs >= 0.75 * _compat.sm_count() or n > MOST_PARTS)
    is_fit = width % (parts * SHORT.depth) == 0 and streams.refusal(x, width, rows, SHORT) is None
    return parts if is_fit and parts <= MOST_PARTS else 1


def parts(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    splits: int,
    dtype: DTypeLike = jnp.float32,
    *,
    config: Config = SHORT,
    interpret: bool = False,
) -> Float[Array, "S *T O"]:
    """The product in parts, of as many inputs each."""
    tokens, rows = tokens_of(x), len(weight)
    if tokens == 0:
        return jnp.zeros((splits, *x.shape[:-1], rows), dtype)
    operands = _compat.vary_alike(x.reshape(tokens, -1), weight)
    [out] = _compat.triton_call(
        functools.partial(_product, config=config),
        grid=(rows // config.rows, splits),
        out_shape=[_compat.out_like((splits, tokens, rows), dtype, operands[0])],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name="product",
    )(*operands)
    return out.reshape(splits, *x.shape[:-1], rows)


def _product(x: Any, weight: Any, out: Any, *, config: Config) -> None:
    row = pl.program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    part = pl.program_id(1)
    [products] = streams.products(x, weight, [row], config.depth, (part, out.shape[0]))
    streams.store(products, out, row, part)
