"""Blocks of Gated DeltaNet by pairs of tokens; what the threads of a GPU do, by threads that are elements of arrays."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import quads
from pallas_kernels.gated_delta.columns import COLUMNS, SIZE
from pallas_kernels.gated_delta.first import first
from pallas_kernels.gated_delta.prepare import Block
from pallas_kernels.gated_delta.tile import TOKENS
from tests.kernels.cases import F32
from tests.kernels.test_gated_delta import (
    BEFORE,
    CLOSE,
    HV,
    G,
    R,
    begun,
    by_hand,
    ints,
    jitted,
    kept_shapes,
    prompts,
    weights,
)

THREADS = np.arange(128)


class Number(np.ndarray):
    """A number of each thread, which has a type as MLIR's values have."""

    type = "f32"


def of_threads(numbers):
    return np.asarray(numbers, np.float64).view(Number)


def stand_ins(monkeypatch):
    """Numpy in place of the instructions that `quads` writes down."""
    arith = SimpleNamespace(
        addi=np.add, muli=np.multiply, addf=np.add, mulf=np.multiply, negf=np.negative, minui=np.minimum, remui=np.mod,
        select=lambda chosen, new, old: of_threads(np.where(chosen, new, old)),
        cmpi=lambda compare, left, right: compare(left, right),
    )  # fmt: skip
    by_columns = SimpleNamespace(
        thread=lambda: THREADS, index_of=int, divided=np.floor_divide,
        numbers_of=lambda ref, first, run, step, size: (
            of_threads(ref.reshape(-1)[first + at + i]) for at in range(0, size, step) for i in range(run)
        ),
    )  # fmt: skip
    monkeypatch.setattr(quads, "arith", arith)
    monkeypatch.setattr(quads, "by_columns", by_columns)
    monkeypatch.setattr(quads, "math", SimpleNamespace(fma=lambda a, b, c: a * b + c))
    monkeypatch.setattr(quads, "memref", SimpleNamespace(load=lambda ref, at: of_threads(ref[tuple(at)])))
    monkeypatch.setattr(
        quads, "vector", SimpleNamespace(extract=lambda v, *, static_position, **_: v[static_position[0]])
    )
    monkeypatch.setattr(quads, "ir", SimpleNamespace(F32Type=SimpleNamespace(get=lambda: "f32")))
    monkeypatch.setattr(quads, "_of_quad", lambda v, place: of_threads(v.reshape(-1, 4)[:, place].repeat(4)))
    monkeypatch.setattr(quads, "_GREATER", np.greater)
    monkeypatch.setattr(quads, "_GREATER_OR_EQUAL", np.greater_equal)


def registers_of(products):
    """Those of an array [64, 32] in wgmma's layout: of 8 tokens, two rows 8 apart, pairs of tokens."""
    row, place = THREADS // 32 * 16 + THREADS % 32 // 4, THREADS % 4
    return [
        [of_threads(products[row + 8 * c, 8 * n + 2 * place + i]) for i in range(2)] for n in range(4) for c in range(2)
    ]


@pytest.mark.parametrize("tokens", [16, 11, 1])
def test_a_block_in_registers_is_the_recurrence(monkeypatch, tokens):
    """Also where a token is not a number, which reaches none before it."""
    rng = np.random.default_rng(0)
    S, values = rng.standard_normal((SIZE, COLUMNS)), rng.standard_normal((tokens, COLUMNS))
    keys, queries = (rng.standard_normal((TOKENS, SIZE)) / SIZE**0.5 for _ in range(2))
    decay, strength = rng.uniform(0.2, 1, TOKENS), rng.uniform(0, 1, TOKENS)
    expected, state = [], S
    for t in range(tokens):
        state = decay[t] * state
        state = state + np.outer(keys[t], strength[t] * (values[t] - keys[t] @ state))
        expected.append(queries[t] @ state)

    between = np.array([[np.prod(decay[s + 1 : t + 1]) for t in range(TOKENS)] for s in range(TOKENS)])
    written_by = np.triu(-strength * (keys @ keys.T) * between, 1)
    read_by = np.triu((keys @ queries.T) * between)
    factors = np.concatenate([written_by, read_by, np.cumprod(decay)[None], strength[None]])
    stand_ins(monkeypatch)
    for broken in (None, 5):
        if broken is not None and broken < tokens:
            values[broken] = np.nan
        products = SimpleNamespace(registers=np.empty(0))
        products.registers = SimpleNamespace(flat=registers_of(S.T @ np.concatenate([keys, queries]).T))
        block = quads._Block(products, values, factors, tokens)
        for s in range(tokens):
            block.write(s)
        outputs = np.full((TOKENS, COLUMNS), np.inf)
        for token, column, value in block.outputs():
            outputs[token, column] = value
        good = tokens if broken is None else min(broken, tokens)
        np.testing.assert_allclose(outputs[:good], expected[:good], rtol=1e-10, atol=1e-12)
        assert np.isnan(outputs[good:tokens]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 11])
def test_pairs_of_many_heads(tokens):
    """Blocks of 27B's heads in bfloat16: states as when tokens are written one by one, outputs but for rounding."""
    B, heads, tape = 9, 48, 16  # so many that states leave by TMA where blocks go by pairs
    rng = np.random.default_rng(3)
    kept, w = jax.tree.map(
        lambda like: jnp.asarray(rng.standard_normal(like.shape, np.float32) / 2, like.dtype), kept_shapes()
    )
    block = [rng.standard_normal(shape, np.float32) for shape in ((B, tokens, 16, 640), (B, tokens, heads, 2))]
    inputs, gates = (jnp.asarray(x, jnp.bfloat16) for x in block)
    lengths = 2 * [tokens, tokens, tokens, 4, 9]
    call = ints(3, 0, -1, 9, 15, 1, 2, 4, 8), ints(5, 0, 3, tape, 1, 2, 6, 0, tape), inputs, gates, ints(*lengths[:B])
    (one, by_pairs), (other, by_token) = (
        jitted(name).verify(kept, w, *call) for name in ("mosaic pairs", "mosaic 128")
    )
    for found, wanted in zip(by_pairs, by_token, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    for b, length in enumerate(lengths[:B]):
        if b == 2:
            continue  # padding
        close = np.asarray(one[b, :length], np.float32), np.asarray(other[b, :length], np.float32)
        np.testing.assert_allclose(*close, atol=1e-2, rtol=1e-2)
        assert np.mean(close[0] != close[1]) < 0.02


@pytest.mark.gpu
def test_a_draft_that_is_not_a_number_reaches_none_before_it():
    inputs, gates = prompts(1, G)
    kept = begun(*prompts(7), 7)
    call = ints(2), ints(0), inputs.at[0, 5].set(jnp.nan), gates, ints(G)
    outputs, _ = jitted("mosaic pairs").verify(kept, weights(), *call)
    assert np.isfinite(outputs[0, :5]).all()
    assert np.isnan(outputs[0, 5]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "T"), [(3, 3), (0, G)])
def test_pairs_of_tokens_make_the_block(count, T):
    """What the first kernel says, put together in float64; and the tape is the one that verifying leaves."""
    inputs, gates = prompts(5 + 3 * G)
    before = (x[None, 5 : 5 + G] for x in (inputs, gates))
    _, kept = jitted("reference").verify(begun(inputs[:5], gates[:5], 5), weights(), ints(2), ints(0), *before, ints(G))
    verified = slice(5 + count, 5 + count + T)
    two = (jnp.stack([x[verified]] * 2) for x in (inputs, gates))
    block, place = Block(*two, ints(T, T)), (ints(-1, 2), ints(5, count))  # the first is padding
    _, pairs, moved = jax.jit(functools.partial(first, pairs=True))(kept, weights(), *place, block)
    _, wanted = jitted("reference").verify(kept, weights(), *place, *block)
    np.testing.assert_array_equal(moved.inputs[:, : BEFORE + T], wanted.inputs[:, : BEFORE + T])
    np.testing.assert_array_equal(moved.gates[:, :T], wanted.gates[:, :T])
    expected, _ = by_hand(inputs, gates, weights())
    vectors, factors, values = (
        np.asarray(x[1], np.float64) for x in (pairs.vectors + pairs.rest.astype(F32), pairs.factors, pairs.values)
    )
    for h in range(HV):
        keys, queries = np.split(vectors[h // R] @ np.asarray(wanted.state[2, h], np.float64), 2)
        written_by, read_by, (decay, strength) = np.split(factors[h], [16, 32])
        written = strength[:T, None] * (values[h] - (decay[:, None] * keys)[:T])
        outputs = (decay[:, None] * queries)[:T]
        for s in range(T):
            written += np.outer(written_by[s, :T], written[s])
            outputs += np.outer(read_by[s, :T], written[s])
        np.testing.assert_allclose(outputs, expected[verified, h], **CLOSE)
