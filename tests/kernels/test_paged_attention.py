"""Every implementation of paged attention that this machine has, against attention in float64 by brute force."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import _compat, paged_attention
from pallas_kernels.paged_attention import mosaic, triton
from pallas_kernels.paged_attention.arguments import checked
from pallas_kernels.paged_attention.combine import combine
from tests.kernels.cases import BF16, E4M3, E5M2, F32, Geometry, brute_force, error, random_call
from tests.kernels.conftest import ON_GPU

GEOMETRIES = [
    Geometry(B=3, T=1, N=4, K=2),
    Geometry(B=3, T=4, N=4, K=2, dtype=E4M3, mask="block"),
    Geometry(B=2, T=8, N=3, K=3, S=32, dtype=E5M2),
    Geometry(B=2, T=5, N=6, K=2, H=128, dtype=E4M3, window=7),
    Geometry(B=2, T=16, N=4, K=1, H=128, S=64, mask="block", window=20),
    Geometry(B=2, T=16, N=8, K=2, H=128, S=64, M=3, dtype=E4M3),
    Geometry(B=2, T=3, N=2, K=1, H=256, S=64, M=2, dtype=E5M2, window=1),
    Geometry(B=2, T=1, N=8, K=2, H=128, S=64, M=5, dtype=E4M3),
    Geometry(B=3, T=16, N=8, K=2, H=128, S=64, M=5, dtype=E4M3, mask="block"),
    Geometry(B=2, T=16, N=16, K=1, S=64, M=5, dtype=E5M2, window=70),
    Geometry(B=1, T=70, N=4, K=2, S=32, M=5),
    Geometry(B=2, T=40, N=2, K=1, S=32, dtype=E4M3, window=33),
    Geometry(B=1, T=70, N=5, K=1, H=128, S=64, M=3, mask="block", window=90),  # here Mosaic's is that of long chunks
]
LONG_CHUNKS = [  # more for that kernel; all others do with them what they do with shorter ones
    Geometry(B=2, T=130, N=3, K=1, S=64, M=5, window=70),
    Geometry(B=1, T=65, N=4, K=1, S=64, M=4, mask="block"),
    Geometry(B=2, T=100, N=4, K=1, H=128, S=64, M=4, dtype=E4M3),
    Geometry(B=1, T=70, N=8, K=2, S=64, M=4, dtype=E5M2, window=50),
]
SHARED = [  # pages that two consumers of Mosaic's kernel share
    Geometry(B=2, T=16, N=12, K=2, H=128, S=64, M=5, window=70),
    Geometry(B=2, T=16, N=12, K=2, H=256, S=64, M=5, dtype=E4M3, window=70),
    Geometry(B=3, T=12, N=6, K=1, H=256, S=64, M=3, mask="block"),
]
HERE_AS_OTHERS = (7, 10)  # geometries that have a kernel of their own on GPUs, and here parts that others have, too
# 11 of the 40 seconds of all geometries, interpreted; shorter long chunks have the same parts.
LONGEST = pytest.param(Geometry(B=2, T=150, N=4, K=2, H=128, S=64, M=5), marks=pytest.mark.long, id="longest")
on_gpus = () if ON_GPU else pytest.mark.long
by_dtype = pytest.mark.parametrize(  # both kinds of fp8 are read alike; some of the geometries below have the second
    "dtype", [BF16, E4M3, pytest.param(E5M2, marks=on_gpus)], ids=lambda d: jnp.dtype(d).name
)
by_name = pytest.mark.parametrize(
    "geometry",
    [
        *(pytest.param(g, marks=on_gpus if i in HERE_AS_OTHERS else ()) for i, g in enumerate(GEOMETRIES)),
        *(pytest.param(g, marks=on_gpus) for g in (*LONG_CHUNKS, *SHARED)),
        LONGEST,
    ],
    ids=str,
)
relaxed = settings(
    max_examples=20 if jax.default_backend() == "gpu" else 6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def calls(draw: st.DrawFn, geometry: Geometry):
    """Lengths at and beside page borders, idle slots, partly filled blocks, given-back pages, shared prefixes."""
    g = geometry
    borders = [n for m in range(g.M + 1) for n in (m * g.S - 1, m * g.S, m * g.S + 1) if 0 <= n <= g.M * g.S]
    lengths = st.one_of(st.sampled_from(borders), st.integers(0, g.M * g.S))
    kv_length = [draw(lengths) for _ in range(g.B)]
    q_length = [draw(st.one_of(st.just(min(g.T, n)), st.integers(0, min(g.T, n)))) for n in kv_length]
    floor = [draw(st.one_of(st.just(0), st.integers(0, n))) for n in kv_length]
    shared = draw(st.integers(0, 1)) if max(floor) == 0 and g.window is None and min(kv_length) > g.S + g.T else 0
    return random_call(g, draw(st.integers(0, 2**20)), kv_length, q_length, floor, shared=shared, scales=True)


@by_name
def test_matches_brute_force(geometry, attend):
    @relaxed
    @given(calls(geometry))
    def check(call):
        assert error(call.run(attend), brute_force(call)) <= 1e-2

    check()


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(B=3, T=4, N=4, K=2, mask="block"),  # keys in splits, whose merge applies gates
        Geometry(B=80, T=1, N=8, K=2, M=1),  # without splits
        *(
            pytest.param(g, marks=on_gpus)
            for g in (
                Geometry(B=7, T=16, N=12, K=2, H=256, S=64, M=3),
                Geometry(B=70, T=16, N=8, K=2, H=128, S=64, M=2),
                Geometry(B=1, T=130, N=12, K=1, H=256, S=64, M=3),
            )
        ),
    ],
    ids=str,
)
def test_gates_multiply_the_output(geometry, attend):
    """Gates are rows of a projection, of which others are NaN."""
    g, R = geometry, geometry.N // geometry.K
    call = random_call(g, 5, [g.M * g.S] * g.B, [g.T] * g.B, scales=True)
    plain = call.run(attend)
    channels = np.full((g.B, g.T, g.K, 2 * R + 2, g.H), np.nan, BF16)
    channels[..., :R, :] = np.random.default_rng(1).standard_normal((g.B, g.T, g.K, R, g.H)) * 4
    found = np.asarray(attend(*call.arguments, **call.options, gates=channels), np.float64)
    opened = 1 / (1 + np.exp(-channels[..., :R, :].astype(np.float64).reshape(found.shape)))
    np.testing.assert_allclose(found, plain * opened, rtol=2**-8, atol=1e-30)


def test_gates_of_another_shape_are_refused():
    call = random_call(Geometry(B=2, T=3, N=4, K=2), 0, [5, 5], [3, 3])
    with pytest.raises(
        ValueError, match=r"gates must be bfloat16\[2, 3, 2, 2 or more, 64\]; got bfloat16\[2, 3, 2, 1, 64\]"
    ):
        paged_attention(*call.arguments, gates=np.zeros((2, 3, 2, 1, 64), BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(B=7, T=16, N=8, K=2, H=128, S=64, M=3),
        Geometry(B=7, T=5, N=8, K=2, H=128, S=64, M=3, dtype=E4M3, mask="block"),
        Geometry(B=7, T=1, N=4, K=2, H=128, S=64, M=3),
        Geometry(B=7, T=1, N=4, K=2, H=128, S=64, M=3, dtype=E5M2),
        Geometry(B=7, T=20, N=8, K=2, H=128, S=64, M=3, window=70),
        Geometry(B=7, T=16, N=8, K=2, H=64, S=64, M=3, window=70),
        Geometry(B=7, T=20, N=8, K=2, H=64, S=64, M=3),
        Geometry(B=7, T=1, N=4, K=2, H=64, S=64, M=3, dtype=E4M3),
        Geometry(B=7, T=1, N=4, K=2, H=64, S=64, M=3, dtype=E5M2),
        Geometry(B=7, T=3, N=4, K=2, H=256, S=64, M=3),
        Geometry(B=7, T=16, N=4, K=2, H=256, S=64, M=3, dtype=E4M3),
        Geometry(B=7, T=16, N=12, K=2, H=128, S=64, M=3, dtype=E4M3),  # two consumers share pages
        Geometry(B=7, T=9, N=9, K=1, H=128, S=64, M=3, dtype=E5M2, mask="block"),
        Geometry(B=7, T=16, N=12, K=2, H=256, S=64, M=3),
        Geometry(B=7, T=16, N=12, K=2, H=256, S=64, M=3, dtype=E4M3, mask="block"),
        Geometry(B=7, T=9, N=9, K=1, H=256, S=64, M=3, dtype=E5M2, window=70),
    ],
    ids=str,
)
def test_mosaic_programs_go_on_to_other_sequences(geometry, splits, monkeypatch):
    """A device with five multiprocessors gives each CTA several sequences, some of them without keys."""
    monkeypatch.setattr(_compat, "sm_count", lambda: 5)
    lengths = [190, 0, 1, 64, 65, 130, 192]
    idle = [0, 0, 0, 0, 65, 20, 0]  # of the keys of one sequence none is valid
    call = random_call(geometry, 6, lengths, [min(geometry.T, n) for n in lengths], idle, scales=True)
    args = checked(*call.arguments, scale=None, **call.options)
    config = mosaic.default_config(args)
    has_no_room = config.is_shared and geometry.H == 256  # for results: keys are always split
    config = dataclasses.replace(config, splits=splits + has_no_room)
    for _ in range(3):
        found = np.asarray(mosaic.paged_attention(args, config=config), np.float64)
        assert error(found, brute_force(call)) <= 1e-2


@by_dtype
@pytest.mark.parametrize("mask", ["causal", "block"])
@pytest.mark.parametrize("S", [16, 64])
def test_every_border_length(attend, mask, dtype, S):
    """0, 1, page-1, page, page+1, full: one sequence each, so that no length depends on another's."""
    lengths = [0, 1, S - 1, S, S + 1, 2 * S + 1, 3 * S]
    geometry = Geometry(B=7, T=2, N=4, K=2, S=S, M=3, mask=mask, dtype=dtype)
    call = random_call(geometry, 0, lengths, [min(2, n) for n in lengths])
    assert error(call.run(attend), brute_force(call)) <= 1e-2


def test_the_oracle_is_exact_in_float32():
    geometry = Geometry(B=3, T=4, N=4, K=2, dtype=F32, window=9, mask="block")
    call = random_call(geometry, 1, [33, 16, 5], [4, 4, 2], [3, 0, 0], q_dtype=F32, scales=True)
    attend = jax.jit(paged_attention, static_argnames=("mask", "window", "implementation"))
    found = np.asarray(attend(*call.arguments, **call.options, implementation="reference"))
    assert error(found, brute_force(call)) <= 1e-5


def test_idle_slots_and_rows_that_see_nothing_are_zeros(attend):
    geometry = Geometry(B=4, T=4, N=4, K=2, window=3)
    call = random_call(geometry, 2, [0, 20, 20, 20], [0, 2, 0, 4], [0, 0, 0, 20])
    out = call.run(attend)
    assert (out[0] == 0).all()
    assert (out[1, 2:] == 0).all()
    assert (out[1, :2] != 0).any()
    assert (out[2] == 0).all()
    assert (out[3] == 0).all()


def test_permuting_the_pages_changes_nothing(attend):
    call = random_call(Geometry(B=2, T=4, N=4, K=2, dtype=E4M3), 3, [50, 23], [4, 4])
    order = np.random.default_rng(0).permutation(call.geometry.P)
    used = (call.page_table >= 0) & (call.page_table < call.geometry.P)
    moved = dataclasses.replace(
        call,
        k_pages=call.k_pages[order],
        v_pages=call.v_pages[order],
        page_table=np.where(used, np.argsort(order)[np.where(used, call.page_table, 0)], call.page_table).astype(
            np.int32
        ),
    )
    np.testing.assert_array_equal(call.run(attend), moved.run(attend))


def test_the_mask_decides_what_a_block_sees(attend):
    """A causal first row ignores the block's later tokens, a block row does not."""
    for mask, changes in (("causal", False), ("block", True)):
        call = random_call(Geometry(B=1, T=4, N=2, K=1, mask=mask), 4, [20], [4])
        before = call.run(attend)
        call.v_pages[call.page_table[0, 1], :, 3] = 5  # position 19, the block's last
        after = call.run(attend)
        assert (before[0, 0] != after[0, 0]).any() == changes


@pytest.mark.parametrize("mask", ["causal", "block"])
@by_dtype
def test_large_logits_neither_overflow_nor_vanish(attend, mask, dtype):
    geometry = Geometry(B=1, T=2, N=2, K=1, S=64, mask=mask, dtype=dtype)
    call = random_call(geometry, 5, [60], [2])
    call.q *= np.asarray(30, call.q.dtype)
    assert error(call.run(attend), brute_force(call)) <= 1e-2


def test_scale_overrides_the_default():
    call = random_call(Geometry(B=1, T=1, N=2, K=1), 6, [30], [1])
    for kwargs in (
        {"implementation": "reference"},
        {"interpret": jax.default_backend() != "gpu", "implementation": "triton"},
    ):
        default = paged_attention(*call.arguments, **call.options, **kwargs)
        same = paged_attention(*call.arguments, **call.options, **kwargs, scale=64**-0.5)
        other = paged_attention(*call.arguments, **call.options, **kwargs, scale=1.0)
        np.testing.assert_array_equal(default, same)
        assert error(other, default) > 0.1


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("block", [16, 64])
def test_triton_splits_and_blocks_do_not_change_the_result(splits, block):
    """More splits than pages too: the empty ones must not count."""
    geometry = Geometry(B=3, T=6, N=4, K=1, M=5, dtype=E4M3, mask="block", window=40)
    call = random_call(geometry, 7, [80, 9, 0], [6, 6, 0], [10, 0, 0], scales=True)
    args = checked(*call.arguments, scale=None, **call.options)
    config = triton.Config(block=block, splits=splits, num_warps=4, num_stages=2)
    out = triton.paged_attention(args, interpret=jax.default_backend() != "gpu", config=config)
    assert error(out, brute_force(call)) <= 1e-2


@pytest.mark.parametrize("behind", [0, 3])  # rows of maxima and totals that sums do not have
def test_splits_merge_where_rows_of_a_head_lie_together(behind):
    """Rows past ``q_length`` hold NaN, and become zeros; a split without keys counts nothing, and its sums are NaN."""
    B, T, K, group, H, rows, splits, keys = 2, 5, 2, 3, 64, 8, 4, 7
    call = random_call(Geometry(B=B, T=T, N=K * group, K=K, H=H), 3, [5, 5], [5, 3], scales=True)
    args = checked(*call.arguments, scale=None, **call.options)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(B, K, splits, group, rows, keys)).astype(np.float32)
    logits[:, :, -1] = -np.inf
    values = rng.normal(size=(B, K, splits, keys, H)).astype(np.float32)
    weights = np.exp2(logits - logits.max((2, 5), keepdims=True))[..., :T, :]
    wanted = np.einsum("bksgti,bksih->btkgh", weights, values) / np.einsum("bksgti->btkg", weights)[..., None]
    wanted *= call.v_scale[:, None, None]
    wanted[1, 3:] = 0
    highest = np.maximum(logits.max(-1), -1e30)
    weights = np.exp2(logits - highest[..., None])
    sums = [np.einsum("bksgri,bksih->bksgrh", weights, values), highest, weights.sum(-1)]
    sums[0][:, :, -1] = sums[0][1, :, :, :, 3:] = np.nan
    acc, *others = (jnp.asarray(array.reshape(B, K, splits, group * rows, *array.shape[5:])) for array in sums)
    others = [jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, behind))) for array in others]
    found = combine(acc, *others, args=args, head_rows=rows, interpret=not ON_GPU)
    assert error(found, wanted.reshape(B, T, K * group, H)) < 5e-3


def test_float16_pages_and_float32_queries(attend):
    call = random_call(Geometry(B=2, T=2, N=2, K=2, dtype=jnp.float16), 8, [17, 40], [2, 2], q_dtype=F32)
    out = attend(*call.arguments, **call.options)
    assert out.dtype == F32
    assert error(out, brute_force(call)) <= 1e-2


def test_float32_queries_over_fp8_pages(attend):
    geometry = Geometry(B=2, T=4, N=4, K=2, H=128, S=64, M=3, dtype=E4M3)
    call = random_call(geometry, 9, [70, 190], [4, 3], q_dtype=F32, scales=True)
    out = attend(*call.arguments, **call.options)
    assert out.dtype == F32
    assert error(out, brute_force(call)) <= 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((2, 4, 64), np.float32)}, r"q must be \[B, T, N, H\]"),
        ({"q": np.zeros((2, 4, 3, 64), np.float32)}, "multiple of their K"),
        ({"q": np.zeros((2, 4, 4, 32), np.float32)}, "must have the H of pages"),
        ({"v_pages": np.zeros((1, 2, 16, 64), np.float32)}, "must be alike"),
        ({"page_table": np.zeros((3, 4), np.int32)}, r"page_table must be \[B=2, M\]"),
        ({"kv_length": np.zeros((3,), np.int32)}, r"kv_length must be an integer array \[2\]; got int32\[3\]"),
        ({"q_length": np.zeros((2,), np.float32)}, "q_length must be an integer array"),
        ({"k_scale": np.ones((3,), np.float32)}, "k_scale must be a scalar or one number a kv head"),
        ({"mask": "full"}, "mask must be 'causal' or 'block'; got 'full'"),
        ({"window": 0}, "window must be at least 1"),
        ({"implementation": "cuda"}, "implementation must be"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    call = random_call(Geometry(B=2, T=4, N=4, K=2, dtype=F32), 0, [9, 9], [4, 4], q_dtype=F32)
    positional = ["q", "k_pages", "v_pages", "page_table", "kv_length", "q_length"]
    given = dict(zip(positional, call.arguments, strict=True)) | call.options | change
    with pytest.raises(ValueError, match=message):
        paged_attention(**given)


def test_integer_pages_are_a_type_error():
    call = random_call(Geometry(B=1, T=1, N=1, K=1, dtype=F32), 0, [9], [1])
    with pytest.raises(TypeError, match="k_pages must be a floating array; got int8"):
        paged_attention(call.q, *(np.zeros(call.k_pages.shape, np.int8),) * 2, *call.arguments[3:])


@pytest.mark.parametrize(
    ("geometry", "sentence"),
    [
        (Geometry(B=1, T=1, N=1, K=1, dtype=F32), "these are float32"),
        (Geometry(B=1, T=1, N=1, K=1, H=96), "a power of two from 16 to 256; this is 96"),
        (Geometry(B=1, T=1, N=1, K=1, S=8), "these hold 8"),
    ],
)
def test_triton_refuses_in_a_sentence_and_never_falls_back(geometry, sentence):
    call = random_call(geometry, 0, [3], [1])
    with pytest.raises(NotImplementedError, match=sentence):
        paged_attention(*call.arguments, implementation="triton", interpret=True)


def test_triton_refuses_pools_whose_offsets_overflow():
    def lower(pages: int):
        pool = jax.ShapeDtypeStruct((pages, 8, 64, 128), E4M3)
        shapes = (jax.ShapeDtypeStruct((1, 1, 8, 128), BF16), pool, pool)
        ints = (jax.ShapeDtypeStruct((1, 4), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
        jax.eval_shape(lambda *a: paged_attention(*a, implementation="triton"), *shapes, *ints)

    gib = (1 << 30) // (8 * 64 * 128)
    lower(2 * gib)
    lower(4 * gib + 1)
    with pytest.raises(NotImplementedError, match="32-bit offsets"):
        lower(3 * gib)
