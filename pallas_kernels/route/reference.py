"""The choice of experts in plain jnp: the oracle of the kernel, the path of CPUs and TPUs, and differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.route import Routes


def route(
    logits: Float[Array, "S *T X"],
    is_token: Bool[Array, "*T"],
    per_token: int,
    *,
    renormalize: bool,
    shared: tuple[Float[Array, "*T D"], Float[Array, " D"]] | None,
) -> Routes:
    """See ``pallas_kernels.route``."""
    total = logits.sum(axis=0)
    largest, chosen = lax.top_k(total, per_token)
    whole = largest if renormalize else total
    weights = jnp.exp(largest - jax.nn.logsumexp(whole, axis=-1, keepdims=True))
    chosen = jnp.where(is_token[..., None], chosen, total.shape[-1])
    if shared is None:
        return Routes(chosen, weights, None)
    x, gate = shared
    opened = jax.nn.sigmoid(jnp.einsum("...d,d->...", x, gate, preferred_element_type=jnp.float32))
    return Routes(chosen, weights, opened)
