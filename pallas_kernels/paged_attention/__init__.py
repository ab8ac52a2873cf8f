"""Attention over paged keys and values: decode, verify, draft blocks and chunked prefill in one function."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.masks import Mask
from pallas_kernels.paged_attention import mosaic, reference, triton
from pallas_kernels.paged_attention.arguments import Arguments, checked
from pallas_kernels.paged_attention.mosaic_prefill import MOST_WIDENED as MOST_WIDENED

Implementation = Literal["mosaic", "triton", "reference"]


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
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
) -> Float[Array, "B T N H"]:
    """Attends from the last tokens of each sequence to all its keys and values, which lie in pages.

    The ``q_length[b]`` query tokens of sequence b are the last of its ``kv_length[b]`` tokens, whose keys and values
    are already in the pages: token t has position ``kv_length - q_length + t``. Which position sees which is
    ``pallas_kernels.visible(..., mask=mask, window=window)``; on top of it a sequence sees no key below
    ``valid_from[b]``. Rows past ``q_length`` and rows that see nothing come back as zeros.

    Args:
      q: queries, N query heads, of which N / K neighbours share one kv head; bf16, f16 or f32.
      k_pages: keys after norm and RoPE, S tokens a page; bf16, f16, float8_e4m3fn or float8_e5m2 (f32: reference only).
      v_pages: values, like ``k_pages``.
      page_table: page of the tokens ``m*S .. m*S+S-1`` of each sequence. An entry that holds no visible token is never
        followed, so it may be any number; nor does what lies in a page past ``kv_length`` matter, NaN included.
      kv_length: tokens of each sequence, the query tokens included; 0 for an idle slot, which costs nothing.
      q_length: query tokens of each sequence, at most T; None means T for all.
      mask: ``"causal"``, or ``"block"`` for drafter layers that see the whole block.
      window: W of a sliding layer, in tokens, the query's own position counted; None sees everything.
      scale: what q.k is multiplied by; None is ``H ** -0.5``.
      k_scale: a stored key times this is the key: a scalar, or one number a kv head.
      v_scale: the same of values.
      valid_from: first position of each sequence that may be seen (keys below were given back); None is 0.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; None picks the fastest that can do the call.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The attention output in q's dtype, accumulated in float32.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence. A chosen one never falls back.

    Source: FlashDecoding's split of the keys, the online softmax of FlashAttention (arXiv 2205.14135), pages as in
    vLLM (arXiv 2309.06180); the block mask is DFlash's (arXiv 2602.06036).
    """
    args = checked(
        q,
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
    match implementation or fastest(args, interpret):
        case "mosaic":
            return mosaic.paged_attention(args)
        case "triton":
            return triton.paged_attention(args, interpret=interpret)
        case "reference":
            return reference.paged_attention(args)
        case other:
            raise ValueError(f"implementation must be 'mosaic', 'triton', 'reference' or None; got {other!r}")


def fastest(args: Arguments, interpret: bool) -> Implementation:
    """The fastest implementation that can do this call on this device; BENCH.md holds the measurements behind it."""
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    if capability is None:
        return "reference"
    if capability[0] == 9 and mosaic.refusal(args) is None and mosaic.is_fastest(args):
        return "mosaic"
    return "triton" if capability >= (8, 9) and triton.refusal(args) is None else "reference"
