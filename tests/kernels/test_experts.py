"""The routed experts by every implementation that this machine has, against the dense formula; and their sorting."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import _compat
from pallas_kernels.experts import EXPERTS, experts, reference, triton_sort
from pallas_kernels.experts.config import default_config, fitted
from pallas_kernels.experts.sort import block_count, rows_of, sort
from pallas_kernels.registry import Device
from tests.kernels.cases import BF16, F32, cuda_lowering, error, mesh_of
from tests.kernels.conftest import ON_GPU

F16 = jnp.float16
QWEN35_35B, QWEN35_122B = (256, 512, 2048), (256, 1024, 3072)  # X, M, D


def routed(tokens, k, X, M, D, dtype=BF16, skipped=0.2):
    """Operands whose products have a deviation of 1; experts that no token chose are NaN, as are skipped weights."""
    rng = np.random.default_rng(0)
    T = int(np.prod(tokens))
    chosen = np.argsort(rng.random((T, X)), axis=1)[:, :k].astype(np.int32)
    is_skipped = rng.random((T, k)) < skipped
    chosen[is_skipped] = rng.choice([-1, X, 2**31 - 1, -(2**31)], int(is_skipped.sum()))
    weights = np.where(is_skipped, np.nan, rng.random((T, k))).astype(np.float32)
    x, gate_up, down = (rng.standard_normal(size, np.float32) for size in ((T, D), (X, 2, M, D), (X, D, M)))
    untouched = ~np.isin(np.arange(X), chosen)
    gate_up[untouched], down[untouched] = np.nan, np.nan
    arrays = (jnp.asarray(a, dtype) for a in (x, gate_up / D**0.5, down / M**0.5))
    x, gate_up, down = arrays
    return (
        x.reshape(*tokens, D),
        gate_up,
        down,
        jnp.asarray(chosen).reshape(*tokens, k),
        jnp.asarray(weights).reshape(*tokens, k),
    )


def expected(x, gate_up, down, chosen, weights):
    """Sums over the experts in float64, with gate, up and hidden units rounded to the dtype."""
    X, D = gate_up.shape[0], x.shape[-1]

    def rounded(values):
        return values.astype(x.dtype).astype(np.float64)

    rows, ids, scales = x.reshape(-1, D), np.reshape(chosen, (-1, chosen.shape[-1])), np.reshape(weights, -1)
    wide_x, gate_up, down = (np.asarray(a).astype(np.float64) for a in (rows, gate_up, down))
    out = np.zeros(wide_x.shape)
    for pair, expert in enumerate(ids.reshape(-1)):
        token = pair // ids.shape[1]
        if 0 <= expert < X:
            gate, up = rounded(gate_up[expert] @ wide_x[token])
            out[token] += scales[pair] * (down[expert] @ rounded(gate / (1 + np.exp(-gate)) * up))
    return out.reshape(x.shape)


CASES = {
    "one token": ((1,), 3, 7, 32, 64),
    "few tokens": ((7,), 3, 5, 48, 96),
    "sorted": ((3, 7), 4, 9, 16, 32),
    "all on one expert, in blocks": ((70,), 1, 1, 32, 16),
}


def run(implementation):
    interpret = implementation == "triton" and not ON_GPU
    return jax.jit(functools.partial(experts, implementation=implementation, interpret=interpret))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("implementation", "dtype", "most"),
    [
        ("reference", F32, 1e-6),
        ("reference", BF16, 4e-3),
        ("triton", BF16, 4e-3),
        pytest.param("triton", F16, 5e-4, marks=() if ON_GPU else pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_dense_formula(implementation, dtype, most, case):
    """Weights that nobody needs are not read, at least not with a result: they are NaN."""
    operands = routed(*CASES[case], dtype=dtype)
    out = run(implementation)(*operands)
    assert (out.dtype, out.shape) == (dtype, operands[0].shape)
    assert error(out, expected(*operands)) < most


def test_f16_few_tokens():
    operands = routed(*CASES["few tokens"], dtype=F16)
    assert error(run("triton")(*operands), expected(*operands)) < 5e-4


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("case", ["one token", "sorted", "all on one expert, in blocks"])
@pytest.mark.parametrize("sorter", ["jnp", "triton"])
def test_sort(sorter, case, rows, monkeypatch):
    """Each expert's pairs once, in order, in blocks of its own; also where they are read in several chunks."""
    monkeypatch.setattr(triton_sort, "CHUNK", 32)
    X = CASES[case][2]
    *_, chosen, _ = routed(*CASES[case])
    chosen = chosen.reshape(-1, chosen.shape[-1])
    how = sort if sorter == "jnp" else functools.partial(triton_sort.sort, interpret=not ON_GPU)
    sorted_pairs = jax.jit(how, static_argnums=(1, 2))(chosen, X, rows)
    pairs, *blocks = (np.asarray(a) for a in sorted_pairs)
    seen = {expert: [] for expert in range(X)}
    assert len(blocks[0]) == block_count(chosen.size, X, rows)
    for expert, first, end in zip(*blocks, strict=True):
        if expert >= 0:
            assert 0 < end - first <= rows
            seen[int(expert)] += pairs[first:end].tolist()
        else:
            assert expert == -1
    assert seen == {expert: np.flatnonzero(np.ravel(chosen) == expert).tolist() for expert in range(X)}


@pytest.mark.parametrize("tokens", [16, 24])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_token_is_the_same_in_any_company(implementation, tokens):
    """Also beside tokens that are NaN, and in another order."""
    x, gate_up, down, chosen, weights = routed((tokens,), 2, 4, 32, 64)
    function = run(implementation)
    clean = np.asarray(function(x, gate_up, down, chosen, weights), np.float32)
    order = np.random.default_rng(1).permutation(tokens)
    moved = function(x[order], gate_up, down, chosen[order], weights[order])
    np.testing.assert_array_equal(np.asarray(moved, np.float32), clean[order])
    broken = np.asarray(function(x.at[5].set(jnp.nan), gate_up, down, chosen, weights), np.float32)
    assert np.isnan(broken[5]).all()
    np.testing.assert_array_equal(np.delete(broken, 5, 0), np.delete(clean, 5, 0))
    alone = chosen.at[1:].set(-1)
    lone = np.asarray(function(x, gate_up, down, alone, weights), np.float32)
    np.testing.assert_array_equal(lone, clean * (np.arange(tokens) == 0)[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(16, 512, 2048), (16, 768, 2048), (16, 1024, 3072)], ids=str)
def test_a_lone_token_has_the_bits_of_company(sizes):
    x, gate_up, down, chosen, weights = routed((16,), 8, *sizes)
    together = run("triton")(x, gate_up, down, chosen, weights)
    for token in range(3):
        alone = run("triton")(x[token][None], gate_up, down, chosen[token][None], weights[token][None])
        np.testing.assert_array_equal(np.asarray(alone[0], np.float32), np.asarray(together[token], np.float32))


def dense(x, gate_up, down, chosen, weights):
    """All experts for all tokens, differentiable."""
    highest = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    gate, up = jnp.moveaxis(highest("td,xhmd->txhm", x, gate_up), 2, 0)
    out = highest("txm,xdm->txd", jax.nn.silu(gate) * up, down)
    shares = jnp.sum(jax.nn.one_hot(chosen, len(gate_up)) * weights[..., None], axis=1)
    return highest("txd,tx->td", out, shares)


def test_gradients():
    x, gate_up, down, chosen, weights = routed((9,), 2, 4, 6, 10, F32, skipped=0)
    gate_up, down = (jnp.nan_to_num(a) for a in (gate_up, down))
    chosen = chosen.at[3, 1].set(4).at[4].set(-1)
    target = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), F32)

    def gradients(function):
        def loss(x, gate_up, down, weights):
            return jnp.sum(target * function(x, gate_up, down, chosen, weights))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, gate_up, down, weights)

    for gradient, wanted in zip(gradients(reference.experts), gradients(dense), strict=True):
        assert error(gradient, wanted) < 1e-5


@pytest.mark.in_turns(8)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 64, 8192])
def test_lowers(monkeypatch, capability, tokens):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    for X, M, D in (QWEN35_35B, QWEN35_122B, (256, 128, 3072)):  # the last is a shard of one
        text = cuda_lowering(lambda *a: experts(*a, implementation="triton"), *shapes(tokens, X, M, D))  # traced anew
        assert text.count("xla.gpu.triton") == (2 if tokens <= 16 else 3)
        weights = shapes(tokens, X, M, D)[1:3]
        config = fitted(default_config(tokens, 8, *weights), *weights)
        for tile, parts in ((config.gate_up, 2), (config.down, 1)):
            ring = tile.num_stages * 2 * tile.depth * (parts * tile.rows + config.tokens)
            assert tile.num_stages > 1
            assert ring <= (227 if capability == (9, 0) else 99) * 1024


def shapes(tokens, X, M, D, k=8, dtype=BF16):
    struct = jax.ShapeDtypeStruct
    weights = struct((X, 2, M, D), dtype), struct((X, D, M), dtype)
    return struct((tokens, D), dtype), *weights, struct((tokens, k), jnp.int32), struct((tokens, k), F32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": jnp.zeros((4, 16, 32))}, r"gate_up must be \[X, 2, M, D\]; got \[4, 16, 32\]"),
        ({"down": jnp.zeros((4, 8, 16))}, r"for gate_up \[4, 2, 8, 16\]; got \[3, 16\] and \[4, 8, 16\]"),
        ({"x": jnp.zeros((3, 8))}, r"got \[3, 8\] and"),
        ({"chosen": jnp.zeros((2, 2), jnp.int32)}, r"for x \[3, 16\]; got \[2, 2\] and \[3, 2\]"),
        ({"weights": jnp.zeros((3, 1))}, r"got \[3, 2\] and \[3, 1\]"),
        ({"down": jnp.zeros((4, 16, 8), BF16)}, "got float32, float32, bfloat16"),
        ({"chosen": jnp.zeros((3, 2))}, "chosen must be int32 and weights float32; got float32 and float32"),
        ({"implementation": "cuda"}, "implementation must be 'mosaic', 'triton', 'reference' or None; got 'cuda'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    right = {"x": jnp.zeros((3, 16)), "gate_up": jnp.zeros((4, 2, 8, 16)), "down": jnp.zeros((4, 16, 8))}
    right |= {"chosen": jnp.zeros((3, 2), jnp.int32), "weights": jnp.zeros((3, 2))}
    with pytest.raises(ValueError, match=message):
        experts(**(right | change))


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [((4, 32, 64), F32, "take bf16 and f16; these are float32"), ((4, 24, 64), BF16, "16 divides; these are 64 .* 24")],
)
def test_triton_refuses_in_a_sentence(sizes, dtype, message):
    call = shapes(4, *sizes, k=2, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(experts, implementation="triton"), *call)
    assert EXPERTS.choose(call[:4], Device("cuda", (9, 0))).name == "reference"


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_no_tokens(implementation):
    operands = routed((2, 0), 2, 4, 16, 32)
    assert run(implementation)(*operands).shape == (2, 0, 32)


@pytest.mark.parametrize(("pairs", "experts_", "rows"), [(17 * 8, 256, 16), (4096 * 8, 256, 128), (300, 1, 128)])
def test_blocks_hold_an_expert_of_mean_popularity(pairs, experts_, rows):
    assert rows_of(pairs, experts_, least=16) == rows


SHARDED = (Spec(), Spec(None, None, "tp"), Spec(None, None, "tp"), Spec(), Spec())


@pytest.mark.parametrize("tokens", [8, 32])
def test_sharded_lowering_knows_what_varies(tokens):
    call = functools.partial(experts, implementation="triton")
    shard = jax.shard_map(lambda *a: jax.lax.psum(call(*a), "tp"), mesh=mesh_of(4), in_specs=SHARDED, out_specs=Spec())
    traced = jax.jit(shard).trace(*shapes(tokens, *QWEN35_35B))
    assert "xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_devices_with_parts_of_the_width():
    operands = routed((5,), 2, 4, 32, 64, F32)
    shard = jax.shard_map(
        lambda *a: jax.lax.psum(experts(*a), "tp"), mesh=mesh_of(4), in_specs=SHARDED, out_specs=Spec()
    )
    assert error(jax.jit(shard)(*operands), expected(*operands)) < 1e-5
