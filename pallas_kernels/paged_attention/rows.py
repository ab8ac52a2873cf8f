"""What the Mosaic kernel is given of the queries: rows of each kv head in blocks of 64, and what each row sees."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments, key_range

ROWS = 64  # rows of a block: of a wgmma


def terms(dtype: jnp.dtype) -> int:
    """How many numbers of the pages' dtype a query is the sum of: enough for the 8 bits of mantissa of bfloat16."""
    if not _compat.is_fp8(dtype):
        return 1
    return -(-8 // (jnp.finfo(dtype).nmant + 1))


def packed(args: Arguments, blocks: int, block_rows: int) -> Float[Array, "B K R H"]:
    """Queries as rows (token * group + head of the group) of each kv head, in whole blocks of ``block_rows`` rows.

    Over 16-bit pages in their dtype; over fp8 pages as they are, for the kernel to split into ``terms``.
    """
    B, T, _, H = args.q.shape
    K, group, dtype = args.kv_heads, args.group, args.k_pages.dtype
    q = args.q if _compat.is_fp8(dtype) else args.q.astype(dtype)
    q = jnp.swapaxes(q.reshape(B, T, K, group, H), 1, 2).reshape(B, K, T * group, H)
    return jnp.pad(q, ((0, 0), (0, 0), (0, blocks * block_rows - T * group), (0, 0)))


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
