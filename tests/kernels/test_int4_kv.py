"""Keys and values in 4 bits: the format against numpy, and the page write and attention over it, interpreted too."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Rotary, paged_attention, write_attend, write_context, write_kv
from pallas_kernels.lib import int4_kv
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.arguments import checked
from tests.kernels.cases import BF16, F32, Geometry, brute_force, cuda_lowering, error, random_call
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_write_context import FIRST_PAGES, HOW, WRITERS, L, context, some_slots
from tests.kernels.test_write_kv import K, P, S, T, rotary_of, same_bits, tokens

QUANTISED, ROTATED = jax.jit(int4_kv.quantised), jax.jit(int4_kv.rotated)
by_implementation = pytest.mark.parametrize(("implementation", "interpret"), HOW, ids=WRITERS)


def sylvester(size):
    """The matrix by its definition, bit by bit."""
    return np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(size)] for i in range(size)])


def elements(pages):
    """What numbers stand for, in float64 by numpy."""
    numbers, scale, middle = (np.asarray(x) for x in jax.tree.leaves(pages))
    halves = np.concatenate([numbers & 15, numbers >> 4], axis=-1).astype(np.float64)
    return (halves - 7.5) * scale.astype(np.float64)[..., None] + middle.astype(np.float64)[..., None]


# --- the format


@pytest.mark.parametrize("size", [16, 64, 256])
def test_the_rotation_is_sylvester_s(size):
    x = np.random.default_rng(0).standard_normal((3, 5, size), np.float32)
    turned = np.asarray(ROTATED(x))
    np.testing.assert_array_equal(int4_kv.signs(size), sylvester(size))
    np.testing.assert_allclose(turned, x @ sylvester(size) / size**0.5, atol=1e-5)
    np.testing.assert_allclose(ROTATED(turned), x, atol=1e-5)
    np.testing.assert_allclose((turned * turned[:1]).sum(-1), (x * x[:1]).sum(-1), rtol=1e-4, atol=1e-4)


def heads_of_all_sizes():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4000, 64)).astype(np.float32) * 10.0 ** rng.integers(-5, 4, (4000, 1))
    return (x + rng.choice([0, 1, -30], (4000, 1))).astype(np.float32)


def over_the_range(x):
    """The numbers nearest to elements with a scale and a middle of their range, in float64, by numpy."""
    least, most = x.min(1, keepdims=True).astype(np.float64), x.max(1, keepdims=True).astype(np.float64)
    scale = (most - least) / 15
    return np.clip(np.rint((x - (most + least) / 2) / scale + 7.5), 0, 15), scale, (most + least) / 2


def test_elements_have_the_numbers_nearest_to_them():
    x = heads_of_all_sizes()
    stored, (numbers, scale, middle) = QUANTISED(x), over_the_range(x)
    is_exact = (scale > 2**-10)[:, 0] & (scale > 2**-6 * np.abs(middle))[:, 0]  # as good as, in float16
    apart = np.abs(np.asarray(int4_kv.unpacked(stored.numbers)) - numbers)[is_exact]
    assert apart.max() <= 1  # float16 moves some over the border
    assert apart.mean() < 0.02
    off, size = np.abs(elements(stored) - x), np.abs(x).max(1, keepdims=True)
    assert (off <= 0.8 * scale + size * 2**-10 + 2**-20).all()
    assert (off > 0.45 * scale).any()  # the bound is none of a finer format
    np.testing.assert_allclose(int4_kv.dequantised(stored), elements(stored), rtol=1e-5, atol=1e-6)


def test_scale_and_middle_are_those_of_least_squares():
    """Errors are orthogonal to what heads are read as, which halves those of scores that matter, and are smaller."""
    x = np.random.default_rng(1).standard_normal((2000, 64)).astype(np.float32) * 3 + 1
    stored, (numbers, scale, middle) = QUANTISED(x), over_the_range(x)
    read, plain = elements(stored), (numbers - 7.5) * scale + middle
    along = {name: ((y - x) * y).sum(1) / (y * y).sum(1) for name, y in (("fitted", read), ("plain", plain))}
    assert np.abs(along["fitted"]).max() < 2e-3 < np.abs(along["plain"]).mean()
    assert np.square(read - x).mean() < 0.97 * np.square(plain - x).mean()
    slope = [np.polyfit(n, y, 1) for n, y in zip(np.asarray(int4_kv.unpacked(stored.numbers), float), x, strict=True)]
    fitted = np.array(slope)
    np.testing.assert_allclose(np.asarray(stored.scale, np.float64), fitted[:, 0], rtol=2e-3)
    np.testing.assert_allclose(np.asarray(stored.middle, np.float64), fitted @ [7.5, 1], atol=0.01)


def test_a_byte_has_numbers_of_both_halves():
    x = np.zeros((1, 16), np.float32)
    x[0, 3], x[0, 8 + 5] = 15, 9
    stored = int4_kv.quantised(x)
    expected = np.zeros(8, int)
    expected[3], expected[5] = 15, 9 << 4
    np.testing.assert_array_equal(stored.numbers[0], expected)
    assert (float(stored.scale[0]), float(stored.middle[0])) == (1, 7.5)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e-9, 6e4])
def test_equal_elements_are_kept_exactly(value):
    stored = int4_kv.quantised(np.full((2, 32), value, np.float32))
    np.testing.assert_allclose(elements(stored), value, rtol=2**-11, atol=2**-25)


def test_elements_beyond_float16_are_clipped_and_stay_finite():
    x = np.linspace(-1, 1, 32, dtype=np.float32)[None] * 3e38
    found = elements(int4_kv.quantised(np.concatenate([x, -x, x + 3e38 * 0.01])))
    assert np.isfinite(found).all()
    assert found.max() > 4e5


def test_only_powers_of_two():
    assert int4_kv.size_refusal(64) is None
    for size in (8, 96, 512):
        assert f"from 16 to 256; this is {size}" in int4_kv.size_refusal(size)
    pool = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), int4_kv.shapes((P, K, S, 96)))
    with pytest.raises(ValueError, match="this is 96"):
        write_kv(pool, pool, np.zeros((1, K, 2, 96), np.float32), np.zeros(1, np.int32))


# --- the write


def pools(H, pages=P):
    """Pools of numbers that no write of the tests leaves as they are."""
    shapes = int4_kv.shapes((pages, K, S, H))
    return [jax.tree.map(lambda x: jnp.full(x.shape, 77, x.dtype), shapes) for _ in "kv"]


def test_a_write_rotates_keys_and_rounds_both(write):
    heads, slots = tokens(group=2), np.random.default_rng(2).permutation(P * S)[:T].astype(np.int32)
    H, rotary, factor = heads.shape[-1], rotary_of(BF16, "norms"), np.float32([0.5, 1, 3])
    slots[4] = -1
    wide = [np.zeros((P, K, S, H), np.float32) for _ in "kv"]
    q, *exact = jax.jit(write_kv)(*wide, heads.astype(np.float32), slots, rotary, k_scale=factor, v_scale=2.0)
    found_q, *found = write(*pools(H), heads, slots, rotary, k_scale=factor, v_scale=np.float32(2))
    np.testing.assert_allclose(np.asarray(found_q, np.float32), q, rtol=0.02, atol=0.02)
    page, offset = np.divmod(slots[slots >= 0], S)
    untouched = np.ones((P, S), bool)
    untouched[page, offset] = False
    for pool, old, x, turn in zip(found, pools(H), exact, (sylvester(H) / H**0.5, np.eye(H)), strict=True):
        expected, stored = (np.asarray(x, np.float64) @ turn)[page, :, offset], elements(pool)[page, :, offset]
        step = np.asarray(pool.scale, np.float64)[page, :, offset]
        assert (np.abs(stored - expected) <= step[..., None] / 2 + 0.02 * np.abs(expected).max()).all()
        assert error(stored, expected) < 0.12
        for array, before in zip(jax.tree.leaves(pool), jax.tree.leaves(old), strict=True):
            same_bits(np.asarray(array).swapaxes(1, 2)[untouched], np.asarray(before).swapaxes(1, 2)[untouched])


@pytest.mark.parametrize("H", [64, *(pytest.param(H, marks=pytest.mark.long) for H in (16, 32, 128, 256))])
def test_the_kernel_stores_the_reference_s_numbers(H):
    rng = np.random.default_rng(H)
    heads, slots = rng.standard_normal((T, K, 3, H)).astype(np.float32), np.arange(T, dtype=np.int32)
    rounding, _ = some_rounding(K, H)
    reference = jax.jit(functools.partial(write_kv, implementation="reference"))
    by_reference = reference(*pools(H), heads, slots, k_rounding=rounding)
    by_kernel = write_kv(*pools(H), heads, slots, k_rounding=rounding, implementation="triton", interpret=not ON_GPU)
    for found, expected in zip(jax.tree.leaves(by_kernel), jax.tree.leaves(by_reference), strict=True):
        # Sums in another order may move an element over the border between two numbers, and a scale by a last bit.
        apart = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
        if found.dtype == jnp.uint8:
            assert (apart != 0).mean() < 2e-3
        else:
            assert np.abs(apart).max() <= 2e-3 * np.abs(np.asarray(expected, np.float64)).max()


def some_rounding(*shape, rank=8, seed=4):
    """Offsets [.., H], and the feedback for queries that mostly lie in a few directions; with these queries."""
    rng, H = np.random.default_rng(seed), shape[-1]
    queries = rng.standard_normal((*shape[:-1], 200, rank)) @ rng.standard_normal((*shape[:-1], rank, H))
    queries += 0.2 * rng.standard_normal(queries.shape)
    moments = np.einsum("...qh,...qi->...hi", queries, queries) / queries.shape[-2]
    offset = rng.standard_normal(shape).astype(np.float32)
    return int4_kv.KeyRounding(offset, int4_kv.feedback_of(moments, 0.1)), queries


def test_an_offset_is_subtracted_from_keys_alone(write):
    rng, slots, H = np.random.default_rng(8), np.arange(T, dtype=np.int32), 64
    heads = rng.integers(-8, 8, (T, K, 3, H)).astype(np.float32)
    offset, none = rng.integers(-3, 3, (K, H)).astype(np.float32), np.zeros((K, H, H), np.int16)
    shifted = heads.copy()
    shifted[:, :, 1] -= offset
    q, *found = write(*pools(H), heads, slots, k_rounding=int4_kv.KeyRounding(offset, none))
    _, *expected = write(*pools(H), shifted, slots)
    np.testing.assert_array_equal(q, heads[:, :, 0])
    for array, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        same_bits(array, np.asarray(other))


def test_feedback_lowers_the_error_of_products_with_queries(write):
    rng, slots, H = np.random.default_rng(8), np.arange(T, dtype=np.int32), 64
    heads, (rounding, queries) = rng.standard_normal((T, K, 3, H)).astype(np.float32), some_rounding(K, H)
    heads[:, :, 1] += rounding.offset
    exact = heads[:, :, 1] - rounding.offset

    def wrong(**options):
        _, keys, values = write(*pools(H), heads, slots, **options)
        stored = elements(keys)[slots // S, :, slots % S] @ sylvester(H) / H**0.5
        off = stored - (exact if options else heads[:, :, 1])
        return np.sqrt(np.square(np.einsum("tkh,kqh->tkq", off, queries)).mean()), values

    (fed, with_feedback), (plain, without) = wrong(k_rounding=rounding), wrong()
    assert fed < 0.4 * plain
    for array, other in zip(jax.tree.leaves(with_feedback), jax.tree.leaves(without), strict=True):
        same_bits(array, np.asarray(other))


def test_an_offset_takes_out_what_all_keys_share():
    """Keys with a large common part: attention over what is left of them is nearer to exact attention."""
    rng, H, count = np.random.default_rng(9), 64, 32
    heads = rng.standard_normal((1, count, 2, 4, H)).astype(np.float32)
    common = 8 * rng.standard_normal((2, H)).astype(np.float32)
    heads[:, :, :, 2] += common
    angles = np.zeros((1, count, H // 2), np.float32)
    slots, table = np.arange(count, dtype=np.int32)[None], np.arange(count // S, dtype=np.int32)[None]
    tables, rotary = (table, np.int32([count]), np.int32([count])), Rotary(np.cos(angles), np.sin(angles))
    run = jax.jit(functools.partial(write_attend, implementation="reference"))
    wide = [np.zeros((P, 2, S, H), np.float32) for _ in "kv"]
    narrow = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), int4_kv.shapes((P, 2, S, H))) for _ in "kv"]
    exact = run(*wide, heads, slots, rotary, *tables)[0]
    rounding = int4_kv.KeyRounding(common, np.zeros((2, H, H), np.int16))
    plain = run(*narrow, heads, slots, rotary, *tables)[0]
    shifted = run(*narrow, heads, slots, rotary, *tables, k_rounding=rounding)[0]
    assert error(shifted, exact) < 0.5 * error(plain, exact)


def test_a_rounding_is_for_4_bits_and_of_each_head():
    heads, slots = np.zeros((1, K, 3, 32), np.float32), np.zeros(1, np.int32)
    wide = [np.zeros((P, K, S, 32), np.float32) for _ in "kv"]
    for pages, shape in ((wide, (K, 32)), (pools(32), (K, 16))):
        rounding = int4_kv.KeyRounding(np.zeros(shape, np.float32), np.zeros((*shape, shape[-1]), np.int16))
        with pytest.raises(ValueError, match=r"k_rounding must be of keys \[\d, 32\] in 4 bits"):
            write_kv(*pages, heads, slots, k_rounding=rounding)


@by_implementation
def test_a_context_is_a_write_for_each_layer(implementation, interpret):
    heads, rotary, norms = context(norms="norms")
    how, slots = {"implementation": implementation, "interpret": interpret}, some_slots()
    H = heads[0].shape[-1]
    rounding, _ = some_rounding(L, K, H)
    whole = jax.jit(functools.partial(write_context, first_pages=FIRST_PAGES, **how))
    found = whole(*pools(H, 3 * P), heads, slots, rotary, norms, k_rounding=rounding)
    write = jax.jit(functools.partial(write_kv, **how))
    k_pages, v_pages = pools(H, 3 * P)
    for layer, first_page in FIRST_PAGES.items():
        _, k_pages, v_pages = write(
            k_pages,
            v_pages,
            heads[0][:, :, 2 * layer : 2 * layer + 2],
            np.where(slots < 0, -1, slots + first_page * S),
            dataclasses.replace(rotary, k_norm=norms[layer]),
            k_rounding=rounding.of_layer(layer),
        )
    assert len(FIRST_PAGES) < L
    if ON_GPU and implementation == "reference":  # XLA fuses the two programs differently there: ties may round apart
        for stored, expected in zip(found, (k_pages, v_pages), strict=True):
            step = np.asarray(expected.scale, np.float64)[..., None]
            apart = np.abs(elements(stored) - elements(expected)) / np.where(step > 0, step, 1)
            assert apart.max() < 1.25  # a number of 16, and what that one changes in the fit of the scale
            assert (apart > 0.1).mean() < 0.01
        return
    for array, expected in zip(jax.tree.leaves(found), jax.tree.leaves((k_pages, v_pages)), strict=True):
        same_bits(array, np.asarray(expected))


# --- attention


def in_4_bits(call):
    """The call over 4-bit pages, NaN in the scales of what may not be read; and over the elements they stand for."""
    k, v = (jax.tree.map(np.array, QUANTISED(np.asarray(x, np.float32))) for x in (call.k_pages, call.v_pages))
    for pages, x in ((k, call.k_pages), (v, call.v_pages)):
        unread = np.isnan(np.asarray(x, np.float32)).any(-1)
        pages.scale[unread] = pages.middle[unread] = np.nan
    H = call.geometry.H
    unturned = elements(k) @ sylvester(H) / H**0.5
    stored = dataclasses.replace(call, k_pages=k, v_pages=v)
    return stored, dataclasses.replace(call, k_pages=unturned, v_pages=elements(v))


GEOMETRIES = [
    Geometry(B=3, T=1, N=4, K=2, H=32, dtype=F32),
    Geometry(B=3, T=4, N=4, K=2, dtype=F32, mask="block"),
    Geometry(B=3, T=5, N=6, K=2, H=128, dtype=F32, window=7),
    Geometry(B=3, T=16, N=2, K=1, H=256, S=64, M=3, dtype=F32, mask="block", window=20),
    Geometry(B=3, T=40, N=4, K=2, S=32, dtype=F32),  # 80 rows of a kv head: two blocks
    # Those that the Mosaic kernel takes.
    Geometry(B=3, T=1, N=6, K=2, H=128, S=64, M=4, dtype=F32),
    Geometry(B=3, T=16, N=6, K=2, H=128, S=64, M=5, dtype=F32, mask="block", window=100),
    Geometry(B=3, T=40, N=6, K=2, H=128, S=64, M=3, dtype=F32),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_attention_matches_brute_force(geometry, attend):
    g, full = geometry, geometry.S * geometry.M
    for seed, lengths, floor in ((0, [full, g.S + 1, 0], None), (1, [g.S - 1, 2 * g.S, full - 1], [0, 3, g.S])):
        call = random_call(g, seed, lengths, [min(g.T, n) for n in lengths], floor, scales=True)
        stored, exact = in_4_bits(call)
        assert np.isnan(stored.v_pages.scale).any()
        assert error(stored.run(attend), brute_force(exact)) <= 5e-3


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_do_not_change_the_result(splits):
    call = random_call(dataclasses.replace(GEOMETRIES[1], window=40, M=5), 7, [80, 9, 0], [4, 4, 0], [10, 0, 0])
    stored, exact = in_4_bits(call)
    args = checked(*stored.arguments, scale=None, **stored.options)
    config = triton.Config(block=16, splits=splits, num_warps=4, num_stages=2)
    out = triton.paged_attention(args, interpret=not ON_GPU, config=config)
    assert error(out, brute_force(exact)) <= 5e-3


def test_far_from_zero_and_large(attend):
    """Keys and values with a common part that dwarfs the rest: its scale must cancel, not round the rest away."""
    call = random_call(GEOMETRIES[1], 3, [60, 33, 64], [4, 4, 4])
    call.k_pages += 6
    call.v_pages += 40
    stored, exact = in_4_bits(call)
    out, expected = stored.run(attend), brute_force(exact)
    assert error(out, expected) <= 5e-3
    assert error(out - 40, expected - 40) <= 0.4  # of bfloat16's steps of a quarter at 40


def test_what_is_attended_does_not_depend_on_who_wrote_it():
    """A write and an attention serve fresh heads, so that a token counts as its page has it in each later round."""
    g = Geometry(B=2, T=3, N=4, K=2, dtype=F32)
    call = random_call(g, 5, [20, 40], [3, 3])
    stored, _ = in_4_bits(call)
    rng = np.random.default_rng(6)
    heads = rng.standard_normal((2, 3, 2, 4, 64)).astype(np.float32)
    position = call.kv_length[:, None] - 3 + np.arange(3)
    slots = np.take_along_axis(call.page_table, position // g.S, 1) * g.S + position % g.S
    angles = np.zeros((2, 3, 32), np.float32)
    rotary = Rotary(np.cos(angles), np.sin(angles))
    tables = (call.page_table, call.kv_length, call.q_length)
    pair = jax.tree.map(jnp.nan_to_num, (stored.k_pages, stored.v_pages))
    both = jax.jit(functools.partial(write_attend, implementation="reference"))
    out, *pages = both(*pair, heads, slots, rotary, *tables)
    q = heads[:, :, :, :2].reshape(2, 3, 4, 64)
    again = jax.jit(functools.partial(paged_attention, implementation="reference"))(q, *pages, *tables)
    np.testing.assert_allclose(out, again, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="packs no 4-bit pages"):
        write_attend(*pair, heads, slots, rotary, *tables, implementation="triton", interpret=True)


def test_kernels_refuse_in_a_sentence():
    call = random_call(dataclasses.replace(GEOMETRIES[0], H=16), 0, [9, 9, 9], [1, 1, 1])
    stored, _ = in_4_bits(call)
    with pytest.raises(NotImplementedError, match="4-bit heads of at least 32; this is 16"):
        paged_attention(*stored.arguments, implementation="triton", interpret=True)
    with pytest.raises(NotImplementedError, match="65 to 256 of 256; these are 16 of 16"):
        paged_attention(*stored.arguments, implementation="mosaic")


# --- lowering


@pytest.mark.parametrize(
    ("T", "N", "K", "H"), [(1, 32, 8, 128), (16, 32, 8, 128), (16, 16, 2, 256), (8, 8, 2, 64), (512, 16, 2, 256)]
)
def test_attention_lowers(T, N, K, H):
    struct = jax.ShapeDtypeStruct
    pool = int4_kv.shapes((300, K, 64, H))
    arguments = struct((8, T, N, H), BF16), pool, pool, struct((8, 128), jnp.int32), struct((8,), jnp.int32)
    for options in ({}, {"mask": "block", "window": 100}):
        f = functools.partial(paged_attention, implementation="triton", **options)
        assert "xla.gpu.triton" in cuda_lowering(f, *arguments)
        if H == 128 or (T, H) == (16, 256):
            f = functools.partial(paged_attention, implementation="mosaic", **options)
            assert "@mosaic_gpu_v2" in cuda_lowering(f, *arguments)


@pytest.mark.parametrize("H", [32, 128, 256])
def test_writes_lower(H):
    struct, pool = jax.ShapeDtypeStruct, int4_kv.shapes((300, 8, 64, H))
    table, weight, slots = struct((4, 16, H // 2), jnp.float32), struct((H,), BF16), struct((4, 16), jnp.int32)
    heads, rotary = struct((4, 16, 8, 6, H), BF16), Rotary(table, table, weight, weight)

    def rounding(*shape):
        return int4_kv.KeyRounding(struct(shape, F32), struct((*shape, H), jnp.int16))

    def f(k_pages, v_pages, x, slots, rotary, of_keys):
        return write_kv(k_pages, v_pages, x, slots, rotary, k_rounding=of_keys, implementation="triton")

    assert "xla.gpu.triton" in cuda_lowering(f, pool, pool, heads, slots, rotary, rounding(8, H))

    def write(k_pages, v_pages, x, slots, rotary, norm, of_keys):
        options = {"k_rounding": of_keys, "implementation": "triton"}
        return write_context(k_pages, v_pages, [x], slots, rotary, [norm, None], {0: 0, 1: 9}, **options)

    arguments = struct((4, 16, 8, 4, H), BF16), slots, Rotary(table, table), weight, rounding(2, 8, H)
    assert "xla.gpu.triton" in cuda_lowering(write, pool, pool, *arguments)
