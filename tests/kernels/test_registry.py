"""The registry: choices are those of the frozen table, refusals are logged once, and CPUs import no backend of GPUs."""

from __future__ import annotations

import ast
import logging
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import _compat, add_norm, registry
from pallas_kernels.product import PRODUCT
from pallas_kernels.registry import FP8_GPUS, HOPPER, HOPPER_ON, Call, Capability, Device, Implementation, explain
from pallas_kernels.write_kv import WRITE_KV
from tests.kernels.cases import BF16, E4M3, F32, shapes
from tests.kernels.choices import OPERATIONS, TABLE, lines, shape

H100, ADA, AMPERE, CPU = (Device("cuda", (9, 0)), Device("cuda", (8, 9)), Device("cuda", (8, 0)), Device("cpu"))
FEW, SOME, MANY = (  # tokens of a product with 32 MiB: Triton's, Mosaic's and XLA's on Hopper
    (*shapes((tokens,), (4096, 4096)), BF16) for tokens in (16, 64, 1024)
)


@pytest.fixture
def logged(caplog):
    """Level and message of each record that the registry logs in this test."""
    registry._log_once.cache_clear()
    caplog.set_level(logging.DEBUG, "pallas_kernels")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def on(monkeypatch, device):
    monkeypatch.setattr(_compat, "compute_capability", lambda: device.generation)
    monkeypatch.setattr(_compat, "platform", lambda: device.platform)


def test_choices_are_those_of_the_table():
    assert list(lines()) == TABLE.read_text().splitlines()


@pytest.mark.parametrize("operation", {o.name: o for group in OPERATIONS.values() for o in group}.values(), ids=str)
def test_every_name_of_a_function_is_one(operation):
    for implementation in operation.implementations:
        names = [None, *filter(None, (implementation.slower, implementation.refusal))]
        assert all(callable(implementation.load(name)) for name in names)
    assert operation.implementations[-1].runs_on is None
    with pytest.raises(ValueError, match=r"implementation must be '\w+', .* or None; got 'cuda'"):
        operation.named("cuda")


@pytest.mark.parametrize(
    ("capability", "device", "is_inside"),
    [
        (FP8_GPUS, H100, True),
        (FP8_GPUS, ADA, True),
        (FP8_GPUS, AMPERE, False),
        (FP8_GPUS, CPU, False),
        (HOPPER, ADA, False),
        (HOPPER, H100, True),
        (HOPPER, Device("cuda", (10, 0)), False),
        (HOPPER_ON, Device("cuda", (10, 0)), True),
        (HOPPER, Device("rocm"), False),
        (Capability("tpu"), Device("tpu"), True),
        (Capability("tpu"), CPU, False),
    ],
)
def test_capabilities(capability, device, is_inside):
    assert (capability.refusal(device) is None) == is_inside


def test_a_refusal_says_what_is_there_and_what_is_needed():
    assert HOPPER.refusal(ADA) == (
        "It runs on NVIDIA GPUs of compute capability from 9.0 to below 10.0; "
        "this is an NVIDIA GPU of compute capability 8.9."
    )
    assert Capability("tpu").refusal(CPU) == "It runs on tpu; this is cpu."


def test_a_pool_that_triton_refuses_is_a_warning_once(monkeypatch, logged):
    """The reference, many times slower, once took such a pool without a word."""
    on(monkeypatch, H100)
    pool = shape(40000, 8, 64, 128, dtype=E4M3)
    for _ in range(2):
        assert WRITE_KV.pick(None, (pool,)).name == "reference"
    [(level, message)] = logged()
    assert level == "WARNING"
    assert message.startswith("write_kv: 'reference' replaces 'triton'. Pallas' Triton backend addresses an 8-bit pool")
    assert WRITE_KV.pick(None, (shape(35000, 8, 64, 128, dtype=E4M3),)).name == "reference"
    assert len(logged()) == 2  # another size is another reason


def test_a_gpu_without_kernels_is_a_warning(monkeypatch, logged):
    on(monkeypatch, AMPERE)
    jax.eval_shape(lambda *arrays: add_norm(*arrays, 1e-6), shape(4, 64), shape(4, 64), shape(64))
    assert [level for level, _ in logged()] == ["WARNING"]
    assert "compute capability 8.0" in logged()[0][1]


def test_another_kernel_in_its_place_is_information(monkeypatch, logged):
    on(monkeypatch, ADA)
    q, pool = shape(1, 16, 32, 128), shape(8, 8, 64, 128)
    call = jax.ShapeDtypeStruct((1, 8), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    jax.eval_shape(pallas_kernels.paged_attention, q, pool, pool, *call)
    [(level, message)] = logged()
    assert level == "INFO"
    assert message.startswith("paged_attention: 'triton' replaces 'mosaic'. It runs on")


@pytest.mark.parametrize(("call", "served_by"), [(FEW, "triton"), (SOME, "mosaic"), (MANY, "reference")])
def test_what_was_measured_slower_is_not_logged(monkeypatch, logged, call, served_by):
    on(monkeypatch, H100)
    assert PRODUCT.pick(None, call).name == served_by
    assert logged() == []


@pytest.mark.parametrize("how", [{"name": None}, {"name": None, "interpret": True}, {"name": "reference"}])
def test_cpus_and_callers_who_choose_are_told_nothing(logged, how):
    PRODUCT.pick(call=FEW, **how)
    assert logged() == []


def test_explain_says_what_serves_and_why_others_do_not():
    calls = [Call(PRODUCT, "16 rows", FEW), Call(PRODUCT, "float32", (*shapes((16,), (4096, 4096), F32), F32))]
    few, wide = explain("cuda", (9, 0), calls)
    assert (few.call.label, few.chosen) == ("16 rows", "triton")
    assert few.others == {
        "mosaic": "It was measured faster for 17 to 256 tokens; these are 16.",
        "narrow": "It was measured faster for weights of up to 256 rows; these are 4096.",
        "weight_first": "It was measured faster with tiles of at least 40 rows on 90% of the 132 multiprocessors; "
        "these are 128 of 32.",
        "reference": "'triton' is preferred.",
    }
    assert wide.chosen == "reference"
    assert wide.others["triton"] == "The Triton product takes bf16 and f16; this is float32."
    [on_tpu] = explain("tpu", None, calls[:1])
    assert on_tpu.chosen == "reference"
    assert set(on_tpu.others) == {"mosaic", "narrow", "weight_first", "triton"}
    assert all(reason.endswith("this is tpu.") for reason in on_tpu.others.values())


def test_a_slower_implementation_is_not_asked_whether_it_could():
    """Refusals are logged, and one by an implementation that would not be picked anyway would be noise."""
    kernel = Implementation("k", f"{__name__}:_never", HOPPER, slower="_slower", refusal="_refusal")
    assert kernel.objection((1,), H100).cause == "slower"
    assert kernel.objection((2,), H100).cause == "refusal"
    assert kernel.objection((3,), H100) is None
    assert kernel.objection((1,), CPU).cause == "device"
    assert kernel.objection((3,), None) is None  # interpreted


def _never(call):
    raise AssertionError


def _slower(call):
    return "slower" if call == 1 else None


def _refusal(call):
    return "refused" if call == 2 else None


def test_cpus_import_no_backend_of_gpus():
    """Runs every operation in a process of its own."""
    code = """
import sys, jax.numpy as jnp, pallas_kernels as p
x, head = jnp.ones((2, 64)), jnp.ones((128, 64))
p.product(x, head), p.split_product(x, head), p.largest_product(x, head), p.swiglu(x, head.reshape(1, 2, 64, 64))
p.add_norm(x, x, x[0], 1e-6), p.quantize_rows(x), p.quantize_gated(jnp.ones((2, 1, 2, 4)), x[:, 0], jnp.ones((1, 2, 4)))
p.experts(x, head.reshape(1, 2, 64, 64), head[None, :64], jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
pool, ints, angles = jnp.ones((4, 2, 16, 64)), jnp.ones((1,), int), jnp.ones((1, 1, 32))
rotary = p.Rotary(angles, angles)
table = jnp.zeros((1, 2), int)
p.write_attend(pool, pool, jnp.ones((1, 1, 2, 3, 64)), ints[None], rotary, table, ints)
p.write_context(pool, pool, [jnp.ones((1, 1, 2, 2, 64))], ints[None], rotary, [None], {0: 0})
pallas = "jax.experimental.pallas"
gpu = (f"{pallas}.triton", f"{pallas}.mosaic_gpu", "jax.experimental.mosaic", "jaxlib.triton")
print(sorted(name for name in sys.modules if name.startswith(gpu)))
"""
    environment = {"PYTHONPATH": str(pathlib.Path(pallas_kernels.__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


def test_benchmarks_are_imported_by_nobody():
    for path in pathlib.Path(pallas_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [*names, *([node.module] if isinstance(node, ast.ImportFrom) else [])]
            assert not [name for name in modules if name and name.split(".")[-1] == "bench"], path
