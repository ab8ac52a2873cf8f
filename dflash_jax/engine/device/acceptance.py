"""Which drafts the target accepts, and the argmax of its logits without computing rows that cannot be emitted."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HALVED_ROWS = 1024  # from this many rows the LM head is compute-bound: half of the rows take half the time
# Gives how many drafts of each sequence are kept, from the target's tokens and the drafts.
Confirm = Callable[[Int[Array, "B T"], Int[Array, "B R"]], Int[Array, " B"]]
Likeliest = tuple[Int[Array, "B T"], Float[Array, "B T"]]  # argmax of the logits, and its logit


def accepted(tokens: Int[Array, "B T"], drafts: Int[Array, "B R"]) -> Int[Array, " B"]:
    """How many of R <= T drafts the target accepts: the length of the prefix in which its tokens equal the drafts."""
    return jnp.cumprod(drafts == tokens[:, : drafts.shape[1]], axis=1, dtype=jnp.int32).sum(axis=1)


def likeliest_tokens(
    likeliest: Callable[..., Likeliest], hidden: Float[Array, "B T D"], drafts: Int[Array, "B T-1"], confirm: Confirm
) -> Likeliest:
    """Argmax of the target's logits in each row, and its logit; rows that cannot be emitted may be zeros.

    Rows behind the first rejected draft are never emitted. From `HALVED_ROWS` rows on, the LM head therefore first
    computes the first half of each block, and then the second half of those sequences whose first half was accepted.

    Args:
        likeliest: the LM head's argmax, given hidden states and, optionally, how many rows to compute.
        hidden: final hidden states.
        drafts: drafted tokens of rows 1 to T-1.
        confirm: how many drafts are kept.
    """
    B, T, _ = hidden.shape
    half = T // 2
    if half == 0 or B * T < HALVED_ROWS:
        return likeliest(hidden)
    first = likeliest(hidden[:, :half])
    goes_on = confirm(first[0], drafts[:, :half]) == half
    order = jnp.argsort(~goes_on)
    rest = likeliest(hidden[order, half:], goes_on.sum() * (T - half))
    place = jnp.where(goes_on, jnp.cumsum(goes_on) - 1, B)  # row of each sequence in `rest`
    tokens, scores = (
        jnp.concatenate([early, late.at[place].get(mode="fill", fill_value=0)], axis=1)
        for early, late in zip(first, rest, strict=True)
    )
    return tokens, scores
