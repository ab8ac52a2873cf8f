import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import triton
from pallas_kernels.gated_delta import ungrouped as gated_delta
from tests.kernels.cases import cuda_lowering

B, HK, HV, DK, DV = 2, 2, 6, 16, 8


def tokens(T: int, seed: int = 0, dtype=np.float32):
    """Random q, k, v, g, beta as `split_heads` and `gates` give them, and a state."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(B, T, 2 * HK * DK + HV * DV)).astype(dtype)
    q, k, v = gated_delta.split_heads(mixed, key_heads=HK, key_dim=DK, value_dim=DV)
    a, b = rng.normal(size=(2, B, T, HV)).astype(dtype)
    g, beta = gated_delta.gates(
        a, b, rng.uniform(-1, 2, HV).astype(dtype), rng.normal(size=HV).astype(dtype), np.ones((B, T), bool)
    )
    return (q, k, v, g, beta), rng.normal(size=(B, HV, DK, DV)).astype(dtype)


def by_hand(inputs, state):
    """The recurrence in float64, one head and token at a time."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    states, outputs = np.asarray(state, np.float64).copy(), np.zeros(v.shape)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            S = states[b, h]
            for t in range(q.shape[1]):
                S = np.exp(g[b, t, h]) * S
                d = beta[b, t, h] * (v[b, t, h] - S.T @ k[b, t, h])
                S = S + np.outer(k[b, t, h], d)
                outputs[b, t, h] = S.T @ q[b, t, h]
            states[b, h] = S
    return outputs, states


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("form", [gated_delta.recur, gated_delta.chunked])
def test_both_forms_are_the_recurrence(form, T):
    inputs, state = tokens(T)
    outputs, after = jax.jit(form)(*inputs, state)
    expected, expected_state = by_hand(inputs, state)
    np.testing.assert_allclose(outputs, expected, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(after, expected_state, atol=2e-5, rtol=1e-5)


def test_a_strong_decay_overflows_nothing():
    """exp(-G) of a whole chunk would be infinite here."""
    (q, k, v, _, beta), state = tokens(130)
    g = jnp.full((B, 130, HV), -20.0)
    outputs, after = gated_delta.chunked(q, k, v, g, beta, state)
    expected, expected_state = by_hand((q, k, v, g, beta), state)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    np.testing.assert_allclose(after, expected_state, atol=1e-5)


@pytest.mark.parametrize("form", [gated_delta.recur, gated_delta.chunked])
def test_padding_changes_nothing(form):
    """Padding has finite garbage in q, k, v, a and b; its gates alone are cleared."""
    inputs, state = tokens(40)
    rng = np.random.default_rng(1)
    is_token = np.arange(40)[None] < np.array([[5], [33]])
    a, b = rng.normal(size=(2, B, 40, HV)).astype(np.float32)
    g, beta = gated_delta.gates(a, b, np.zeros(HV, np.float32), np.ones(HV, np.float32), is_token)
    q, k, v = inputs[:3]
    _, after = form(q, k, v, g, beta, state)
    for row, length in enumerate([5, 33]):
        part = [x[row : row + 1, :length] for x in (q, k, v, g, beta)]
        _, expected = form(*part, state[row : row + 1])
        np.testing.assert_allclose(after[row], expected[0], atol=1e-6)


def test_committing_a_prefix_is_bit_for_bit_what_decoding_gives():
    """Rows behind the accepted ones are masked, and the state is exactly that of the accepted tokens run one by one."""
    (q, k, v, g, beta), state = tokens(16)
    accepted = 7
    kept = (np.arange(16) < accepted)[None, :, None]
    commit = jax.jit(gated_delta.recur)
    _, folded = commit(q, k, v, jnp.where(kept, g, 0), jnp.where(kept, beta, 0), state)
    for t in range(accepted):
        _, state = commit(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state)
    np.testing.assert_array_equal(folded, state)


def test_outputs_of_a_block_are_bit_for_bit_those_of_decoding():
    (q, k, v, g, beta), state = tokens(16)
    run = jax.jit(gated_delta.recur)
    outputs, _ = run(q, k, v, g, beta, state)
    for t in range(16):
        output, state = run(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state)
        np.testing.assert_array_equal(output[:, 0], outputs[:, t])


def test_convolution_and_its_tail():
    """A sequence in two parts, of which only some tokens are kept, is the sequence of the kept tokens."""
    rng = np.random.default_rng(2)
    C = 10
    sequence, weight = rng.normal(size=(B, 20, C)).astype(np.float32), rng.normal(size=(C, 4)).astype(np.float32)
    zeros = np.zeros((B, 3, C), np.float32)
    whole = gated_delta.convolve(sequence, zeros, weight)
    padded = np.pad(sequence, [(0, 0), (3, 0), (0, 0)]).astype(np.float64)
    mixed = sum(padded[:, i : i + 20] * weight[:, i] for i in range(4))
    np.testing.assert_allclose(whole, mixed / (1 + np.exp(-mixed)), atol=1e-5)
    count = np.array([0, 5])
    tail = gated_delta.tail_after(sequence[:, :8], zeros, count)
    for row in range(B):
        rest = gated_delta.convolve(sequence[row : row + 1, count[row] : 20], tail[row : row + 1], weight)
        np.testing.assert_array_equal(rest[0], whole[row, count[row] :])


def test_norms_have_their_epsilon_on_the_sum():
    small = np.full((1, 1, 2 * DK + DV), 1e-4, np.float32)
    q, k, _ = gated_delta.split_heads(small, key_heads=1, key_dim=DK, value_dim=DV)
    expected = 1e-4 / np.sqrt(DK * 1e-8 + 1e-6)
    np.testing.assert_allclose(k, expected, rtol=1e-5)
    np.testing.assert_allclose(q, expected / np.sqrt(DK), rtol=1e-5)


def replay_case(T: int, tape: int, dtype=np.float32, seed: int = 3):
    """States of 5 slots; three sequences, one of them padding."""
    rng = np.random.default_rng(seed)
    dk, dv = 16, 32
    C = 2 * HK * dk + HV * dv

    def rows(length):
        g, beta = gated_delta.gates(
            *rng.normal(size=(2, 3, length, HV)).astype(np.float32),
            np.zeros(HV),
            np.ones(HV),
            np.ones((3, length), bool),
        )
        return gated_delta.Rows(jnp.asarray(rng.normal(size=(3, length, C)), dtype), g, beta)

    state = jnp.asarray(rng.normal(size=(5, HV, dk, dv)), jnp.float32)
    return state, jnp.array([3, 5, 0]), rows(tape), jnp.array([0, 2, min(4, tape)]), rows(T)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("T", "tape"), [(1, 1), (1, 8), (8, 8), (5, 3)])
def test_replay_on_triton(T, tape, dtype):
    case = replay_case(T, tape, dtype)
    outputs, after = jax.jit(gated_delta.replay)(*case)
    kernel = functools.partial(triton.replay, interpret=jax.default_backend() != "gpu")
    found, found_after = kernel(*case)
    np.testing.assert_allclose(found[jnp.array([0, 2])], outputs[jnp.array([0, 2])], atol=1e-5)
    np.testing.assert_allclose(found_after, after, atol=1e-5)
    np.testing.assert_array_equal(found_after[jnp.array([1, 2, 3, 4])], case[0][jnp.array([1, 2, 3, 4])])


def test_replay_lowers_for_cuda():
    struct = jax.ShapeDtypeStruct

    def rows(T):
        gate = struct((4, T, 48), jnp.float32)
        return gated_delta.Rows(struct((4, T, 10240), jnp.bfloat16), gate, gate)

    number = struct((4,), jnp.int32)
    text = cuda_lowering(triton.replay, struct((16, 48, 128, 128), jnp.float32), number, rows(16), number, rows(16))
    assert "triton" in text
