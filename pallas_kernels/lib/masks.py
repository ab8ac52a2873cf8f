"""Which key a query may see: the one definition behind every attention path, plain jnp or kernel."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Mask = Literal["causal", "block"]


def visible(
    query_positions: Int[Array, "*#B T"],
    key_positions: Int[Array, "*#B S"],
    *,
    mask: Mask,
    window: int | None = None,
) -> Bool[Array, "*#B T S"]:
    """Whether the query at position i sees the key at position j, for every pair.

    ============  ======  ====================  =====================================
    mask          window  visible iff           used by
    ============  ======  ====================  =====================================
    ``"causal"``  None    ``j <= i``            target layers
    ``"causal"``  W       ``0 <= i - j < W``    sliding target and drafter layers
    ``"block"``   None    always                full drafter layers
    ``"block"``   W       ``|i - j| < W``       non-causal sliding drafter layers
    ============  ======  ====================  =====================================

    Positions are absolute token positions. The caller adds which keys exist at all (the length of the
    context, pages that were given back). Source: DESIGN of DFlash, arXiv 2602.06036, section 4;
    windows as served by vLLM (PR #40898) and SGLang (#27469): W counts the query's own position.
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    seen = distance >= 0 if mask == "causal" else jnp.ones_like(distance, dtype=bool)
    if window is not None:
        seen &= jnp.abs(distance) < window
    return seen
