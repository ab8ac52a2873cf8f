"""How files pack 4-bit numbers, undone on the host: every layout becomes rows of pairs.

Rows of pairs are bytes [O, I / 2]: byte j of a row holds input 2j in its low four bits and input 2j + 1 in its high
ones. GPTQ's and compressed-tensors' int32 hold 8 inputs, the lowest first, so their bytes in memory are such pairs.
What kernels read has its numbers in another order (`to_words`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float8e4m3fn, Int16, Int32, UInt8, UInt16

# The column of eight that each of the eight places of AWQ's int32 holds, the lowest first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Pairs = UInt8[np.ndarray, "O pairs"]
Numbers = UInt8[np.ndarray, "O I"]
ROWS_AT_ONCE = 256  # of a matrix, that one thread works on: what it computes stays in its caches


def by_rows(function: Callable[[slice], None], rows: int) -> None:
    """Call a function for parts of so many rows, on all cores: NumPy works on large arrays without Python's lock."""
    parts = [slice(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE)]
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        list(pool.map(function, parts))


def to_numbers(pairs: UInt8[np.ndarray, "*O pairs"]) -> UInt8[np.ndarray, "*O I"]:
    """The 4-bit numbers of rows of pairs, a byte each."""
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def to_pairs(numbers: Numbers) -> Pairs:
    """Rows of pairs of numbers from 0 to 15."""
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


def words_to_numbers(words: Int32[np.ndarray, "rows words"]) -> Numbers:
    """The eight 4-bit numbers of each int32, the lowest first."""
    return to_numbers(np.ascontiguousarray(words).view(np.uint8))


def numbers_to_words(numbers: Numbers) -> Int32[np.ndarray, "rows words"]:
    """int32 of eight 4-bit numbers each, the lowest first; places without a number are 0."""
    padded = np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % 8)])
    words: Int32[np.ndarray, "rows words"] = np.ascontiguousarray(to_pairs(padded)).view("<i4")
    return words


def from_gptq(qweight: Int32[np.ndarray, "words O"]) -> Pairs:
    """Rows of pairs of GPTQ's `qweight`, which packs along the inputs."""
    pairs = np.empty((qweight.shape[1], 4 * qweight.shape[0]), np.uint8)

    def transpose(rows: slice) -> None:
        pairs[rows] = np.ascontiguousarray(qweight[:, rows].T).view(np.uint8)

    by_rows(transpose, len(pairs))
    return pairs


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


def to_words_of_two(numbers: Float8e4m3fn[np.ndarray, "*O I"], span: int) -> Int16[np.ndarray, "*O words"]:
    """What kernels of experts read: two inputs in e4m3, half a span apart, to a word; a span has an even number.

    Where a word has their bits is in `pallas_kernels.quantized_product.layout`.
    """
    halves = numbers.view(np.uint8).reshape(-1, numbers.shape[-1] // span, 2, span // 2)
    words = np.empty((len(halves), halves.shape[1], span // 2, 2), np.uint8)

    def interleave(rows: slice) -> None:
        first, second = (halves[rows, :, place] for place in range(2))
        words[rows, ..., 0] = first << 4 | second & 0x0F
        words[rows, ..., 1] = first & 0x80 | first >> 4 & 0x07 | second & 0x70 | second >> 4 & 0x08

    by_rows(interleave, len(words))
    return words.view("<i2").reshape(*numbers.shape[:-1], -1)


def to_words(pairs: UInt8[np.ndarray, "*O pairs"], span: int) -> UInt16[np.ndarray, "*O words"]:
    """What kernels read: four inputs, a quarter of a span apart, to a word (`pallas_kernels.quantized_product.layout`).

    Args:
        pairs: rows of pairs.
        span: inputs of a span, a power of 2 from 4.
    """
    if span == 4:
        return np.ascontiguousarray(pairs).view("<u2")
    quarters = pairs.reshape(-1, pairs.shape[-1] * 2 // span, 4, span // 8)
    words = np.zeros((*quarters.shape[:-2], span // 8, 2), np.uint16)

    def interleave(rows: slice) -> None:
        for place in range(4):
            bits = quarters[rows, :, place].astype(np.uint16)
            words[rows, ..., 0] |= (bits & 15) << (4 * place)
            words[rows, ..., 1] |= (bits >> 4) << (4 * place)

    by_rows(interleave, len(words))
    return words.reshape(*pairs.shape[:-1], -1)
