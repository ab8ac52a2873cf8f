"""Gated DeltaNet: the recurrence over verified blocks, and its chunked form over prompts."""

from pallas_kernels.gated_delta.reference import CHUNK, Rows, chunked, convolve, gates, recur, split_heads, tail_after

__all__ = ["CHUNK", "Rows", "chunked", "convolve", "gates", "recur", "split_heads", "tail_after"]
