"""What a layer does with its projected heads: norm, RoPE, and keys and values into their pages, quantised, in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.rotary import Rotary
from pallas_kernels.write_kv import reference, triton

Implementation = Literal["triton", "reference"]


def write_kv(
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    heads: Float[Array, "*T K J H"],
    slots: Int[Array, "*T"],
    rotary: Rotary | None = None,
    *,
    k_scale: Float[Array, "*K"] | float = 1.0,
    v_scale: Float[Array, "*K"] | float = 1.0,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Norms and rotates tokens' heads, writes keys and values into pages, and returns the queries and the pools.

    Donate the pools to the ``jit`` around and use only what comes back: then the write is in place. One use of an old
    pool after the call makes XLA copy the whole pool.

    Args:
      k_pages: pool of keys, S tokens a page; bf16, f16, f32, float8_e4m3fn or float8_e5m2.
      v_pages: pool of values, like ``k_pages``.
      heads: of any number of tokens (any leading axes), as one projection gives them: of each kv head, side by side,
        its J - 2 query heads (there may be none), its key and its value.
      slots: where each token goes: ``page * S + offset``; -1 writes nothing. No slot may stand twice.
      rotary: scales of all heads, norms and RoPE of queries and keys, its tables with the leading axes of ``slots``;
        None leaves all as they are.
      k_scale: what a stored key is multiplied by to be the key, so keys are divided by it: a scalar, or one a kv head.
      v_scale: the same of values.
      implementation: ``"triton"`` or ``"reference"``; None picks Triton on NVIDIA GPUs that know fp8 (from sm_89).
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The queries in heads' dtype, N = K * (J - 2), those of a kv head side by side, of tokens that write nothing, too;
      and the two pools, of which only the slots have changed. Numbers too large for the pool's dtype are stored as its
      largest, never as NaN or infinity.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: what the chosen implementation cannot do, in a sentence.

    Source: fp8 cache with scales as in vLLM (real = stored * scale); norms of Qwen3, halves paired as in Hugging Face.
    """
    check_heads(k_pages, v_pages, heads, slots, rotary)
    tokens, K, J, H = slots.size, *heads.shape[-3:]
    if rotary is not None:
        rotary = replace(
            rotary,
            cos=rotary.cos.reshape(tokens, H // 2),
            sin=rotary.sin.reshape(tokens, H // 2),
            scales=rotary.scales and (rotary.scales[0].reshape(tokens), rotary.scales[1]),
        )
    flat = (
        k_pages,
        v_pages,
        heads.reshape(tokens, K, J, H),
        slots.reshape(tokens).astype(jnp.int32),
        rotary,
        _per_head("k_scale", k_scale, K),
        _per_head("v_scale", v_scale, K),
    )
    match implementation or _fastest(k_pages, interpret):
        case "triton":
            queries, k_pages, v_pages = triton.write_kv(*flat, interpret=interpret)
        case "reference":
            queries, k_pages, v_pages = reference.write_kv(*flat)
        case other:
            raise ValueError(f"implementation must be 'triton', 'reference' or None; got {other!r}")
    return queries.reshape(*slots.shape, K * (J - 2), H), k_pages, v_pages


def _fastest(k_pages: jax.Array, interpret: bool) -> Implementation:
    if interpret:
        return "triton"
    capability = _compat.compute_capability()
    able = capability is not None and capability >= (8, 9) and triton.refusal(k_pages) is None
    return "triton" if able else "reference"


def check_heads(k_pages: Any, v_pages: Any, heads: Any, slots: Any, rotary: Rotary | None) -> None:
    """Raise ValueError for what does not belong together."""
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must be alike, [P, K, S, H]; "
            f"got {k_pages.dtype}{list(k_pages.shape)} and {v_pages.dtype}{list(v_pages.shape)}"
        )
    _, K, _, H = k_pages.shape
    if heads.shape != (*slots.shape, K, *heads.shape[-2:-1], H) or heads.shape[-2] < 2:
        raise ValueError(
            f"heads must be [*slots={list(slots.shape)}, K={K}, J, H={H}], J being at least 2 (a key and a value); "
            f"got {list(heads.shape)}"
        )
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots must be integers; got {slots.dtype}")
    _check_rotary(rotary, slots.shape, heads.shape[-3:])


def _check_rotary(rotary: Rotary | None, tokens: tuple[int, ...], heads: tuple[int, ...]) -> None:
    if rotary is None:
        return
    angles, head = [*tokens, heads[-1] // 2], [heads[-1]]
    of_tokens, of_columns = rotary.scales or (None, None)
    for name, x, wanted in (
        ("cos", rotary.cos, angles),
        ("sin", rotary.sin, angles),
        ("q_norm", rotary.q_norm, head),
        ("k_norm", rotary.k_norm, head),
        ("scales[0]", of_tokens, [*tokens]),
        ("scales[1]", of_columns, [*heads]),
    ):
        if x is not None and list(x.shape) != wanted:
            raise ValueError(f"rotary.{name} must be {wanted}, as heads and slots are; got {list(x.shape)}")


def _per_head(name: str, x: Any, heads: int) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if x.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{name} must be a scalar or one number a kv head [{heads}]; got {list(x.shape)}")
    return jnp.broadcast_to(x, (heads,))
