"""Paged attention on Pallas' Mosaic GPU backend (not written yet)."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.paged_attention.arguments import Arguments


def refusal(args: Arguments) -> str | None:
    """Why the Mosaic backend cannot do this call, or None."""
    del args
    return "The Mosaic paged attention is not written yet."


def is_fastest(args: Arguments) -> bool:
    """Whether this call is faster here than on the Triton backend."""
    del args
    return False


def paged_attention(args: Arguments) -> Float[Array, "B T N H"]:
    """See ``pallas_kernels.paged_attention``."""
    raise NotImplementedError(refusal(args))
