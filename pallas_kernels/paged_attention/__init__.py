"""Attention over paged keys and values: decode, verify, draft blocks and chunked prefill in one function."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.lib.int4_kv import Pages
from pallas_kernels.lib.masks import Mask
from pallas_kernels.paged_attention.arguments import MOST_WIDENED as MOST_WIDENED
from pallas_kernels.paged_attention.arguments import MOST_WIDENED_HEAD as MOST_WIDENED_HEAD
from pallas_kernels.paged_attention.arguments import checked
from pallas_kernels.registry import FP8_GPUS, HOPPER

Implementation = Literal["mosaic", "triton", "reference"]

PAGED_ATTENTION = registry.Operation(  # a call is (Arguments,)
    "paged_attention",
    (
        registry.Implementation(
            "mosaic",
            "pallas_kernels.paged_attention.mosaic:paged_attention",
            HOPPER,
            slower="slower",
            refusal="refusal",
        ),
        registry.Implementation(
            "triton",
            "pallas_kernels.paged_attention.triton:paged_attention",
            FP8_GPUS,
            refusal="refusal",
            interprets=True,
        ),
        registry.Implementation("reference", "pallas_kernels.paged_attention.reference:paged_attention"),
    ),
)


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages,
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
    gates: Float[Array, "B T K _ H"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Attend from the last tokens of each sequence to all its keys and values, which lie in pages.

    The ``q_length[b]`` query tokens of sequence b are the last of its ``kv_length[b]`` tokens, whose keys and values
    are already in the pages: token t has position ``kv_length - q_length + t``. Which position sees which is
    ``pallas_kernels.visible(..., mask=mask, window=window)``; on top of it a sequence sees no key below
    ``valid_from[b]``. Rows past ``q_length`` and rows that see nothing come back as zeros.

    Args:
      q: queries, N query heads, of which N / K neighbours share one kv head; bf16, f16 or f32.
      k_pages: keys after norm and RoPE, S tokens a page; bf16, f16, float8_e4m3fn or float8_e5m2 (f32: reference only),
        or 4 bits (``lib.int4_kv``), whose keys are rotated; queries are not, and get that rotation here.
      v_pages: values, like ``k_pages``.
      page_table: page of the tokens ``m*S .. m*S+S-1`` of each sequence. An entry that holds no visible token is never
        followed, so it may be any number. Pages may hold anything past ``kv_length``, NaN included.
      kv_length: tokens of each sequence, the query tokens included; 0 for an idle slot, which costs nothing.
      q_length: query tokens of each sequence, at most T; None means T for all.
      mask: ``"causal"``, or ``"block"`` for drafter layers that see the whole block.
      window: W of a sliding layer, in tokens, the query's own position counted; None sees everything.
      scale: what q.k is multiplied by; None is ``H ** -0.5``.
      k_scale: a stored key times this is the key: a scalar, or one number a kv head.
      v_scale: likewise for values.
      valid_from: first position of each sequence that may be seen (keys below were given back); None is 0.
      gates: of the output, which is rounded and then multiplied by their sigmoids in float32; of each kv head the first
        N / K rows are its query heads' gates, and what lies behind them is not read. None multiplies nothing.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; None picks the fastest that can do the call.
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The attention output in q's dtype, accumulated in float32.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not belong together; the message prints them.
      NotImplementedError: the implementation that the caller named cannot do the call; the message says why.

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
        gates=gates,
    )
    out: Array = PAGED_ATTENTION.function(implementation, (args,), interpret=interpret)(args)
    return out
