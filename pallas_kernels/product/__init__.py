"""The product of activations with a weight, for few tokens by kernels of our own."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels import _compat, streams
from pallas_kernels.product import mosaic, reference, triton

__all__ = ["product", "split_product"]

Implementation = Literal["mosaic", "triton", "reference"]
TILE = 128  # rows, of x and of a weight, of the tiles that XLA splits the inputs for


def product(
    x: Float[Array, "*T D"],
    weight: Float[Array, "O D"],
    dtype: DTypeLike | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "*T O"]:
    """``x @ weight.T`` of any number of tokens (any leading axes), summed in float32.

    Args:
      x: what goes in; bf16, f16 or, but for Triton, e4m3 (f32: reference only, which keeps it float32 on every device,
        without TF32).
      weight: like x.
      dtype: of the result, from Mosaic bf16, f16 or f32; None is x's.
      implementation: ``"triton"``, for up to 16 tokens, ``"mosaic"``, picked for 64 to 256, or ``"reference"``,
        which leaves it to XLA; None picks the fastest. Only the reference can be differentiated, and split by XLA
        over several devices; the kernels want a ``shard_map`` around them there.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Raises:
      ValueError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.
    """
    _check(x, weight)
    match implementation or _fastest(x, weight, dtype or x.dtype, interpret):
        case "mosaic":
            return mosaic.product(x, weight, dtype or x.dtype)
        case "triton":
            return triton.product(x, weight, dtype or x.dtype, interpret=interpret)
        case "reference":
            return reference.product(x, weight, dtype or x.dtype)
        case other:
            raise ValueError(f"implementation must be 'mosaic', 'triton', 'reference' or None; got {other!r}")


def split_product(
    x: Float[Array, "*T D"], weight: Float[Array, "O D"], dtype: DTypeLike | None = None
) -> Float[Array, "*T O"] | Float[Array, "S *T O"]:
    """The same for who adds it to something: in float32 parts where XLA makes such and sums them in another kernel.

    Args and errors are ``product``'s.
    """
    _check(x, weight)
    splits = _splits(x, weight)
    if splits == 1 or _fastest(x, weight, dtype or x.dtype, interpret=False) != "reference":
        return product(x, weight, dtype)
    return reference.split_product(x, weight, splits)


def _splits(x: Any, weight: Any) -> int:
    """Two where a card of sm_90 has room for two sets of XLA's tiles and not for three, as XLA does (BENCH.md).

    Two whole rows of tiles, since no others were measured.
    """
    capability = _compat.compute_capability()
    is_able = capability is not None and capability[0] == 9 and x.dtype != jnp.float32 and weight.shape[1] % 256 == 0
    if not is_able or streams.tokens_of(x) != 2 * TILE:
        return 1
    tiles = 2 * pl.cdiv(len(weight), TILE)
    return 2 if streams.is_large(weight) and 2 * tiles <= _compat.sm_count() < 3 * tiles else 1


def _check(x: Any, weight: Any) -> None:
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"x must be [*T, D] and weight [O, D]; got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x and weight must be floating, and of one dtype; got {x.dtype} and {weight.dtype}")


def _fastest(x: Any, weight: Any, dtype: Any, interpret: bool) -> Implementation:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    if capability is None or capability[0] != 9:
        return "reference"
    if mosaic.refusal(x, weight, dtype) is None and mosaic.is_fastest(x, weight, dtype):
        return "mosaic"
    return "triton" if triton.refusal(x, weight) is None and triton.is_fastest(x, weight) else "reference"
