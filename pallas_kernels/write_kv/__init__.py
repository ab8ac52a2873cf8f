"""Writing keys and values into their pages, quantised, in place."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.write_kv import reference, triton

Implementation = Literal["triton", "reference"]


def write_kv(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    k: Float[Array, "*T K H"],
    v: Float[Array, "*T K H"],
    slots: Int[Array, "*T"],
    *,
    k_scale: Float[Array, "*K"] | float = 1.0,
    v_scale: Float[Array, "*K"] | float = 1.0,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Writes tokens' keys and values into pages and returns the pools; nothing else of the pools changes.

    Donate the pools to the ``jit`` around and use only what comes back: then the write is in place. One use of an old
    pool after the call makes XLA copy the whole pool.

    Args:
      k_pages: pool of keys, S tokens a page; bf16, f16, f32, float8_e4m3fn or float8_e5m2.
      v_pages: pool of values, like ``k_pages``.
      k: keys after norm and RoPE, of any number of tokens (any leading axes).
      v: values of the same tokens.
      slots: where each token goes: ``page * S + offset``; -1 writes nothing. No slot may stand twice.
      k_scale: what a stored key is multiplied by to be the key, so keys are divided by it: a scalar, or one a kv head.
      v_scale: the same of values.
      implementation: ``"triton"`` or ``"reference"``; None picks Triton on NVIDIA GPUs that know fp8 (from sm_89).
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The two pools. Numbers too large for the pool's dtype are stored as its largest, never as NaN or infinity.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.

    Source: fp8 cache with scales as in vLLM (real = stored * scale).
    """
    _check(k_pages, v_pages, k, v, slots)
    heads = k_pages.shape[1]
    tokens = slots.size
    operands = (
        k_pages,
        v_pages,
        k.reshape(tokens, *k.shape[-2:]),
        v.reshape(tokens, *v.shape[-2:]),
        slots.reshape(tokens).astype(jnp.int32),
        _per_head("k_scale", k_scale, heads),
        _per_head("v_scale", v_scale, heads),
    )
    match implementation or _fastest(k_pages, interpret):
        case "triton":
            return triton.write_kv(*operands, interpret=interpret)
        case "reference":
            return reference.write_kv(*operands)
        case other:
            raise ValueError(f"implementation must be 'triton', 'reference' or None; got {other!r}")


def _fastest(k_pages: jax.Array, interpret: bool) -> Implementation:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    able = capability is not None and capability >= (8, 9) and triton.refusal(k_pages) is None
    return "triton" if able else "reference"


def _check(k_pages: Any, v_pages: Any, k: Any, v: Any, slots: Any) -> None:
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must be alike, [P, K, S, H]; "
            f"got {k_pages.dtype}{list(k_pages.shape)} and {v_pages.dtype}{list(v_pages.shape)}"
        )
    _, K, _, H = k_pages.shape
    if k.shape != (*slots.shape, K, H) or v.shape != k.shape:
        raise ValueError(f"k and v must be [*slots={list(slots.shape)}, K={K}, H={H}]; got {k.shape} and {v.shape}")
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots must be integers; got {slots.dtype}")


def _per_head(name: str, x: Any, heads: int) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if x.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{name} must be a scalar or one number a kv head [{heads}]; got {list(x.shape)}")
    return jnp.broadcast_to(x, (heads,))
