"""The step from a layer's projected heads to its queries and pages: norm, RoPE, and a quantised write in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.lib import int4_kv
from pallas_kernels.lib.int4_kv import KeyRounding, Pages
from pallas_kernels.lib.rotary import Rotary, num_queries
from pallas_kernels.registry import FP8_GPUS

Implementation = Literal["triton", "reference"]


def _operation(name: str) -> registry.Operation:
    kernel = registry.Implementation(
        "triton", f"pallas_kernels.write_kv.triton:{name}", FP8_GPUS, refusal="refusal", interprets=True
    )
    plain = registry.Implementation("reference", f"pallas_kernels.write_kv.reference:{name}")
    return registry.Operation(name, (kernel, plain))


WRITE_KV, WRITE_CONTEXT = _operation("write_kv"), _operation("write_context")  # a call is (k_pages,)


def write_kv(
    k_pages: Pages,
    v_pages: Pages,
    heads: Float[Array, "*T K J H"],
    slots: Int[Array, "*T"],
    rotary: Rotary | None = None,
    *,
    k_scale: Float[Array, "*K"] | float = 1.0,
    v_scale: Float[Array, "*K"] | float = 1.0,
    k_rounding: KeyRounding | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*T N H"], Pages, Pages]:
    """Norm and rotate tokens' heads, write keys and values into pages, and return the queries and the pools.

    Donate the pools to the ``jit`` around and use only the returned pools: then the write is in place. One use of an
    old pool after the call makes XLA copy all of it.

    Args:
      k_pages: pool of keys, S tokens a page; bf16, f16, f32, float8_e4m3fn or float8_e5m2, or 4 bits
        (``lib.int4_kv``).
      v_pages: pool of values, like ``k_pages``.
      heads: projected heads of any number of tokens (any leading axes). Each kv head has its query heads (there may be
        none), its key and its value side by side, and in front of them as many gates as queries if ``rotary`` says so.
      slots: where each token goes: ``page * S + offset``; -1 writes nothing. No slot may occur twice.
      rotary: scales of all heads, norms and RoPE of queries and keys, with tables that have the leading axes of
        ``slots``; None leaves heads as they are.
      k_scale: key = stored key * k_scale, so keys are divided by it: a scalar, or one number a kv head.
      v_scale: likewise for values.
      k_rounding: for pools in 4 bits only, how keys are rounded; None subtracts nothing and rounds to nearest.
      implementation: ``"triton"`` or ``"reference"``; None picks Triton on NVIDIA GPUs that know fp8 (from sm_89).
      interpret: run the Triton kernel in Pallas' interpreter, on any backend (tests).

    Returns:
      The queries in heads' dtype, those of a kv head side by side, also for tokens that write nothing; and the two
      pools, in which only the slots have changed. Numbers too large for the pool's dtype are stored as its largest,
      never as NaN or infinity.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: fp8 cache with scales as in vLLM (real = stored * scale); norms of Qwen3, halves paired as in Hugging Face.
    """
    check_heads(k_pages, v_pages, heads, slots, rotary)
    tokens, K, J, H = slots.size, *heads.shape[-3:]
    check_rounding(k_pages, k_rounding, (K, H))
    run = WRITE_KV.function(implementation, (k_pages,), interpret=interpret)
    queries, k_pages, v_pages = run(
        k_pages,
        v_pages,
        heads.reshape(tokens, K, J, H),
        slots.reshape(tokens).astype(jnp.int32),
        None if rotary is None else _flat(rotary),
        _scales("k_scale", k_scale, (K,)),
        _scales("v_scale", v_scale, (K,)),
        k_rounding,
    )
    return queries.reshape(*slots.shape, K * num_queries(heads, rotary), H), k_pages, v_pages


def write_context(
    k_pages: Pages,
    v_pages: Pages,
    heads: Sequence[Float[Array, "*T K _ H"]],
    slots: Int[Array, "*T"],
    rotary: Rotary,
    k_norms: Sequence[Float[Array, " H"] | None],
    first_pages: Mapping[int, int],
    *,
    k_scale: Float[Array, "L K"] | float = 1.0,
    v_scale: Float[Array, "L K"] | float = 1.0,
    k_rounding: KeyRounding | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Pages, Pages]:
    """Norm and rotate keys of the layers that share two pools, and write keys and values: a drafter's context.

    It writes the numbers of one `write_kv` without queries for each layer, in one kernel, which reads the heads where
    they lie. Donate the pools as for `write_kv`.

    Args:
      k_pages: pool of keys, the pages of one layer behind those of another; dtypes as in `write_kv`.
      v_pages: pool of values, like ``k_pages``.
      heads: keys and values of all L layers, of any number of tokens (any leading axes). Each kv head has the key and
        the value of each layer side by side; in one array for all layers, or in several, the first layers first.
      slots: where each token goes among the pages of a layer: ``page * S + offset``, pages counted from its first one;
        -1 writes nothing. No slot may occur twice.
      rotary: tables with the leading axes of ``slots``, and eps; it has no norms and no scales.
      k_norms: weights of each layer's norm of keys; None norms nothing.
      first_pages: static; the layers to write, counted from 0, with the first page of each in the pools.
      k_scale: key = stored key * k_scale: a scalar, or one number a layer and kv head.
      v_scale: likewise for values.
      k_rounding: as for `write_kv`, of each layer.
      implementation: as for `write_kv`.
      interpret: as for `write_kv`.

    Returns:
      The two pools, in which only the slots of those layers have changed, rounded and clipped as in `write_kv`.

    Raises:
      ValueError: shapes that do not belong together; the message prints them.
      NotImplementedError: the chosen implementation cannot do the call; the message says why.

    Source: as for `write_kv`; keys and values of context features as in DFlash, arXiv 2602.06036, section 4.
    """
    _check_pools(k_pages, v_pages, slots)
    for array in heads:
        _check_heads(array, slots, k_pages)
    _check_layers(heads, rotary, k_norms, first_pages)
    for k_norm in k_norms:
        _check_rotary(replace(rotary, k_norm=k_norm), slots.shape, heads[0].shape[-3:])
    scales_shape = len(k_norms), k_pages.shape[1]
    check_rounding(k_pages, k_rounding, (*scales_shape, k_pages.shape[-1]))
    run = WRITE_CONTEXT.function(implementation, (k_pages,), interpret=interpret)
    k_pages, v_pages = run(
        k_pages,
        v_pages,
        [array.reshape(slots.size, *array.shape[-3:]) for array in heads],
        slots.reshape(slots.size).astype(jnp.int32),
        _flat(rotary),
        list(k_norms),
        _scales("k_scale", k_scale, scales_shape),
        _scales("v_scale", v_scale, scales_shape),
        k_rounding,
        first_pages=tuple(first_pages.items()),
    )
    return k_pages, v_pages


def check_heads(k_pages: Any, v_pages: Any, heads: Any, slots: Any, rotary: Rotary | None) -> None:
    """Raise ValueError for shapes or dtypes that do not belong together."""
    _check_pools(k_pages, v_pages, slots)
    _check_heads(heads, slots, k_pages)
    _check_rotary(rotary, slots.shape, heads.shape[-3:])


def check_rounding(k_pages: Pages, rounding: KeyRounding | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a rounding of keys that does not suit the heads, or the dtype of the pool."""
    if rounding is None:
        return
    shapes = [list(rounding.offset.shape), list(rounding.feedback.shape)]
    if shapes != [[*shape], [*shape, shape[-1]]] or not int4_kv.is_int4(k_pages):
        raise ValueError(f"k_rounding must be of keys {list(shape)} in 4 bits; got {shapes} and {k_pages.dtype}")


def _flat(rotary: Rotary) -> Rotary:
    """The rotary with one axis of tokens."""
    angles = -1, rotary.cos.shape[-1]
    scales = rotary.scales and (rotary.scales[0].reshape(-1), rotary.scales[1])
    return replace(rotary, cos=rotary.cos.reshape(angles), sin=rotary.sin.reshape(angles), scales=scales)


def _check_pools(k_pages: Any, v_pages: Any, slots: Any) -> None:
    if int4_kv.is_int4(k_pages) and (reason := int4_kv.size_refusal(k_pages.shape[-1])):
        raise ValueError(f"{reason}.")
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must be alike, [P, K, S, H]; "
            f"got {k_pages.dtype}{list(k_pages.shape)} and {v_pages.dtype}{list(v_pages.shape)}"
        )
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots must be integers; got {slots.dtype}")


def _check_heads(heads: Any, slots: Any, k_pages: Any) -> None:
    _, K, _, H = k_pages.shape
    if heads.shape != (*slots.shape, K, *heads.shape[-2:-1], H) or heads.shape[-2] < 2:
        raise ValueError(
            f"heads must be [*slots={list(slots.shape)}, K={K}, J, H={H}], J being at least 2 (a key and a value); "
            f"got {list(heads.shape)}"
        )


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
    if rotary.has_gates and (heads[1] < 4 or heads[1] % 2 or rotary.scales is not None):
        have = "" if rotary.scales is None else " and scales"
        raise ValueError(f"heads with gates must have J = 2 R + 2 for R queries, and no scales; got J={heads[1]}{have}")


def _check_layers(heads: Sequence[Any], rotary: Rotary, k_norms: Sequence[Any], first_pages: Mapping[int, int]) -> None:
    rows, layers = [array.shape[-2] for array in heads], range(len(k_norms))
    if any(J % 2 for J in rows) or sum(rows) != 2 * len(layers) or not set() < set(first_pages) <= set(layers):
        raise ValueError(
            "heads must have a key and a value for each layer of k_norms, and first_pages must name some of these "
            f"layers; got {rows}, {len(layers)} and {list(first_pages)}"
        )
    if rotary.q_norm is not None or rotary.k_norm is not None or rotary.scales is not None or rotary.has_gates:
        raise ValueError("rotary must have no norms, which k_norms gives for each layer, no scales and no gates")


def _scales(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if x.shape not in ((), (1,), shape):
        raise ValueError(f"{name} must be a scalar or one number a kv head {list(shape)}; got {list(x.shape)}")
    return jnp.broadcast_to(x, shape)
