"""The checked arguments of every implementation of paged attention, and the geometry that they share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.lib.int4_kv import KeyRounding, Pages, is_int4
from pallas_kernels.lib.masks import Mask
from pallas_kernels.lib.rotary import Rotary

LOG2E = math.log2(math.e)
MOST_WIDENED_HEAD = 128  # size of heads; the kernel that wants such copies takes no larger ones
MOST_WIDENED = 1 << 30  # bytes of a 16-bit copy of fp8 pages, which long chunks need; beyond it Triton converts pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fresh:
    """Projected heads of a call's tokens, for a kernel that rotates them, writes keys and values, and attends.

    Attributes:
        heads: each kv head has its query heads, its key and its value side by side, perhaps with gates in front.
        slots: where keys and values go in the pools, ``page * S + offset``; -1 writes nothing.
        rotary: norm and RoPE that the heads still need.
        k_rounding: of keys in 4 bits, as for ``write_kv``.
    """

    heads: Float[Array, "B T K J H"]
    slots: Int[Array, "B T"]
    rotary: Rotary
    k_rounding: KeyRounding | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arguments:
    """Checked arguments of one call, defaults filled in; letters as in ``paged_attention``."""

    q: Float[Array, "B T N H"]
    k_pages: Pages
    v_pages: Pages
    page_table: Int[Array, "B M"]
    kv_length: Int[Array, " B"]
    q_length: Int[Array, " B"]
    valid_from: Int[Array, " B"]
    k_scale: Float[Array, " K"]
    v_scale: Float[Array, " K"]
    mask: Mask = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    fresh: Fresh | None = None  # if there are projected heads, q gives the shape of their queries alone
    gates: Float[Array, "B T K _ H"] | None = None  # `combine` applies them, else the end of an implementation

    @property
    def kv_heads(self) -> int:
        return self.k_pages.shape[1]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """The two pools, for a kernel that refuses those in 4 bits."""
        assert not is_int4(self.k_pages)
        arrays: Any = self.k_pages, self.v_pages
        return arrays

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.q.shape[2] // self.kv_heads

    @property
    def compute_dtype(self) -> Any:
        """16-bit dtype of the operands of both matrix products; accumulation is always float32.

        fp8 pages are converted to float16, which holds every e4m3 and e5m2 number exactly. The conversion is one
        instruction for two numbers, while that to bfloat16 goes through float32. 4-bit numbers are exact in it, too.
        """
        is_narrow = _compat.is_fp8(self.k_pages.dtype) or is_int4(self.k_pages)
        return jnp.dtype(jnp.float16) if is_narrow else self.k_pages.dtype

    @property
    def scores_scale(self) -> Float[Array, " K"]:
        """The factor that makes a product q.k a base-2 logit."""
        return self.k_scale * (self.scale * LOG2E)


def checked(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_length: Any,
    q_length: Any,
    *,
    mask: Mask,
    window: int | None,
    scale: float | None,
    k_scale: Any,
    v_scale: Any,
    valid_from: Any,
    gates: Any = None,
) -> Arguments:
    """Check shapes and dtypes of a call, and fill in its defaults.

    Raises:
        ValueError: shapes, a mask or a window that do not belong together; the message prints them.
        TypeError: queries or pages are not floating.
    """
    if q.ndim != 4 or k_pages.ndim != 4:
        raise ValueError(f"q must be [B, T, N, H] and pages [P, K, S, H]; got {q.shape} and {k_pages.shape}")
    B, T, N, H = q.shape
    _, K, _, H_pages = k_pages.shape
    if v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(f"k_pages and v_pages must be alike; got {_spec(k_pages)} and {_spec(v_pages)}")
    if H_pages != H or N % K:
        raise ValueError(f"q {q.shape} must have the H of pages {k_pages.shape} and a multiple of their K heads")
    if page_table.ndim != 2 or page_table.shape[0] != B:
        raise ValueError(f"page_table must be [B={B}, M]; got {page_table.shape}")
    for name, x in (("q", q), ("k_pages", k_pages)):
        if not (jnp.issubdtype(x.dtype, jnp.floating) or (x is k_pages and is_int4(x))):
            raise TypeError(f"{name} must be a floating array; got {x.dtype}")
    if mask not in ("causal", "block"):
        raise ValueError(f"mask must be 'causal' or 'block'; got {mask!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query's own position counts); got {window}")
    if gates is not None and (
        gates.shape[:3] != (B, T, K) or gates.shape[4:] != (H,) or gates.shape[3] < N // K or gates.dtype != q.dtype
    ):
        raise ValueError(f"gates must be {q.dtype}[{B}, {T}, {K}, {N // K} or more, {H}]; got {_spec(gates)}")
    return Arguments(
        q,
        k_pages,
        v_pages,
        _integers("page_table", page_table, page_table.shape),
        _integers("kv_length", kv_length, (B,)),
        _integers("q_length", jnp.full((B,), T, jnp.int32) if q_length is None else q_length, (B,)),
        _integers("valid_from", jnp.zeros((B,), jnp.int32) if valid_from is None else valid_from, (B,)),
        _per_head("k_scale", k_scale, K),
        _per_head("v_scale", v_scale, K),
        mask=mask,
        window=window,
        scale=H**-0.5 if scale is None else float(scale),
        gates=gates,
    )


def key_range(
    args: Arguments, kv_length: Any, q_length: Any, valid_from: Any, first: Any, last: Any
) -> tuple[Any, Any]:
    """Half-open range of key positions that query tokens first..last (inclusive) of one sequence may see.

    It takes scalars of a kernel as well as arrays. Tokens past ``q_length`` see nothing; the range is empty if no
    other token is left.
    """
    last = jnp.minimum(last, q_length - 1)
    start = kv_length - q_length
    low, high = jnp.maximum(valid_from, 0), kv_length
    if args.mask == "causal":
        high = jnp.minimum(high, start + last + 1)
    elif args.window is not None:
        high = jnp.minimum(high, start + last + args.window)
    if args.window is not None:
        low = jnp.maximum(low, start + first - args.window + 1)
    return low, jnp.where(last >= first, high, low)


def page_range(low: Any, high: Any, page_size: int) -> tuple[Any, Any]:
    """Half-open range of the pages that hold positions low..high-1; empty if there is no such position.

    Kernels must read no other page: it may have been given back, and its entry in the page table may be anything.
    """
    first = low // page_size
    return first, jnp.where(high > low, (high + page_size - 1) // page_size, first)


def operand(x: jax.Array, dtype: Any) -> jax.Array:
    """Queries in the dtype of the products; clipped for float16, whose range is smaller than bfloat16's."""
    if dtype == jnp.float16 and x.dtype != jnp.float16:
        limit = _compat.max_finite(jnp.float16)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    return x.astype(dtype)


def _spec(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _integers(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.asarray(x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array {list(shape)}; got {_spec(x)}")
    return x.astype(jnp.int32)


def _per_head(name: str, x: Any, heads: int) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    if x.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{name} must be a scalar or one number a kv head [{heads}]; got {list(x.shape)}")
    return jnp.broadcast_to(x, (heads,))
