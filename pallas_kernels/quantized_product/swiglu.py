"""The first half of an MLP whose gate and up are in few bits: in e4m3, on Hopper, in one kernel (``wide``).

Up to 64 tokens most tiles of that product would be shared by CTAs (``mosaic``), none with a whole product to finish: of
these, e4m3 has a kernel whose tiles are whole (``swiglu_pieces``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from pallas_kernels.lib.measured import tokens_of
from pallas_kernels.quantized_product import wide
from pallas_kernels.quantized_product.hidden import HALF
from pallas_kernels.quantized_product.wide_plan import default_config


def slower(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the product and the activation by themselves are as fast (BENCH.md), or None."""
    del zeros, dtype
    if (tokens := tokens_of(x)) <= wide.MAX_TOKENS:
        return f"Hidden units are finished by the product of more than {wide.MAX_TOKENS} tokens; these are {tokens}."
    if values.dtype == jnp.uint16:
        return "A product of 4 bits takes as much longer to finish hidden units as they take by themselves."
    config = default_config(x, *jax.eval_shape(_as_matrices, values, scales), is_two_sided=True)
    if config.splits > 1:
        return f"The product of {tokens} tokens is faster in {config.splits} parts, none of which can finish units."
    return None


def refusal(x: Any, values: Any, scales: Any, zeros: Any, dtype: Any) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    if (units := values.shape[2]) % HALF or dtype != jnp.bfloat16:
        return (
            f"The Mosaic kernel needs parts of the hidden units that {HALF} divides, in bf16; these are {units} in "
            f"{jnp.dtype(dtype).name}."
        )
    matrix, of_groups = jax.eval_shape(_as_matrices, values, scales)
    return wide.two_sided_refusal(x, matrix, of_groups, zeros, dtype)


def two_sided_swiglu(
    x: Float[Array, "*T D"],
    values: Float8e4m3fn[Array, "E 2 I D"],
    scales: Float[Array, "E 2 I G"],
    zeros: None,
    dtype: DTypeLike,
) -> Float[Array, "*T F"]:
    """See ``pallas_kernels.quantized_swiglu``; activations are rounded to e4m3, too, a scale for each token."""
    if reason := refusal(x, values, scales, zeros, dtype):
        raise NotImplementedError(reason)
    matrix, of_groups = _as_matrices(values, scales)
    return wide.two_sided_product(x, matrix, of_groups, zeros, dtype, units=values.shape[2])


def _as_matrices(*parts: Any) -> Any:
    return jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), parts)
