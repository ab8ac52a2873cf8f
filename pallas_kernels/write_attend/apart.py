"""The page write, then attention: two operations, each by the fastest implementation or in plain jnp."""

from __future__ import annotations

from typing import Literal

import jax

from pallas_kernels.lib.int4_kv import Pages
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.write_kv import write_kv

Result = tuple[jax.Array, Pages, Pages]


def write_attend(args: Arguments, *, interpret: bool = False) -> Result:
    """See ``pallas_kernels.write_attend``; both by their fastest implementations."""
    return _one_after_the_other(args, None, interpret)


def reference(args: Arguments) -> Result:
    """See ``pallas_kernels.write_attend``; both in plain jnp."""
    return _one_after_the_other(args, "reference", interpret=False)


def _one_after_the_other(args: Arguments, implementation: Literal["reference"] | None, interpret: bool) -> Result:
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
        k_rounding=fresh.k_rounding,
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
        gates=args.gates,
        implementation=implementation,
        interpret=interpret,
    )
    return out, k_pages, v_pages
