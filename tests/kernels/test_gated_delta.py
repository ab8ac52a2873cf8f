import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta
from pallas_kernels.gated_delta import Kept, Weights, mosaic, reference, triton
from tests.kernels.cases import cuda_lowering
from tests.kernels.conftest import ON_GPU

P, G, TAPS, HK, HV = 6, 8, 4, 2, 6
DK, DV = (128, 128) if ON_GPU else (32, 16)  # the Mosaic kernel has one size, and no interpreter
BEFORE, R = TAPS - 1, HV // HK
C = 2 * DK + R * DV
FORMS = ("recurrence", "rows", "tf32x3", "bf16x6", "bf16x3")
LONG = pytest.mark.long
TOLD_APART = FORMS if ON_GPU else FORMS[:3]  # a CPU makes the same float32 product for the others


@functools.cache
def jitted(implementation):
    """Verify and fold of an implementation: `triton FORM`, `mosaic WIDTH` or `mosaic pairs`, which folds like these."""
    name, _, form = implementation.partition(" ")
    if form == "pairs":
        functions = [functools.partial(mosaic.verify, pairs=True), mosaic.fold]
    elif name == "mosaic" and form:
        functions = [functools.partial(f, width=int(form)) for f in (mosaic.verify, mosaic.fold)]
    elif form:
        options = {"config": triton.Config(columns=DV, form=form), "interpret": not ON_GPU}
        functions = [functools.partial(f, **options) for f in (triton.verify, triton.fold)]
    else:
        options = {"implementation": name, "interpret": name == "triton" and not ON_GPU}
        functions = [functools.partial(f, **options) for f in (gated_delta.verify, gated_delta.fold)]
    return SimpleNamespace(verify=jax.jit(functions[0]), fold=jax.jit(functions[1]))


prefill = jax.jit(gated_delta.prefill)
KERNELS = ("triton", "mosaic 64", "mosaic 128") if ON_GPU else ("triton",)
PAIRS = ["mosaic pairs"] if ON_GPU else []  # whose outputs are as good as bfloat16 needs
on_each = pytest.mark.parametrize("implementation", ["reference", *KERNELS, *PAIRS])
_OTHERS = [pytest.param(f"triton {form}", marks=() if ON_GPU else LONG) for form in TOLD_APART[1:]]
on_each_form = pytest.mark.parametrize(
    "implementation", ["reference", f"triton {FORMS[0]}", *_OTHERS, *KERNELS[1:], *PAIRS]
)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    conv, A_log, dt_bias = rng.normal(size=(HK, C, TAPS)) / 2, rng.uniform(-1, 2, HV), rng.normal(size=HV)
    return Weights(*(jnp.asarray(x, jnp.float32) for x in (conv, A_log, dt_bias)))


def prompts(*shape, seed=1, dtype=jnp.float32):
    """Random inputs and gates of tokens."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(*shape, HK, C)), dtype), jnp.asarray(rng.normal(size=(*shape, HV, 2)), dtype)


def garbage(dtype=jnp.float32):
    """What recycled rows may hold."""
    return Kept(
        jnp.full((P, HV, DK, DV), jnp.nan),
        jnp.full((P, BEFORE + G, HK, C), jnp.nan, dtype),
        jnp.full((P, G, HV, 2), jnp.nan, dtype),
    )


def ints(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def begun(inputs, gates, length, row=2, kept=None):
    """What is kept once the first tokens of a sequence are prefilled."""
    kept = garbage(inputs.dtype) if kept is None else kept
    call = (ints(row), jnp.array([True]), inputs[None], gates[None], ints(length))
    return prefill(kept, weights(), *call)[1]


def by_hand(inputs, gates, w, dk=DK):
    """Outputs and states after each token of one sequence, in float64, head by head and token by token."""
    inputs, gates, conv, A_log, dt_bias = (np.asarray(x, np.float64) for x in (inputs, gates, *w))
    heads, group = len(A_log), len(A_log) // len(conv)
    dv = (conv.shape[1] - 2 * dk) // group
    outputs, states = np.zeros((len(inputs), heads, dv)), np.zeros((len(inputs) + 1, heads, dk, dv))
    for t in range(len(inputs)):
        mixed = sum(inputs[t - j] * conv[..., TAPS - 1 - j] for j in range(min(t, BEFORE) + 1))
        mixed = mixed / (1 + np.exp(-mixed))
        for h in range(heads):
            q, k, *values = np.split(mixed[h // group], [dk] + [2 * dk + i * dv for i in range(group)])
            q, k = (x / np.sqrt((x**2).sum() + 1e-6) for x in (q, k))
            b, a = gates[t, h]
            S = states[t, h] * np.exp(-np.exp(A_log[h]) * np.log1p(np.exp(a + dt_bias[h])))
            d = 1 / (1 + np.exp(-b)) * (values[h % group] - S.T @ k)
            states[t + 1, h] = S + np.outer(k, d)
            outputs[t, h] = states[t + 1, h].T @ q / np.sqrt(dk)
    return outputs, states


CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.mark.parametrize("T", [1, 4, G + 2, 64, 130, *(pytest.param(T, marks=LONG) for T in (2, 3, G, 63, 65))])
def test_prefill_is_the_recurrence(T):
    inputs, gates = prompts(T)
    outputs, kept = prefill(garbage(), weights(), ints(3), jnp.array([True]), inputs[None], gates[None], ints(T))
    expected, states = by_hand(inputs, gates, weights())
    np.testing.assert_allclose(outputs[0], expected, **CLOSE)
    np.testing.assert_allclose(kept.state[3], states[T], **CLOSE)
    tail = np.concatenate([np.zeros((BEFORE, HK, C)), inputs])[T : T + BEFORE]
    np.testing.assert_array_equal(kept.inputs[3, :BEFORE], tail)


@on_each_form
@pytest.mark.parametrize(("prompt", "length"), [(5, 1), (5, 2), (5, 5), (5, G), (1, 3), (2, 4)])
def test_blocks_behind_a_prompt_are_the_recurrence(implementation, length, prompt):
    """A block is verified, its first tokens are accepted, and the next block goes on behind them."""
    inputs, gates = prompts(prompt + 2 * G)
    kept = begun(inputs[:5], gates[:5], prompt)
    expected, states = by_hand(inputs, gates, weights())
    accepted = min(length, 3)
    coarse = {"atol": 2e-4} if ON_GPU and implementation.endswith(("bf16x3", "pairs")) else None
    for start, count in ((prompt, 0), (prompt + accepted, accepted)):
        block = slice(start, start + G)
        call = ints(2), ints(count), inputs[None, block], gates[None, block], ints(length)
        outputs, kept = jitted(implementation).verify(kept, weights(), *call)
        np.testing.assert_allclose(outputs[0, :length], expected[start : start + length], **(coarse or CLOSE))
        np.testing.assert_allclose(kept.state[2], states[start], **CLOSE)


def cuts(total, rng):
    """Lengths of blocks, and how many tokens of each are accepted, that advance by `total` tokens."""
    blocks = []
    while total:
        length = int(rng.integers(1, G + 1))
        blocks.append((length, int(rng.integers(1, min(length, total) + 1))))
        total -= blocks[-1][1]
    return blocks


@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        pytest.param(*case, marks=() if case in ((0, jnp.float32), (1, jnp.bfloat16)) else LONG)
        for case in itertools.product(range(4), (jnp.float32, jnp.bfloat16))
    ],
)
@pytest.mark.parametrize("implementation", KERNELS if ON_GPU else ["reference"])
def test_states_and_outputs_are_bit_for_bit_those_of_decoding(implementation, seed, dtype):
    """Whatever the lengths of blocks, how they are padded, how much is accepted, and who commits it.

    XLA sums differently for other shapes on a GPU, so there it is the kernels that keep this promise.
    """
    verify, fold = jitted(implementation).__dict__.values()
    rng, total = np.random.default_rng(seed), 20
    inputs, gates = prompts(6 + total + 2 * G, dtype=dtype)
    start = begun(inputs[:6], gates[:6], 6)
    decoded, alone, states = start, [], []
    for t in range(6, 6 + total + G):
        token = (inputs[None, t : t + 1], gates[None, t : t + 1])
        output, decoded = verify(decoded, weights(), ints(2), ints(int(t > 6)), *token, ints(1))
        alone.append(output[0, 0])
        states.append((decoded.state[2], decoded.inputs[2, :BEFORE]))
    kept, count, at = start, 0, 0
    for length, accepted in cuts(total, rng):
        width = int(rng.integers(length, G + 1))
        block = [jnp.stack([x[6 + at : 6 + at + width]] * 2) for x in (inputs, gates)]
        outputs, kept = verify(kept, weights(), ints(-1, 2), ints(5, count), *block, ints(1, length))
        np.testing.assert_array_equal(outputs[1, :length], jnp.stack(alone[at : at + length]))
        at, count = at + accepted, accepted
        folded = fold(kept, weights(), ints(2), ints(count), ints(4))
        np.testing.assert_array_equal(folded.state[4], states[at][0])
        np.testing.assert_array_equal(folded.inputs[4, :BEFORE], states[at][1])
    kept = fold(kept, weights(), ints(2), ints(count), ints(2))
    np.testing.assert_array_equal(kept.state[2], states[total][0])


@on_each
def test_padding_changes_nothing(implementation):
    """Rows outside the pool, blocks of no tokens, and NaN behind the tokens of a block."""
    inputs, gates = prompts(4, G)
    kept = begun(inputs[0], gates[0], G)
    call = (ints(-1, P, 2, -7), ints(3, 3, 0, 3), inputs.at[2, 5:].set(jnp.nan), gates.at[2, 5:].set(jnp.nan))
    outputs, after = jitted(implementation).verify(kept, weights(), *call, ints(G, G, 5, 0))
    assert np.isfinite(outputs[2, :5]).all()
    others = jnp.array([0, 1, 3, 4, 5])
    for old, new in zip(kept, after, strict=True):
        np.testing.assert_array_equal(new[others], old[others])
    np.testing.assert_array_equal(after.state[2], kept.state[2])
    again = jitted(implementation).fold(after, weights(), ints(2, -1, 2), ints(5, 3, 5), ints(3, P, -1))
    assert np.isfinite(again.state[3]).all()
    is_first = jnp.array([True, False, True, False])
    _, prefilled = prefill(kept, weights(), ints(-1, P, 2, 2), is_first, inputs, gates, ints(G, G, 0, 0))
    for old, new in zip(kept, prefilled, strict=True):
        np.testing.assert_array_equal(new, old)


@on_each
def test_a_block_becomes_the_tape(implementation):
    inputs, gates = prompts(1, 5)
    _, kept = jitted(implementation).verify(begun(*prompts(7), 7), weights(), ints(2), ints(0), inputs, gates, ints(5))
    np.testing.assert_array_equal(kept.inputs[2, BEFORE : BEFORE + 5], inputs[0])
    np.testing.assert_array_equal(kept.gates[2, :5], gates[0])


@pytest.mark.parametrize(
    "pieces", [(1, 1, 98), (64, 36), (3, 0, 97), *(pytest.param(p, marks=LONG) for p in ((2, 98), (70, 30), (37, 63)))]
)
def test_prefill_in_pieces_is_prefill_at_once(pieces):
    inputs, gates = prompts(sum(pieces))
    whole = prefill(garbage(), weights(), ints(2), jnp.array([True]), inputs[None], gates[None], ints(len(inputs)))
    kept, parts, start = garbage(), [], 0
    for length in pieces:
        # Two sequences, the other of which is padding, and NaN behind the tokens.
        piece = [
            jnp.full((2, 100, *x.shape[1:]), jnp.nan).at[1, :length].set(x[start : start + length])
            for x in (inputs, gates)
        ]
        outputs, kept = prefill(kept, weights(), ints(-1, 2), jnp.array([True, start == 0]), *piece, ints(9, length))
        parts.append(outputs[1, :length])
        start += length
    np.testing.assert_allclose(jnp.concatenate(parts), whole[0][0], **CLOSE)
    np.testing.assert_allclose(kept.state[2], whole[1].state[2], **CLOSE)
    np.testing.assert_array_equal(kept.inputs[2, :BEFORE], whole[1].inputs[2, :BEFORE])


@on_each
def test_a_snapshot_leaves_its_source(implementation):
    inputs, gates = prompts(1, G)
    _, kept = jitted(implementation).verify(begun(*prompts(7), 7), weights(), ints(2), ints(0), inputs, gates, ints(G))
    after = jitted(implementation).fold(kept, weights(), ints(2), ints(4), ints(5))
    others = jnp.array([0, 1, 2, 3, 4])
    for old, new in zip(kept, after, strict=True):
        np.testing.assert_array_equal(new[others], old[others])
    assert np.abs(after.state[5] - kept.state[2]).max() > 1e-3
    # The snapshot goes on as its source does.
    block = prompts(1, 3, seed=5)
    outputs, _ = jitted(implementation).verify(after, weights(), ints(2), ints(4), *block, ints(3))
    restored, _ = jitted(implementation).verify(after, weights(), ints(5), ints(0), *block, ints(3))
    np.testing.assert_array_equal(restored, outputs)


def test_a_strong_decay_overflows_nothing():
    """exp(-G) of a whole chunk would be infinite here."""
    inputs, gates = prompts(130)
    w = weights()._replace(A_log=jnp.full(HV, 3.0))
    call = (ints(2), jnp.array([True]), inputs[None], gates[None], ints(130))
    outputs, kept = prefill(garbage(), w, *call)
    expected, states = by_hand(inputs, gates, w)
    np.testing.assert_allclose(outputs[0], expected, atol=1e-5)
    np.testing.assert_allclose(kept.state[2], states[-1], atol=1e-5)


def test_programs_on_cpus_wait_for_no_threads():
    """A custom call of LAPACK shares its batch out among the threads that programs run in, and waits for them."""
    inputs, gates = prompts(1, 130)
    call = (garbage(), weights(), ints(2), jnp.array([True]), inputs, gates, ints(130))
    text = jax.jit(reference.prefill).trace(*call).lower(lowering_platforms=("cpu",)).as_text()
    assert "custom_call" not in text


def test_prefill_from_zeros_has_gradients():
    inputs, gates = prompts(2, 70)
    length = ints(70, 5)
    is_token = (np.arange(70) < np.asarray(length)[:, None])[..., None, None]

    def loss(inputs, gates, w):
        call = (ints(0, 1), jnp.array([True, True]), inputs, gates, length)
        outputs, kept = gated_delta.prefill(garbage(), w, *call, implementation="reference")
        return jnp.where(is_token, outputs, 0).sum() + jnp.square(kept.state[:2]).sum()

    arguments = inputs.at[1, 5:].set(jnp.nan), gates.at[1, 5:].set(jnp.nan), weights()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    clean = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0, x), arguments)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), clean)
    step = 1e-3
    ahead, behind = (
        jax.jit(loss)(*jax.tree.map(lambda x, d, sign=sign: x + sign * step * d, clean, direction)) for sign in (1, -1)
    )
    slope = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=2e-2)


def test_norms_have_their_epsilon_on_the_sum():
    small = jnp.full((1, 1, HK, C), 1e-4)
    q, k, _ = reference.split_heads(small, DK, DV)
    expected = 1e-4 / np.sqrt(DK * 1e-8 + 1e-6)
    np.testing.assert_allclose(k, expected, rtol=1e-5)
    np.testing.assert_allclose(q, expected / np.sqrt(DK), rtol=1e-5)


def test_shapes_that_do_not_belong_together():
    inputs, gates = prompts(1, G + 1)
    one = functools.partial(gated_delta.verify, garbage(), weights(), ints(0), ints(0))
    with pytest.raises(ValueError, match="a block must fit the tape of 8 tokens; got 9"):
        one(inputs, gates, ints(1))
    with pytest.raises(ValueError, match=f"conv must be .* got {re.escape(str(list(weights().conv.shape)))}"):
        gated_delta.fold(garbage()._replace(state=jnp.zeros((P, HV, DK, 2 * DV))), weights(), ints(0), ints(0), ints(1))
    half = garbage()._replace(state=jnp.zeros((P, HV, DK, DV), jnp.bfloat16))
    with pytest.raises(ValueError, match="states must be float32"):
        gated_delta.fold(half, weights(), ints(0), ints(0), ints(1))


def kept_shapes(dtype=jnp.bfloat16, tape=16, key_dim=128):
    """One layer of Qwen3.6-27B, four sequences."""
    struct, channels = jax.ShapeDtypeStruct, 2 * key_dim + 3 * 128
    kept = Kept(
        struct((16, 48, key_dim, 128), jnp.float32),
        struct((16, 3 + tape, 16, channels), dtype),
        struct((16, tape, 48, 2), dtype),
    )
    return kept, Weights(struct((16, channels, 4), dtype), *(struct((48,), jnp.float32),) * 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [16, *(pytest.param(T, marks=LONG) for T in (1, 5))])
def test_verify_and_fold_lower_for_cuda(form, T):
    struct, numbers = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((4,), jnp.int32)
    kept, w = kept_shapes()
    block = struct((4, T, 16, 640), jnp.bfloat16), struct((4, T, 48, 2), jnp.bfloat16)
    config = triton.Config(form=form)
    verify, fold = (functools.partial(f, config=config) for f in (triton.verify, triton.fold))
    assert cuda_lowering(verify, kept, w, numbers, numbers, *block, numbers).count("xla.gpu.triton") == 2
    assert cuda_lowering(fold, kept, w, numbers, numbers, numbers).count("xla.gpu.triton") == 2


@pytest.mark.parametrize(
    ("B", "T", "tape"), [(9, 16, 16), (4, 11, 16), (4, 1, 1), *(pytest.param(4, T, 16, marks=LONG) for T in (1, 16))]
)
def test_mosaic_lowers_for_cuda(B, T, tape):
    """Two kernels, of which Triton has the first one where tapes are of one token."""
    struct, numbers = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((B,), jnp.int32)
    kept, w = kept_shapes(tape=tape)
    kernels = (1, 1) if tape == 1 else (0, 2)
    block = struct((B, T, 16, 640), jnp.bfloat16), struct((B, T, 48, 2), jnp.bfloat16)
    for pairs in (False, True)[:tape]:
        verify = functools.partial(mosaic.verify, pairs=pairs)
        verified = cuda_lowering(verify, kept, w, numbers, numbers, *block, numbers)
        assert (verified.count("xla.gpu.triton"), verified.count("@mosaic_gpu_v2")) == kernels
        results = [line.rpartition(" -> ")[2] for line in verified.splitlines() if "@mosaic_gpu_v2" in line]
        assert not any("tensor<48xf32>" in types for types in results)  # XLA would copy weights that count as written
    folded = cuda_lowering(mosaic.fold, kept, w, numbers, numbers, numbers)
    assert (folded.count("xla.gpu.triton"), folded.count("@mosaic_gpu_v2")) == kernels


def test_what_mosaic_refuses():
    assert mosaic.refusal(*kept_shapes()) is None
    assert mosaic.refusal(*kept_shapes(key_dim=64)) == "The Mosaic kernel needs heads of 128; these are (64, 128)."
    assert mosaic.refusal(*kept_shapes(tape=17)).endswith("tapes of at most 16 tokens; this has 17.")


def test_what_triton_refuses():
    assert triton.refusal(*kept_shapes()) is None
    assert triton.refusal(*kept_shapes(key_dim=96)).endswith("key heads of a power of two from 16 on; this is 96.")
    assert triton.refusal(*kept_shapes(tape=65)).endswith("tapes of at most 64 tokens; this has 65.")
    with pytest.raises(NotImplementedError, match="this is 96"):
        jax.eval_shape(triton.fold, *kept_shapes(key_dim=96), *(jax.ShapeDtypeStruct((4,), jnp.int32),) * 3)
