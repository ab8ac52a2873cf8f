"""Write, then attend, layer after layer in one donated jit: the pools that layers share stay where they are."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.engine.device.shapes import StepShape
from pallas_kernels import Rotary, paged_attention, write_kv
from tests.kernels.cases import BF16, E4M3, E5M2, PAGE_DTYPES, cuda_lowering
from tests.kernels.conftest import ATTENTION, ON_GPU
from tests.pairs import DRAFT, TARGET, write_model

B, T, N, K, S, H, M, P = 2, 4, 8, 2, 64, 128, 3, 11
LAYERS = 3
LONG = pytest.mark.long


def step(pools, heads, slots, rotary, page_table, kv_length, *, attention, write, interpret):
    """Layers of write-then-attend, as a target step does; the pages of one lie behind those of another."""
    out = 0.0
    for layer in range(LAYERS):
        q, *pools = write_kv(
            *pools, heads, slots + layer * P * S, rotary,
            implementation=write, interpret=interpret and write == "triton",
        )  # fmt: skip
        out = paged_attention(
            q + out, *pools, page_table + layer * P, kv_length,
            implementation=attention, interpret=interpret and attention == "triton",
        )  # fmt: skip
    return pools, out


def operands(dtype):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), BF16)

    pools = [normal(LAYERS * P, K, S, H).astype(dtype) for _ in "kv"]
    page_table = jnp.asarray(rng.permutation(P)[: B * M].reshape(B, M), jnp.int32)
    kv_length = jnp.array([100, 70], jnp.int32)
    position = kv_length[:, None] - T + jnp.arange(T, dtype=jnp.int32)[None]
    slots = jnp.take_along_axis(page_table, position // S, axis=1) * S + position % S
    angles = position[..., None] / 1e4 ** (jnp.arange(H // 2) / (H // 2))
    rotary = Rotary(jnp.cos(angles), jnp.sin(angles), normal(H), normal(H))
    return pools, normal(B, T, K, N // K + 2, H), slots, rotary, page_table, kv_length


def pool_copies(hlo: str, dtype) -> list[str]:
    """Copies of an array of the pools' shape in optimised HLO, whatever the layout."""
    name = {"bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}[jnp.dtype(dtype).name]
    pattern = re.compile(rf"= \(?{name}\[{LAYERS * P},{K},{S},{H}\]\S* (copy|copy-start)\(")
    return [line for line in hlo.splitlines() if pattern.search(line)]


@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("attention", ATTENTION)
def test_no_pool_is_copied(attention, dtype):
    # On a CPU interpreted kernels carry the pools through a loop and copy them; there the reference shows the aliasing,
    # and the lowering below what the Triton write asks of XLA.
    if attention == "triton" and not ON_GPU:
        pytest.skip("Interpreted kernels copy; the GPU run checks the compiled ones.")
    if attention == "reference" and ON_GPU:
        pytest.skip("A known limit, see the README: XLA copies pools that the reference reads, on GPUs float32 ones.")
    write = "triton" if ON_GPU else "reference"
    f = functools.partial(step, attention=attention, write=write, interpret=False)
    arguments = operands(dtype)
    compiled = jax.jit(f, donate_argnums=0).lower(*arguments).compile()
    assert pool_copies(compiled.as_text(), dtype) == []
    pool_bytes = sum(x.nbytes for x in jax.tree.leaves(arguments[0]))
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes
    # The old pools are gone, the new ones lie in their memory, and a use of the old ones would be seen as a copy.
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(arguments[0])]
    written, _ = compiled(*arguments)
    assert all(x.is_deleted() for x in jax.tree.leaves(arguments[0]))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(written)] == where


@pytest.mark.parametrize(
    ("length", "kv_cache_dtype", "step", "mode"),
    [
        (1, "float32", ("greedy_round", 2, 1), ()),
        pytest.param(6, "float32", ("greedy_round", 2, 6), (), marks=pytest.mark.long),
        pytest.param(6, "bfloat16", ("greedy_round", 2, 6), (), marks=pytest.mark.long),
        (6, "fp8", ("greedy_round", 2, 6), ()),
        (6, "float32", ("verify_commit", 2, 6), ("any",)),
    ],
)
def test_no_pool_is_copied_in_a_round_of_the_engine(tmp_path, length, kv_cache_dtype, step, mode):
    wide = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "dtype": "bfloat16"}
    wide |= {"max_position_embeddings": 2048}
    raw = DRAFT | wide | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 1024}
    folders = write_model(tmp_path / "target", TARGET | wide, 0), write_model(tmp_path / "draft", raw, 1)
    # Pools so long that half of the smallest is more than a step of the reference gathers, or cuBLAS works in (32 MiB).
    options = {"max_num_seqs": 64 if ON_GPU else 8, "max_model_len": 2048, "num_speculative_tokens": 5}
    engine = LLM(*folders, kv_cache_dtype=kv_cache_dtype, compile_at_start=False, **options).engine
    caches = engine.runner.caches
    compiled = engine.runner.program(StepShape(*step, engine.layout.table_width, *mode)).lower().compile()
    analysis = compiled.memory_analysis()
    pools = jax.tree.leaves((caches.target, caches.draft))
    assert analysis.alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
    half = min(4 * pool.size for pool in pools) / 2  # of the smallest pool if it held float32
    assert analysis.temp_size_in_bytes < half
    for pool in pools:  # nor converted to what XLA would rather write to
        shape = ",".join(map(str, pool.shape))
        assert pool.dtype == jnp.float32 or not re.search(rf"\bf(16|32)\[{shape}\]", compiled.as_text())


@pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_the_copy_test_sees_a_copy(dtype):
    """An old pool that is wanted after the write costs a copy, and ``pool_copies`` finds it."""
    write = "triton" if ON_GPU else "reference"

    def careless(pools, *rest):
        return *step(pools, *rest, attention="reference", write=write, interpret=False), pools[0]

    compiled = jax.jit(careless, donate_argnums=0).lower(*operands(dtype)).compile()
    assert pool_copies(compiled.as_text(), dtype)


def test_the_write_aliases_its_pools_for_cuda():
    pools, heads, slots, rotary, _, _ = operands(BF16)
    text = cuda_lowering(functools.partial(write_kv, implementation="triton"), *pools, heads, slots, rotary)
    call = next(line for line in text.splitlines() if "xla.gpu.triton" in line)
    assert call.count("output_operand_alias<") == 2
    for i in (0, 1):
        assert f"output_tuple_indices = [{i}], operand_index = {i}" in call


@pytest.mark.parametrize(
    ("dtype", "rotates"),
    [
        (E4M3, True),
        *(pytest.param(*x, marks=LONG) for x in ((BF16, False), (BF16, True), (E4M3, False), (E5M2, True))),
    ],
)
def test_interpreted_kernels_chain_as_the_reference_does(dtype, rotates):
    attention, write = ("triton", "triton")

    def run(**how):
        as_written = {"xla_allow_excess_precision": False}  # every rounding to bfloat16
        pools, heads, slots, rotary, *rest = operands(dtype)
        chain = jax.jit(functools.partial(step, **how), compiler_options=as_written)
        return chain(pools, heads, slots, rotary if rotates else None, *rest)

    interpreted = run(attention=attention, write=write, interpret=not ON_GPU)
    expected = run(attention="reference", write="reference", interpret=False)
    for x, y in zip(jax.tree.leaves(interpreted[0]), jax.tree.leaves(expected[0]), strict=True):
        moved = 0.01 * B * T * K * H if rotates else 0  # squares summed in another order move a few
        assert np.sum(np.asarray(x) != np.asarray(y)) <= moved
    np.testing.assert_allclose(np.asarray(interpreted[1], np.float32), np.asarray(expected[1], np.float32), atol=0.02)
