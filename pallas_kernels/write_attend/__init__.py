"""A layer's way from projected heads to attention: page write, then attention, in one kernel where that is faster."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.masks import Mask
from pallas_kernels.paged_attention import fastest as fastest_attention
from pallas_kernels.paged_attention import paged_attention, triton
from pallas_kernels.paged_attention.arguments import Arguments, Fresh, checked
from pallas_kernels.rotary import Rotary
from pallas_kernels.write_kv import check_heads, write_kv

Implementation = Literal["triton", "apart", "reference"]


def write_attend(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
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
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """``write_kv`` of tokens' heads, then ``paged_attention`` of their queries, in one kernel where that is faster.

    Donate the pools to the ``jit`` around and use only what comes back, as for ``write_kv``.

    Args:
      k_pages: pool of keys, as for ``write_kv``.
      v_pages: pool of values.
      heads: as for ``write_kv``, with at least one query head.
      slots: as for ``write_kv``: of token t where ``page_table`` has position ``kv_length - q_length + t``. -1 past
        ``q_length``; what others see of a token whose slot is -1 before that is undefined.
      rotary: as for ``write_kv``, and not None.
      page_table: as for ``paged_attention``.
      kv_length: as there.
      q_length: as there.
      mask: as there.
      window: as there.
      scale: as there.
      k_scale: as for both.
      v_scale: as for both.
      valid_from: as for ``paged_attention``, but no later than the first of the tokens.
      implementation: ``"triton"``, one kernel; ``"apart"``, the fastest of both, or ``"reference"``, both in plain jnp;
        None picks the fastest.
      interpret: run Triton kernels in Pallas' interpreter, on any backend (tests).

    Returns:
      The attention output in heads' dtype, zeros for tokens past ``q_length``, and the two pools.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.

    Source: as of ``write_kv`` and ``paged_attention``.
    """
    check_heads(k_pages, v_pages, heads, slots, rotary)
    if heads.ndim != 5 or heads.shape[3] < 3 or rotary is None:
        raise ValueError(
            f"heads must be [B, T, K, J, H], J being at least 3 (a query, a key and a value), and have a rotary; got "
            f"{list(heads.shape)} and {type(rotary).__name__}"
        )
    B, T, K, J, H = heads.shape
    args = checked(
        heads[..., :-2, :].reshape(B, T, K * (J - 2), H),
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
    )
    args = dataclasses.replace(args, fresh=Fresh(heads, slots.astype(jnp.int32), rotary))
    match implementation or fastest(args, interpret):
        case "triton":
            return triton.write_attend(args, interpret=interpret)
        case "apart":
            return _apart(args, None, interpret)
        case "reference":
            return _apart(args, "reference", interpret)
        case other:
            raise ValueError(f"implementation must be 'triton', 'apart', 'reference' or None; got {other!r}")


def fastest(args: Arguments, interpret: bool) -> Implementation:
    """One kernel where its programs do not fill the card, since each turns queries anew (docs/performance.md).

    That is up to a few sequences in all, and page tables that are not so wide that keys are split among many.
    """
    if fastest_attention(args, interpret) != "triton" or triton.write_refusal(args) is not None:
        return "apart"
    splits = triton.default_config(args).splits
    programs = len(args.q) * args.kv_heads * (splits + 1)
    return "triton" if splits > 1 and programs <= _compat.sm_count() else "apart"


def _apart(
    args: Arguments, implementation: Literal["reference"] | None, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    fresh = args.fresh
    assert fresh is not None
    q, k_pages, v_pages = write_kv(
        args.k_pages,
        args.v_pages,
        fresh.heads,
        fresh.slots,
        fresh.rotary,
        k_scale=args.k_scale,
        v_scale=args.v_scale,
        implementation=implementation,
        interpret=interpret,
    )
    out = paged_attention(
        q,
        k_pages,
        v_pages,
        args.page_table,
        args.kv_length,
        args.q_length,
        mask=args.mask,
        window=args.window,
        scale=args.scale,
        k_scale=args.k_scale,
        v_scale=args.v_scale,
        valid_from=args.valid_from,
        implementation=implementation,
        interpret=interpret,
    )
    return out, k_pages, v_pages
