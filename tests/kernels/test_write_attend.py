"""Page write and attention in one kernel, against the references of both, one after the other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from pallas_kernels import Rotary, _compat, paged_attention, write_attend, write_kv
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.arguments import Fresh, checked
from pallas_kernels.registry import Device
from pallas_kernels.write_attend import WRITE_ATTEND, call_of
from tests.kernels.cases import BF16, E4M3, PAGE_DTYPES, Geometry, cuda_lowering, error, mesh_of
from tests.kernels.conftest import ON_GPU

by_dtype = pytest.mark.parametrize("dtype", PAGE_DTYPES, ids=lambda d: jnp.dtype(d).name)
VERIFY = Geometry(B=3, T=16, N=8, K=2, H=64, S=16, M=6)


def often(names: str, cases: Iterable[tuple[Any, ...]], usual: Sequence[tuple[Any, ...]]) -> Any:
    """Parametrizes a test with all cases; those that are not in `usual` are long ones."""
    marked = [(case, () if case in usual else pytest.mark.long) for case in cases]
    params = [pytest.param(*case, marks=marks, id="-".join(map(_name, case))) for case, marks in marked]
    return pytest.mark.parametrize(names.split(", "), params)


def _name(value: Any) -> str:
    return str(value) if isinstance(value, int | str) else jnp.dtype(value).name


@functools.cache
def compiled(**static: Any) -> Any:
    """The operation under one jit, so that calls of one shape share a program."""
    return jax.jit(functools.partial(write_attend, **static))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call; what it may not read is NaN, pages that it may not follow have wild numbers."""

    geometry: Geometry
    pools: tuple[Any, Any]
    heads: Any
    slots: Any
    rotary: Rotary
    tables: tuple[Any, ...]  # page table, kv_length, q_length
    options: dict[str, Any]

    def expected(self) -> tuple[np.ndarray, ...]:
        """Results of the references."""
        scales = {name: self.options[name] for name in ("k_scale", "v_scale")}
        q, *pools = write_kv(*self.pools, self.heads, self.slots, self.rotary, **scales, implementation="reference")
        return paged_attention(q, *pools, *self.tables, **self.options, implementation="reference"), *pools

    def outputs(self, **how: Any) -> tuple[np.ndarray, ...]:
        numbers = {name: self.options[name] for name in ("valid_from", "k_scale", "v_scale")}
        run = compiled(mask=self.options["mask"], window=self.options["window"], **how)
        return run(*self.pools, self.heads, self.slots, self.rotary, *self.tables, **numbers)

    def arguments(self) -> Any:
        """Arguments of the implementations."""
        B, T, K, J, H = self.heads.shape
        q = self.heads[..., :-2, :].reshape(B, T, K * (J - 2), H)
        args = checked(q, *self.pools, *self.tables, scale=None, **self.options)
        return dataclasses.replace(args, fresh=Fresh(self.heads, self.slots, self.rotary))


def call(g: Geometry, kv_length, q_length=None, *, seed=0, scales=False, norms=True, valid_from=None) -> Call:
    """A random call; ``scales`` gives heads the scales of fp8 products. A sequence without tokens has no page."""
    rng = np.random.default_rng(seed)
    kv_length = np.array(kv_length, np.int32)
    q_length = np.full(g.B, g.T, np.int32) if q_length is None else np.array(q_length, np.int32)
    J, table = g.N // g.K + 2, rng.permutation(g.P)[: g.B * g.M].reshape(g.B, g.M).astype(np.int32)

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * size

    pools = tuple(normal(g.P, g.K, g.S, g.H) for _ in "kv")
    position = (kv_length - q_length)[:, None] + np.arange(g.T)
    real = np.arange(g.T) < q_length[:, None]
    page = np.take_along_axis(table, np.clip(position // g.S, 0, g.M - 1), axis=1)
    slots = np.where(real, page * g.S + position % g.S, -1)
    stored = np.zeros((g.P, g.S), bool)
    for b in range(g.B):
        past = np.arange((kv_length - q_length)[b])
        stored[table[b, past // g.S], past % g.S] = True
        table[b, -(-int(kv_length[b]) // g.S) :] = 2**30
    for pool in pools:
        pool[np.broadcast_to(~stored[:, None, :, None], pool.shape)] = np.nan
    angles = position[..., None] / 1e4 ** (np.arange(g.H // 2) / (g.H // 2))
    weights = [jnp.asarray(1 + normal(g.H, size=0.3), BF16) if norms else None for _ in "qk"]
    of_products = (rng.uniform(0.5, 2, (g.B, g.T)), rng.uniform(0.5, 2, (g.K, J, g.H))) if scales else None
    of_products = of_products and tuple(np.asarray(x, np.float32) for x in of_products)
    rotary = Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), *weights, of_products)
    return Call(
        g,
        tuple(jnp.asarray(pool, g.dtype) for pool in pools),
        jnp.asarray(normal(g.B, g.T, g.K, J, g.H, size=2), BF16),
        slots.astype(np.int32),
        rotary,
        (table, kv_length, q_length),
        {
            "mask": g.mask,
            "window": g.window,
            "valid_from": np.array(valid_from or [0] * g.B, np.int32),
            **{name: rng.uniform(0.5, 2, g.K).astype(np.float32) for name in ("k_scale", "v_scale")},
        },
    )


def check_pools(outputs, expected) -> None:
    for pool, wanted in zip(outputs, expected, strict=True):
        bits = f"u{wanted.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(pool).view(bits), np.asarray(wanted).view(bits))


def check(outputs, case: Call) -> None:
    """Pools must match bit for bit, the output within rounding."""
    expected = case.expected()
    check_pools(outputs[1:], expected[1:])
    assert outputs[0].dtype == case.heads.dtype
    assert error(outputs[0], expected[0]) < 6e-3
    real = np.arange(case.geometry.T) < case.tables[2][:, None]
    assert not np.asarray(outputs[0], np.float32)[~real].any()


@pytest.fixture(params=["triton", "apart"])
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"implementation": request.param, "interpret": not ON_GPU}


@often(
    "dtype, group",
    itertools.product(PAGE_DTYPES, (1, 3, 4)),
    usual=[(BF16, 4), (E4M3, 3)],
)
def test_against_the_references(how, dtype, group):
    g = dataclasses.replace(VERIFY, dtype=dtype, N=2 * group)
    check((case := call(g, [70, 16, 32], scales=dtype == E4M3)).outputs(**how), case)


@pytest.mark.parametrize(
    ("mask", "window"), [("causal", 20), ("block", 9), pytest.param("block", None, marks=pytest.mark.long)]
)
def test_masks(how, mask, window):
    g = dataclasses.replace(VERIFY, mask=mask, window=window)
    check((case := call(g, [70, 40, 16], valid_from=[40, 3, 0])).outputs(**how), case)


@often(
    "dtype, mask",
    itertools.product(PAGE_DTYPES, ("causal", "block")),
    usual=[(BF16, "causal"), (E4M3, "block")],
)
def test_ragged_and_idle_sequences(how, dtype, mask):
    """Heads past the last token of a sequence may hold anything, NaN too."""
    g = dataclasses.replace(VERIFY, B=4, dtype=dtype, mask=mask)
    case = call(g, [65, 0, 30, 96], [1, 0, 7, 16], norms=False)
    case = dataclasses.replace(case, heads=case.heads.at[2, 7:].set(jnp.nan))
    check(case.outputs(**how), case)


@pytest.mark.parametrize("tokens", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5, 15))])
def test_any_number_of_tokens(how, tokens):
    check((case := call(dataclasses.replace(VERIFY, T=tokens), [80, 41, tokens])).outputs(**how), case)


@often("dtype, tokens", [(BF16, 16), (E4M3, 5)], usual=[(E4M3, 5)])
def test_gates_multiply_the_output(how, dtype, tokens):
    """Heads with gates in front give what those without give, times sigmoids; some tokens have infinite gates."""
    case = call(dataclasses.replace(VERIFY, T=tokens, dtype=dtype), [70, 16, 32])
    B, T, K, J, H = case.heads.shape
    gates = np.asarray(np.random.default_rng(3).standard_normal((B, T, K, J - 2, H)) * 4, BF16)
    gates[0, 0], gates[1, 1] = np.inf, -np.inf
    heads = jnp.concatenate([gates, case.heads], axis=3)
    with_gates = dataclasses.replace(case, heads=heads, rotary=dataclasses.replace(case.rotary, has_gates=True))
    out, *written = case.outputs(**how)
    found, *found_pools = with_gates.outputs(**how)
    opened = 1 / (1 + np.exp(-gates.astype(np.float64).reshape(out.shape)))
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(out, np.float64) * opened, rtol=2**-8)
    check_pools(found_pools, [np.asarray(pool) for pool in written])


def test_reference():
    case = call(VERIFY, [70, 16, 32])
    outputs = write_attend(
        *case.pools, case.heads, case.slots, case.rotary, *case.tables, **case.options, implementation="reference"
    )
    check(outputs, case)


@often(
    "dtype, splits",
    itertools.product(PAGE_DTYPES, (1, 2, 5, 7)),
    usual=[(BF16, 7), (E4M3, 5)],
)
def test_any_number_of_splits(dtype, splits):
    """Fresh tokens lie on two pages, or on one; some splits are empty."""
    case = call(dataclasses.replace(VERIFY, dtype=dtype), [90, 64, 20])
    config = triton.Config(block=64, splits=splits, num_warps=4, num_stages=2)
    check(triton.write_attend(case.arguments(), interpret=not ON_GPU, config=config), case)


def test_tokens_without_a_slot_are_not_written(how):
    case = call(VERIFY, [70, 40, 16])
    slots = case.slots.copy()
    slots[1] = -1
    case = dataclasses.replace(case, slots=slots)
    _, *outputs = case.outputs(**how)
    check_pools(outputs, case.expected()[1:])


@by_dtype
def test_lowers_for_cuda(dtype):
    case = call(dataclasses.replace(VERIFY, dtype=dtype, H=128, S=64, M=20), [700, 300, 64], scales=True)
    text = cuda_lowering(triton.write_attend, case.arguments())
    calls = [line for line in text.splitlines() if "custom_call @__gpu$xla.gpu.triton" in line]
    assert len(calls) == 2  # one kernel, and one that merges
    for i in range(2):
        assert f"output_tuple_indices = [{i}], operand_index = {i}" in calls[0]  # the pools are written in place
    assert "operand_index" not in calls[1]


@pytest.mark.parametrize(
    ("capability", "batch", "tokens", "pages", "picked"),
    [
        ((9, 0), 1, 16, 32, "triton"),
        ((9, 0), 1, 1, 32, "triton"),
        ((9, 0), 1, 16, 512, "apart"),  # attention is Mosaic's
        ((9, 0), 1, 16, 63, "apart"),  # each program turns queries anew, and these fill the card
        ((9, 0), 4, 16, 32, "apart"),
        ((9, 0), 16, 16, 32, "apart"),
        ((9, 0), 1, 64, 32, "apart"),  # rows in several programs
        (None, 1, 16, 32, "apart"),
    ],
)
def test_picks(monkeypatch, capability, batch, tokens, pages, picked):
    monkeypatch.setattr(_compat, "compute_capability", lambda: capability)
    monkeypatch.setattr(_compat, "sm_count", lambda: 132)
    case = call(Geometry(batch, tokens, N=32, K=8, H=128, S=64, M=1), [tokens] * batch)
    pools = (np.broadcast_to(np.zeros((), BF16), (batch * pages, 8, 64, 128)),) * 2  # takes no memory
    tables = (np.zeros((batch, pages), np.int32), *case.tables[1:])
    case = dataclasses.replace(case, pools=pools, tables=tables)
    device = Device.default()
    assert WRITE_ATTEND.choose(call_of(case.arguments(), device), device).name == picked


def test_refuses_in_a_sentence():
    case = call(dataclasses.replace(VERIFY, T=40), [80, 80, 80])
    with pytest.raises(NotImplementedError, match="takes 1 to 128 rows of a kv head; these are 160"):
        case.outputs(implementation="triton")
    with pytest.raises(ValueError, match="must be 'triton', 'apart', 'reference' or None; got 'cuda'"):
        case.outputs(implementation="cuda")
    with pytest.raises(NotImplementedError, match="halves of heads of at least 32; this is 16"):
        call(dataclasses.replace(VERIFY, H=16), [80, 80, 80]).outputs(implementation="triton")
    with pytest.raises(ValueError, match=r"at least 3 .* got \[3, 40, 2, 2, 64\] and Rotary"):
        dataclasses.replace(case, heads=case.heads[:, :, :, 4:]).outputs()
    with pytest.raises(ValueError, match=r"have a rotary; got .* and NoneType"):
        dataclasses.replace(case, rotary=None).outputs()
    rotary = dataclasses.replace(case.rotary, has_gates=True)
    with pytest.raises(ValueError, match=r"must have J = 2 R \+ 2 for R queries, and no scales; got J=5\n"):
        dataclasses.replace(case, heads=case.heads[:, :, :, 1:], rotary=rotary).outputs()
    scaled = dataclasses.replace(rotary, scales=(jnp.ones((3, 40)), jnp.ones((2, 6, 64))))
    with pytest.raises(ValueError, match="and no scales; got J=6 and scales"):
        dataclasses.replace(case, rotary=scaled).outputs()
    with pytest.raises(ValueError, match="heads must be"):
        dataclasses.replace(case, slots=case.slots[:2]).outputs()


def sharded(case: Call, devices: int, **how: Any) -> Any:
    """The call with kv heads split over a mesh; ``how`` as in `Call.outputs`."""
    heads, pages, head = Spec(None, None, "tp"), Spec(None, "tp"), Spec("tp")
    scales = [case.options[name] for name in ("k_scale", "v_scale")]
    static = {name: case.options[name] for name in ("mask", "window")}

    def local(k_pages, v_pages, x, slots, rotary, tables, k_scale, v_scale):
        options = static | {"k_scale": k_scale, "v_scale": v_scale}
        return write_attend(k_pages, v_pages, x, slots, rotary, *tables, **options, **how)

    run = jax.shard_map(
        local,
        mesh=mesh_of(devices),
        in_specs=(pages, pages, heads, Spec(), Spec(), Spec(), head, head),
        out_specs=(heads, pages, pages),
        check_vma=not how.get("interpret", False),  # JAX's interpreter does not track what varies over the mesh
    )
    return jax.jit(run), (*case.pools, case.heads, case.slots, case.rotary, case.tables, *scales)


@often("dtype", [(dtype,) for dtype in PAGE_DTYPES], usual=[(BF16,), (E4M3,)])
def test_on_a_mesh(how, dtype):
    case = call(dataclasses.replace(VERIFY, dtype=dtype), [70, 16, 32])
    run, arguments = sharded(case, 1 if ON_GPU else 2, **how)
    check(run(*arguments), case)


def test_sharded_lowering_knows_what_varies():
    case = call(dataclasses.replace(VERIFY, H=128, S=64, K=4, M=20), [700, 300, 64])
    run, arguments = sharded(case, 4, implementation="triton")
    assert "gpu$xla.gpu.triton" in run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
