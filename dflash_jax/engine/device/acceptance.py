"""Which drafts the target confirms, and its likeliest tokens in as few products as that takes."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HALVED_ROWS = 1024  # of blocks: with so many, a head takes as long as its arithmetic, for half of them half as long
# How many drafts of each sequence are kept, given the target's tokens and the drafts.
Confirm = Callable[[Int[Array, "B T"], Int[Array, "B R"]], Int[Array, " B"]]
Likeliest = tuple[Int[Array, "B T"], Float[Array, "B T"]]  # tokens, and their logits


def accepted(tokens: Int[Array, "B T"], drafts: Int[Array, "B R"]) -> Int[Array, " B"]:
    """How many of R <= T drafts the target confirms: the longest prefix in which its own tokens are the drafts."""
    return jnp.cumprod(drafts == tokens[:, : drafts.shape[1]], axis=1, dtype=jnp.int32).sum(axis=1)


def likeliest_tokens(
    likeliest: Callable[..., Likeliest], hidden: Float[Array, "B T D"], drafts: Int[Array, "B T-1"], confirm: Confirm
) -> Likeliest:
    """The target's likeliest token of each row, and its logit; of rows that cannot be emitted, perhaps zeros.

    What follows the first draft that is refused is nobody's. Where it saves time, the head is asked for the first half
    of each block, and then for the others of those sequences whose drafts it has confirmed so far.
    """
    B, T, _ = hidden.shape
    half = T // 2
    if half == 0 or B * T < HALVED_ROWS:
        return likeliest(hidden)
    first = likeliest(hidden[:, :half])
    goes_on = confirm(first[0], drafts[:, :half]) == half
    order = jnp.argsort(~goes_on)
    rest = likeliest(hidden[order, half:], goes_on.sum() * (T - half))
    place = jnp.where(goes_on, jnp.cumsum(goes_on) - 1, B)  # in that order
    tokens, scores = (
        jnp.concatenate([early, late.at[place].get(mode="fill", fill_value=0)], axis=1)
        for early, late in zip(first, rest, strict=True)
    )
    return tokens, scores
