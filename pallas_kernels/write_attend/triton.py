"""Page write and attention in one Triton kernel, which is paged attention's with one split more; when it is used."""

from __future__ import annotations

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.paged_attention.triton import MAX_FRESH_ROWS, default_config, write_attend, write_refusal

__all__ = ["refusal", "slower", "write_attend"]


def refusal(args: Arguments, attention: str) -> str | None:
    """Why this kernel cannot do a call, or None."""
    del attention
    return write_refusal(args)


def slower(args: Arguments, attention: str) -> str | None:
    """Why two kernels are faster than this one (docs/performance.md), or None.

    Each program of this kernel rotates the queries anew, so it pays only while its programs do not fill the card: a few
    sequences in all, and page tables that are not so wide that keys are split among many programs.

    Args:
      args: the call.
      attention: the implementation that serves its attention alone.
    """
    rows = args.q.shape[1] * args.group
    if attention != "triton":
        return f"It extends the Triton attention; here {attention!r} serves the attention."
    if not 0 < rows <= MAX_FRESH_ROWS:
        return f"It is for 1 to {MAX_FRESH_ROWS} query rows a kv head; these are {rows}."
    if refusal(args, attention) is not None:
        return None
    splits, heads = default_config(args).splits, args.q.shape[0] * args.kv_heads
    if splits == 1:
        return "Keys need no split, so nothing has to be merged; the new tokens would be a second split."
    if (programs := heads * (splits + 1)) > (count := _compat.sm_count()):
        return f"Its {programs} programs would fill the {count} multiprocessors, and each rotates the queries anew."
    return None
