"""How files pack 4-bit numbers, undone on the host: every layout becomes rows of pairs.

Rows of pairs are bytes [O, I / 2]: byte j of a row holds input 2j in its low four bits and input 2j + 1 in its high
ones. GPTQ's and compressed-tensors' int32 hold 8 inputs, the lowest first, so their bytes in memory are such pairs.
What kernels read has its numbers in another order (`to_spans`).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, UInt8

# The column of eight that each of the eight places of AWQ's int32 holds, the lowest first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Pairs = UInt8[np.ndarray, "O pairs"]
Numbers = UInt8[np.ndarray, "O I"]


def to_numbers(pairs: UInt8[np.ndarray, "*O pairs"]) -> UInt8[np.ndarray, "*O I"]:
    """The 4-bit numbers of rows of pairs, a byte each."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def to_pairs(numbers: Numbers) -> Pairs:
    """Rows of pairs of numbers from 0 to 15."""
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


def words_to_numbers(words: Int32[np.ndarray, "rows words"]) -> Numbers:
    """The eight 4-bit numbers of each int32, the lowest first."""
    return to_numbers(np.ascontiguousarray(words).view(np.uint8))


def from_gptq(qweight: Int32[np.ndarray, "words O"]) -> Pairs:
    """Rows of pairs of GPTQ's `qweight`, which packs along the inputs."""
    return np.ascontiguousarray(qweight.T).view(np.uint8)


def from_awq(qweight: Int32[np.ndarray, "I words"]) -> Pairs:
    """Rows of pairs of AWQ's `qweight`, which packs along the outputs."""
    return to_pairs(np.ascontiguousarray(awq_to_numbers(qweight).T))


def awq_to_numbers(words: Int32[np.ndarray, "rows words"]) -> Numbers:
    """The eight 4-bit numbers of each int32 in AWQ's order."""
    places = words_to_numbers(words).reshape(len(words), -1, 8)
    return places[..., np.argsort(AWQ_ORDER)].reshape(len(words), -1)


def from_compressed(packed: Int32[np.ndarray, "O words"], inputs: int) -> Pairs:
    """Rows of pairs of compressed-tensors' `weight_packed`, whose last int32 may have places to spare."""
    return np.ascontiguousarray(packed).view(np.uint8)[:, : inputs // 2]


def to_spans(pairs: UInt8[np.ndarray, "*O pairs"], span: int) -> UInt8[np.ndarray, "*O pairs"]:
    """What kernels read: two inputs half a span apart to a byte (`pallas_kernels.quantized_product.layout`).

    Args:
        pairs: rows of pairs.
        span: inputs of a span, a power of 2 from 2.
    """
    if span == 2:
        return pairs
    halves = pairs.reshape(*pairs.shape[:-1], -1, 2, span // 4)
    first, second = halves[..., 0, :], halves[..., 1, :]
    spans = np.empty((*first.shape, 2), np.uint8)
    spans[..., 0] = (first & 15) | (second << 4)  # bytes lose what is shifted out
    spans[..., 1] = (first >> 4) | (second & 0xF0)
    return spans.reshape(pairs.shape)
