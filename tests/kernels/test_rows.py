"""Inputs of the Mosaic kernel that a CPU can check: the queries' rows, their fp8 terms, and what each row sees."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.arguments import checked, key_range, page_range
from pallas_kernels.paged_attention.mosaic_work import Config, Shape
from pallas_kernels.paged_attention.rows import ROWS, Place, bounds, head_rows, longest_first, ordered, padded, terms
from tests.kernels.cases import BF16, E4M3, E5M2, Geometry, random_call, visible_keys

GEOMETRIES = [
    Geometry(B=4, T=16, N=8, K=2, M=4),
    Geometry(B=4, T=16, N=8, K=2, M=4, mask="block", window=21),
    Geometry(B=4, T=16, N=8, K=2, M=4, mask="block", window=5),
    Geometry(B=4, T=5, N=6, K=2, M=4, window=3),
    Geometry(B=4, T=20, N=8, K=1, M=4, mask="block"),
]


def arguments(geometry, **changes):
    call = random_call(geometry, 0, [64, 33, 20, 0], [geometry.T, 3, 0, 0], [0, 31, 0, 0], scales=True)
    for name, value in changes.items():
        setattr(call, name, value)
    return call, checked(*call.arguments, scale=None, **call.options)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_bounds_are_what_the_mask_shows(geometry):
    call, args = arguments(geometry)
    each = head_rows(geometry.T)
    count = geometry.N // geometry.K * each
    blocks = -(-count // ROWS)
    rows, union = (np.asarray(x) for x in bounds(args, blocks))
    for b in range(geometry.B):
        for block in range(blocks):
            tokens = {r: r % each for r in range(block * ROWS, min((block + 1) * ROWS, count))}
            seen = [visible_keys(call, b, t) for t in sorted(set(tokens.values())) if t < call.q_length[b]]
            for r, token in tokens.items():
                low, high, real = rows[b, block, :, r % ROWS]
                assert real == (token < call.q_length[b])
                if real:
                    assert list(range(low, high)) == visible_keys(call, b, token)
            every = sorted(set().union(*map(set, seen)))
            low, high = union[b, block, :2]
            assert list(range(low, high)) == every or (high <= low and not every)
            if seen:
                common = set.intersection(*map(set, seen))
                assert set(range(*union[b, block, 2:])) == common
            else:
                assert high <= low


def test_blocks_that_share_pages_see_what_either_sees():
    """A head's 72 tokens are two blocks of rows, whose windows differ."""
    call = random_call(Geometry(B=4, T=72, N=2, K=1, M=9, window=21), 0, [144, 100, 20, 0], [72, 70, 3, 0])
    args = checked(*call.arguments, scale=None, **call.options)
    (rows, alone), (rows_together, together) = (map(np.asarray, bounds(args, 4, n)) for n in (1, 2))
    np.testing.assert_array_equal(rows_together, rows)
    first, end, last_start, first_end = np.moveaxis(alone.reshape(4, 2, 2, 4), 3, 0)
    assert (last_start[0, :, 0] < last_start[0, :, 1]).all()
    expected = [first.min(2), end.max(2), last_start.max(2), first_end.min(2)]
    np.testing.assert_array_equal(together, np.stack(expected, axis=-1))


@pytest.mark.parametrize("S", [16, 64])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_only_pages_with_visible_keys_are_read(geometry, S):
    """Reading one more would follow an entry of the page table that may be anything: on a GPU, an illegal address."""
    geometry = dataclasses.replace(geometry, S=S)
    for valid_from in ([0, 0, 0, 0], [0, 31, 17, 40]):
        call = random_call(geometry, 0, [64, 33, 20, 50], [geometry.T, 3, 0, 2], valid_from)
        args = checked(*call.arguments, scale=None, **call.options)
        for b in range(geometry.B):
            scalars = (jnp.int32(x[b]) for x in (call.kv_length, call.q_length, call.valid_from))
            low, high = key_range(args, *scalars, jnp.int32(0), jnp.int32(geometry.T - 1))
            needed = {j // S for t in range(geometry.T) for j in visible_keys(call, b, t)}
            assert set(range(*map(int, page_range(low, high, S)))) == needed


@pytest.mark.parametrize(("dtype", "count"), [(BF16, 1), (E4M3, 2), (E5M2, 3)])
def test_terms_of_a_query_hold_all_bits_of_bfloat16(dtype, count):
    """The split of the kernel, in numpy: after ``terms`` roundings nothing is left, as long as nothing underflows."""
    assert terms(jnp.dtype(dtype)) == count
    rng = np.random.default_rng(0)
    x = np.asarray(np.asarray(rng.uniform(1, 200, 4096), BF16), np.float32)
    for _ in range(count):
        x = x - np.asarray(np.asarray(x, dtype), np.float32)
    assert (x == 0).all()


@pytest.mark.parametrize(
    ("tokens", "H", "dtype", "rows"),
    [
        (1, 64, E4M3, 1),
        (1, 64, BF16, 8),
        (1, 128, BF16, 1),
        (1, 256, BF16, 8),
        (3, 64, E4M3, 8),
        (8, 128, BF16, 8),
        (9, 64, BF16, 16),
        (16, 64, BF16, 16),
        (65, 64, E4M3, 128),
    ],
)
@pytest.mark.parametrize("are_split", [True, False])
def test_rows_of_a_head_are_its_tokens_and_padding(tokens, H, dtype, rows, are_split):
    call, args = arguments(Geometry(B=4, T=tokens, N=6, K=2, H=H, M=4, dtype=dtype))
    found = padded(args, are_split=are_split)
    assert found.dtype == (jnp.float16 if dtype == E4M3 and not are_split else BF16)
    found = np.asarray(found, np.float32)
    assert found.shape == (4, rows, 6 * H)
    np.testing.assert_array_equal(found[:, :tokens].reshape(4, tokens, 6, H), np.float32(call.q))
    assert (found[:, tokens:] == 0).all()


def test_all_sequences_come_in_order_of_length():
    block_bounds = np.random.default_rng(0).integers(0, 9, (70, 2, 4)).astype(np.int32)
    found = np.asarray(ordered(jnp.asarray(block_bounds), longest_first(jnp.asarray(block_bounds))))
    seen = found[:, 0, 1] - found[:, 0, 0]
    assert (seen[:-1] >= seen[1:]).all()
    assert sorted(found[:, 0, 4]) == list(range(70))
    np.testing.assert_array_equal(found[:, :, :4], block_bounds[found[:, 0, 4]])


@pytest.mark.parametrize(("items", "ctas"), [(512, 132), (128, 128), (28, 5), (265, 132), (7, 7)])
def test_every_item_is_of_one_cta(items, ctas):
    shape = Shape(Config(1, 2, 2, 0), 64, 8, 128, 1, 4, 16, items, ctas)
    mine = [[n * ctas + int(shape.turn(cta, n)) for n in range(int(shape.count(cta)))] for cta in range(ctas)]
    assert sorted(itertools.chain(*mine)) == list(range(items))


@pytest.mark.parametrize(("rows", "group"), [(1, 4), (8, 3), (8, 8), (16, 4), (16, 5), (16, 9), (64, 2), (128, 2)])
def test_pieces_are_every_row_of_every_head_once(rows, group):
    written, each = [], head_rows(rows)
    for block in range(2 * -(-each * group // (2 * ROWS))):  # the last may be padding beside one that shares its pages
        place = Place(0, 1, jnp.int32(block), group, rows)
        for where, tokens, head, exists in place.pieces():
            assert int(head) < 2 * group  # of kv head 1: read, if not written
            if exists:
                assert block * ROWS + where.start == (int(head) - group) * each + int(tokens.start)
                written += [(int(head), int(tokens.start) + i) for i in range(where.size)]
    assert sorted(written) == [(head, token) for head in range(group, 2 * group) for token in range(rows)]


@pytest.mark.parametrize(
    ("geometry", "sentence"),
    [
        (Geometry(B=1, T=1, N=1, K=1, H=64, S=64, dtype=jnp.float32), "these are float32"),
        (Geometry(B=1, T=1, N=1, K=1, H=32, S=64), "a head size of 64, 128 or 256; this is 32"),
        (Geometry(B=1, T=1, N=1, K=1, H=64, S=16), "pages of 64 tokens; these hold 16"),
        (Geometry(B=1, T=65, N=8, K=2, H=256, S=64, M=2), "of 64 or 128 numbers; these are bfloat16 of 256"),
    ],
)
def test_mosaic_refuses_in_a_sentence(geometry, sentence):
    call = random_call(geometry, 0, [3], [1])
    args = checked(*call.arguments, scale=None, **call.options)
    with pytest.raises(NotImplementedError, match=sentence):
        mosaic.paged_attention(args)


@pytest.mark.parametrize(
    ("B", "T", "M", "dtype", "fastest"),
    [
        (16, 1, 16, BF16, True),
        (16, 1, 15, BF16, False),  # short contexts
        (14, 1, 16, BF16, False),  # 112 of 132 multiprocessors
        (16, 2, 16, BF16, False),  # not measured
        (16, 16, 15, BF16, True),
        (8, 16, 15, BF16, False),
        (16, 1, 16, E4M3, True),
        (8, 1, 16, E4M3, False),
        (8, 16, 15, E4M3, True),  # of fp8 half of the card is enough
        (1, 1, 64, E4M3, True),
    ],
)
def test_mosaic_is_picked_where_it_measured_faster(B, T, M, dtype, fastest):
    q, pages = jax.ShapeDtypeStruct((B, T, 32, 128), BF16), jax.ShapeDtypeStruct((1, 8, 64, 128), dtype)
    table = jax.ShapeDtypeStruct((B, M), jnp.int32)
    args = SimpleNamespace(q=q, k_pages=pages, page_table=table, page_size=64, kv_heads=8, group=4)
    assert (mosaic.slower(args) is None) == fastest


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("H", [64, 128, 256])
def test_the_default_fits_a_multiprocessor(dtype, H):
    call = random_call(Geometry(B=1, T=16, N=4, K=1, H=H, S=64, M=2, dtype=dtype), 0, [100], [16])
    config = mosaic.default_config(checked(*call.arguments, scale=None, **call.options))
    assert config.stages >= 2
    assert (config.wide > 0) == (dtype != BF16)
