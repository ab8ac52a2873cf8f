"""The page write of a layer's projected heads and its attention, in one kernel where that is faster."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.lib.int4_kv import KeyRounding, Pages
from pallas_kernels.lib.masks import Mask
from pallas_kernels.lib.rotary import Rotary, gates_of, num_queries
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.paged_attention.arguments import Arguments, Fresh, checked
from pallas_kernels.registry import FP8_GPUS
from pallas_kernels.write_kv import check_heads, check_rounding

Implementation = Literal["triton", "apart", "reference"]

WRITE_ATTEND = registry.Operation(  # a call is what `call_of` gives
    "write_attend",
    (
        registry.Implementation(
            "triton",
            "pallas_kernels.write_attend.triton:write_attend",
            FP8_GPUS,
            slower="slower",
            refusal="refusal",
            interprets=True,
        ),
        registry.Implementation("apart", "pallas_kernels.write_attend.apart:write_attend", interprets=True),
        registry.Implementation("reference", "pallas_kernels.write_attend.apart:reference"),
    ),
)


def call_of(args: Arguments, device: registry.Device, *, interpret: bool = False) -> tuple[Arguments, str]:
    """The call as the operation defines it: its arguments, and the implementation that serves its attention alone."""
    return args, PAGED_ATTENTION.choose((args,), device, interpret=interpret).name


def write_attend(
    k_pages: Pages,
    v_pages: Pages,
    heads: Float[Array, "B T K J H"],
    slots: Int[Array, "B T"],
    rotary: Rotary,
    page_table: Int[Array, "B M"],
    kv_length: Int[Array, " B"],
    q_length: Int[Array, " B"] | None = None,
    *,
    mask: Mask = "causal",
    window: int | None = None,
    scale: float | None = None,
    k_scale: Float[Array, "*K"] | float = 1.0,
    v_scale: Float[Array, "*K"] | float = 1.0,
    valid_from: Int[Array, " B"] | None = None,
    k_rounding: KeyRounding | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Pages, Pages]:
    """``write_kv`` of tokens' heads, then ``paged_attention`` of their queries, in one kernel where that is faster.

    Donate the pools to the ``jit`` around and use only the returned pools, as for ``write_kv``.

    Args:
      k_pages: pool of keys, as for ``write_kv``.
      v_pages: pool of values.
      heads: as for ``write_kv``, with at least one query head. The output is multiplied by the sigmoids of their gates.
      slots: as for ``write_kv``; the slot of token t is where ``page_table`` has position ``kv_length - q_length + t``,
        and -1 past ``q_length``. If a slot before that is -1, what other tokens see of its token is undefined.
      rotary: as for ``write_kv``, and not None.
      page_table: as for ``paged_attention``.
      kv_length: as for ``paged_attention``.
      q_length: as for ``paged_attention``.
      mask: as for ``paged_attention``.
      window: as for ``paged_attention``.
      scale: as for ``paged_attention``.
      k_scale: as for ``write_kv``.
      v_scale: as for ``write_kv``.
      valid_from: as for ``paged_attention``, but no later than the first of the tokens.
      k_rounding: as for ``write_kv``.
      implementation: ``"triton"``, one kernel; ``"apart"``, the fastest write and the fastest attention one after the
        other; or ``"reference"``, both in plain jnp; None picks the fastest.
      interpret: run Triton kernels in Pallas' interpreter, on any backend (tests).

    Returns:
      The attention output in heads' dtype, zeros for tokens past ``q_length``, and the two pools.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: as for ``write_kv`` and ``paged_attention``.
    """
    check_heads(k_pages, v_pages, heads, slots, rotary)
    if heads.ndim != 5 or heads.shape[3] < 3 or rotary is None:
        raise ValueError(
            f"heads must be [B, T, K, J, H], J being at least 3 (a query, a key and a value), and have a rotary; got "
            f"{list(heads.shape)} and {type(rotary).__name__}"
        )
    B, T, K, J, H = heads.shape
    R = num_queries(heads, rotary)
    args = checked(
        heads[..., J - 2 - R : -2, :].reshape(B, T, K * R, H),
        k_pages,
        v_pages,
        page_table,
        kv_length,
        q_length,
        mask=mask,
        window=window,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        valid_from=valid_from,
        gates=gates_of(heads, rotary),
    )
    check_rounding(k_pages, k_rounding, (K, H))
    args = dataclasses.replace(args, fresh=Fresh(heads, slots.astype(jnp.int32), rotary, k_rounding))
    call = call_of(args, registry.Device.default(), interpret=interpret)
    run = WRITE_ATTEND.function(implementation, call, interpret=interpret)
    out, k_pages, v_pages = run(args)
    return out, k_pages, v_pages
