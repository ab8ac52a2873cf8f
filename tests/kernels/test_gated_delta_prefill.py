"""Prefill of Gated DeltaNet by the Triton kernels, against the recurrence token by token in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import gated_delta
from pallas_kernels.gated_delta import Kept, Weights, chunks, prompts, reference
from tests.kernels.cases import cuda_lowering, mesh_of
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_gated_delta import CLOSE, by_hand, ints, kept_shapes

P, G, TAPS, DK, DV, T = 9, 4, 4, 32, 32, 130
BEFORE = TAPS - 1
ROWS = ints(8, 0, 3, -1, 1, 5, 2, 6, P)
BEGUN = ints(1, 63, 65, 9, 64, 130, 2, 0, 9)  # tokens of the first call
MORE = ints(130, 64, 1, 9, 65, 63, 1, 5, 9)  # of the second; one sequence begins there
CASES = {"float32": (2, 3), "bfloat16": (1, 1), "float16": (2, 2)}  # HK and HV / HK
# "bf16x2" rounds queries, keys and scores to 8 bits, 2^-9 of each; "bf16" rounds five factors of each product. What
# "tf32x3" does in float32 is rounded to float16 only in the outputs.
ERRORS = {"bf16x2": 2**-7, "bf16": 2**-6, "tf32x3": 2**-10}
LONG = pytest.mark.long
FLOAT16 = pytest.param("float16", "tf32x3", marks=LONG)


@functools.cache
def jitted(form, columns=16):
    """The kernels, in programs of half the columns of a head."""
    config = chunks.Config(form, columns=columns)
    return jax.jit(functools.partial(prompts.prefill, config=config, interpret=not ON_GPU))


jitted_reference = jax.jit(reference.prefill)


def weights(HK, group, seed=0, rate=(-2, 1)):
    rng = np.random.default_rng(seed)
    conv = rng.normal(size=(HK, 2 * DK + group * DV, TAPS)) / 2
    return Weights(
        *(jnp.asarray(x, jnp.float32) for x in (conv, rng.uniform(*rate, HK * group), rng.normal(size=HK * group)))
    )


def tokens(HK, group, length, dtype, seed=1):
    """Random inputs and gates, with NaN behind the tokens of each sequence."""
    rng = np.random.default_rng(seed)
    channels, exists = 2 * DK + group * DV, np.arange(T)[:, None, None] < np.asarray(length)[:, None, None, None]
    drawn = (rng.normal(size=(len(length), T, *shape)) for shape in ((HK, channels), (HK * group, 2)))
    return [jnp.asarray(np.where(exists, x, np.nan), dtype) for x in drawn]


def garbage(HK, group, dtype):
    """What recycled rows may hold."""
    nan = functools.partial(jnp.full, fill_value=jnp.nan)
    inputs = nan((P, BEFORE + G, HK, 2 * DK + group * DV), dtype=dtype)
    return Kept(nan((P, HK * group, DK, DV), dtype=jnp.float32), inputs, nan((P, G, HK * group, 2), dtype=dtype))


@functools.cache
def run(dtype, prefill, rate=(-2, 1)):
    """Two calls in a row, the second going on behind the first: weights, calls, and what comes of them."""
    HK, group = CASES[dtype]
    w, kept, outputs = weights(HK, group, rate=rate), garbage(HK, group, dtype), []
    calls = [(length, tokens(HK, group, length, dtype, seed)) for seed, length in enumerate((BEGUN, MORE))]
    for (length, arrays), is_first in zip(calls, (BEGUN >= 0, BEGUN == 0), strict=True):
        output, kept = prefill(kept, w, ROWS, is_first, *arrays, length)
        outputs.append(output)
    return w, calls, outputs, kept


def sequences(dtype, prefill, rate=(-2, 1)):
    """Weights, row, inputs, gates, outputs and last state of each sequence."""
    w, calls, outputs, kept = run(dtype, prefill, rate)
    for b, (row, *counts) in enumerate(zip(ROWS, BEGUN, MORE, strict=True)):
        if 0 <= row < P:
            arrays = [(*arrays, output) for (_, arrays), output in zip(calls, outputs, strict=True)]
            parts = [[x[b, :n] for x in three] for n, three in zip(counts, arrays, strict=True)]
            yield w, row, *(np.concatenate(x) for x in zip(*parts, strict=True)), kept.state[row]


def error(ours, theirs):
    """Norm of the difference over the norm."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("rate", [(-2, 1), (3.9, 4.5), (-12, -9)], ids=["some", "strong", "none"])
def test_it_is_the_recurrence(rate):
    """Sequences of 0 to 130 tokens that begin or go on, in rows that held NaN.

    Decays of 50 and more a token, where exp(-G) overflows, and of nearly nothing, where everything is kept.
    """
    for w, _, inputs, gates, outputs, state in sequences("float32", jitted("bf16x6"), rate):
        expected, states = by_hand(inputs, gates, w, DK)
        np.testing.assert_allclose(outputs, expected, **CLOSE)
        np.testing.assert_allclose(state, states[-1], **CLOSE)


@pytest.mark.parametrize(
    ("dtype", "form"), [("bfloat16", "bf16x2"), pytest.param("bfloat16", "bf16", marks=LONG), FLOAT16]
)
def test_16_bits_have_the_errors_of_their_roundings(dtype, form):
    ways = [[*zip(*sequences(dtype, prefill), strict=True)][-2:] for prefill in (jitted(form), jitted_reference)]
    for ours, theirs in zip(*ways, strict=True):  # outputs, then states
        one, other = (np.concatenate([np.ravel(x) for x in arrays]) for arrays in (ours, theirs))
        assert error(one, other) < ERRORS[form]


@pytest.mark.parametrize(("dtype", "form"), [("float32", "bf16x6"), ("bfloat16", "bf16x2"), FLOAT16])
def test_nothing_else_is_written(dtype, form):
    """The last inputs are kept bit for bit, rows that no sequence has stay, and padding gets zeros."""
    _, calls, outputs, kept = run(dtype, jitted(form))
    for _, row, inputs, *_ in sequences(dtype, jitted(form)):
        expected = np.concatenate([np.zeros_like(inputs, shape=(BEFORE, *inputs.shape[1:])), inputs])[-BEFORE:]
        np.testing.assert_array_equal(kept.inputs[row, :BEFORE], expected)
    assert np.isnan(kept.inputs[:, BEFORE:]).all()
    assert np.isnan(kept.gates).all()
    for row in {*range(P)} - {*ROWS.tolist()}:
        assert np.isnan(kept.state[row]).all()
    for (length, _), output in zip(calls, outputs, strict=True):
        for b, n in enumerate(length):
            assert (output[b, n if 0 <= ROWS[b] < P else 0 :] == 0).all()


def test_a_sequence_without_tokens_changes_nothing():
    HK, group = CASES["float32"]
    kept = jax.tree.map(lambda x: jnp.zeros_like(x) + 3, garbage(HK, group, "float32"))
    none = jnp.zeros_like(ROWS)
    is_first = jnp.arange(len(ROWS)) % 2 == 0
    _, after = jitted("bf16x6")(kept, weights(HK, group), ROWS, is_first, *tokens(HK, group, none, "float32"), none)
    for old, new in zip(kept, after, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("solved", [1, 8, 16, 64])
def test_the_inverse_of_keys_that_repeat(solved):
    """One key in every token without decay: powers of this system reach 10^18, its inverse is 1 and -1."""
    system = jnp.tril(jnp.ones((64, 64)), -1)
    exact = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
    np.testing.assert_allclose(chunks._inverse(system, solved, exact), np.eye(64) - np.eye(64, k=-1), atol=1e-6)
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(64, 8)) + 1
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    system = np.tril(keys @ keys.T, -1)
    inverse = chunks._inverse(jnp.asarray(system, jnp.float32), solved, exact)
    np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(64) + system), atol=1e-5)


def test_two_terms_are_nearly_float32():
    held, other = (jnp.asarray(np.random.default_rng(i).normal(size=(64, 64))) for i in range(2))
    held = held.astype(jnp.bfloat16)
    exact = np.asarray(held, np.float64) @ np.asarray(other, np.float64)
    coarse, fine = (error(chunks.product_of(form, True)(held, other), exact) for form in ("bf16", "bf16x2"))
    assert fine < 2**-16 < 2**-10 < coarse


def layer(dtype=jnp.bfloat16, B=4, T=1000):
    """Arguments of a call of Qwen3.6-27B's layer."""
    struct = jax.ShapeDtypeStruct
    block = struct((B, T, 16, 640), dtype), struct((B, T, 48, 2), dtype)
    return *kept_shapes(dtype), struct((B,), jnp.int32), struct((B,), bool), *block, struct((B,), jnp.int32)


@pytest.mark.parametrize("form", ["bf16x6", "tf32x3", "bf16x2", "bf16"])
def test_it_lowers_for_cuda(form):
    """As for every GPU from sm_80 on: what is lowered here does not depend on which."""
    f = functools.partial(prompts.prefill, config=chunks.Config(form))
    text = cuda_lowering(f, *layer())
    assert text.count("xla.gpu.triton") == 3
    assert text.count("output_operand_alias<") == 2  # states and inputs stay where they are
    default = {jnp.float32: "bf16x6", jnp.bfloat16: "bf16x2", jnp.float16: "tf32x3"}
    assert {dtype: prompts.default_config(dtype).form for dtype in default} == default


def test_sharded_prefill_knows_what_varies():
    heads, rows = Spec("tp"), Spec(None, None, "tp")
    kept, w = Kept(Spec(None, "tp"), rows, rows), Weights(heads, heads, heads)
    sharded = jax.shard_map(
        functools.partial(gated_delta.prefill, implementation="triton"),
        mesh=mesh_of(4),
        in_specs=(kept, w, Spec(), Spec(), rows, rows, Spec()),
        out_specs=(rows, kept),
    )
    assert "xla.gpu.triton" in jax.jit(sharded).trace(*layer()).lower(lowering_platforms=("cuda",)).as_text()


def test_its_workspace_is_of_the_tokens_of_a_call():
    """Not of rows, which hold what came before, and the same for one sequence as for several."""
    kept, w, *_ = layer()
    sizes = [
        sum(x.size * x.dtype.itemsize for x in chunks.shapes_of(kept, w, B, tokens, "bf16x2"))
        for B, tokens in ((1, 8192), (4, 2048), (1, 4096), (1, 8129))
    ]
    assert sizes[0] == sizes[1] == 2 * sizes[2] == sizes[3] <= 8192 * 45_000


def test_what_it_refuses():
    kept, w, *rest = layer()
    assert prompts.refusal(kept, w) is None
    wide = kept._replace(state=jax.ShapeDtypeStruct((16, 48, 256, 128), jnp.float32))
    sentence = "The Triton kernels of prompts need key heads of a power of two from 16 to 128; this is 256."
    assert prompts.refusal(wide, w) == sentence
    with pytest.raises(NotImplementedError, match="this is 256"):
        jax.eval_shape(prompts.prefill, wide, w, *rest)
    for name, chosen in (("triton", True), ("reference", False)):
        run = functools.partial(gated_delta.prefill, implementation=name, interpret=name == "triton")
        assert ("gated_delta_prefill" in str(jax.make_jaxpr(run)(*layer()))) == chosen
