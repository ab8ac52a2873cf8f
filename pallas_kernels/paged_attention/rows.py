"""What the Mosaic kernel is given of the queries: rows of each kv head in blocks of 64, and what each row sees."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments, key_range

ROWS = 64  # rows of a block: of a wgmma


def terms(dtype: jnp.dtype) -> int:
    """How many numbers of the pages' dtype a query is the sum of: enough for the 8 bits of mantissa of bfloat16."""
    if not _compat.is_fp8(dtype):
        return 1
    return -(-8 // (jnp.finfo(dtype).nmant + 1))


def packed(args: Arguments, blocks: int) -> tuple[Float[Array, "B K blocks terms R H"], Float[Array, "B K blocks R"]]:
    """Queries as rows (token * group + head of the group) of each kv head, and what their products are multiplied by.

    Over 16-bit pages a query is one term in their dtype. Over fp8 pages each row is scaled to fill the range of fp8 and
    split into fp8 terms, each of which holds what the ones before it rounded away; their sum is the scaled query.
    The product of terms and keys, times a row's factor, is a base-2 logit. Padding rows are zeros.
    """
    B, T, _, H = args.q.shape
    K, group, dtype = args.kv_heads, args.group, jnp.dtype(args.k_pages.dtype)
    q = jnp.swapaxes(args.q.astype(jnp.float32).reshape(B, T, K, group, H), 1, 2).reshape(B, K, T * group, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, blocks * ROWS - T * group), (0, 0))).reshape(B, K, blocks, 1, ROWS, H)
    factor = jnp.broadcast_to(args.scores_scale[None, :, None, None], (B, K, blocks, ROWS))
    if not _compat.is_fp8(dtype):
        return q.astype(dtype), factor
    largest = jnp.max(jnp.abs(q), axis=(3, 5), keepdims=True)
    scale = jnp.where(largest > 0, largest, 1.0) * (1 / _reduced_max(dtype))
    return _split(q / scale, dtype), factor * scale[:, :, :, 0, :, 0]


def _reduced_max(dtype: jnp.dtype) -> float:
    """A number near the top of the range of an IEEE format with this dtype's bits, which ``reduce_precision`` knows.

    e4m3fn goes to 448 because it gave up infinity; in IEEE's terms its range ends at 240.
    """
    return 224.0 if dtype == jnp.float8_e4m3fn else 49152.0


def _split(x: Float[Array, "B K blocks 1 R H"], dtype: jnp.dtype) -> Float[Array, "B K blocks terms R H"]:
    """``reduce_precision`` rounds, where XLA may take a cast to fp8 and back for nothing."""
    info, parts = jnp.finfo(dtype), []
    for _ in range(terms(dtype) - 1):
        part = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        parts.append(part.astype(dtype))
        x = x - part
    return jnp.concatenate([*parts, x.astype(dtype)], axis=3)


def bounds(args: Arguments, blocks: int) -> tuple[Int[Array, "B blocks 2 R"], Int[Array, "B blocks 4"]]:
    """The positions that each row sees, always one interval, and those of a block of rows.

    Returns:
      First position that a row sees and the one past the last. A row of padding or of a token past ``q_length`` takes
      the bounds of the last token, so as not to need a mask of its own: its result is not used.
      Of each block: the union of its rows' intervals and their intersection, each as first and past the last.
    """
    T = args.q.shape[1]
    row = jnp.arange(blocks * ROWS, dtype=jnp.int32).reshape(1, blocks, ROWS)
    kv_length, q_length, valid_from = (x[:, None, None] for x in (args.kv_length, args.q_length, args.valid_from))
    own = jnp.minimum(row // args.group, T - 1)
    token = jnp.minimum(own, jnp.maximum(q_length - 1, 0))
    low, high = key_range(args, kv_length, q_length, valid_from, token, token)
    low, high = jnp.broadcast_arrays(low, jnp.maximum(high, low))
    start, empty = low.min(2), own[:, :, 0] >= q_length[:, :, 0]
    union = (start, jnp.where(empty, start, high.max(2)))
    return jnp.stack([low, high], axis=2), jnp.stack([*union, low.max(2), high.min(2)], axis=-1)
