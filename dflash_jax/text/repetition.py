"""A measure of how much a response repeats itself."""

from __future__ import annotations

from collections.abc import Sequence


def repeated_ngrams(token_ids: Sequence[int], n: int = 8) -> float:
    """Share of a response's n-grams that occurred earlier in it, in [0, 1]; 0 if it is too short for one."""
    ngrams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
