"""Every program of an engine lowers for NVIDIA GPUs, on any machine: one that does not would end an engine's start."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import pytest

from dflash_jax.bench.round_models import PRESETS, drafter_of, random_params
from dflash_jax.engine.device.model import Model
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.programs import runner
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import draft_config, target_config
from pallas_kernels import _compat
from tests.conftest import RUNS_LONG
from tests.kernels.cases import on_an_h200

LAYERS = 8  # of a hybrid six with Gated DeltaNet and two with attention


class Case(NamedTuple):
    """An engine.

    Attributes:
        model: name of a preset, whose widths count.
        options: of the engine.
        target_quantization: of its matrices, made at random.
        draft_quantization: of the drafter's.
        capability: compute capability of the GPU.
        has_drafter: whether it drafts.
    """

    model: str
    options: dict
    target_quantization: str | None = None
    draft_quantization: str | None = None
    capability: tuple[int, int] = (9, 0)
    has_drafter: bool = True


# Limits that no power of two divides: their chunks and tables are cut where nothing else is.
ODD = {"max_model_len": 777, "max_num_seqs": 5}
LONGER = {"max_model_len": 5001, "max_num_seqs": 17, "max_num_batched_tokens": 3001}
CASES = {
    "dense": Case("qwen3-0.6b", ODD | {"num_speculative_tokens": 3, "page_size": 16}),
    "hybrid int4": Case("qwen3.6-27b", ODD | {"kv_cache_dtype": "int4_had"}, "int4", "int4"),
}
OTHERS = {
    "hybrid": Case("qwen3.5-0.8b", LONGER | {"kv_cache_dtype": "fp8_e5m2"}),
    "hybrid fp8": Case("qwen3.6-27b", LONGER | {"num_speculative_tokens": 7}, "fp8"),
    "hybrid, plain": Case("qwen3.6-27b", LONGER, "int4", has_drafter=False),
    "hybrid float32": Case("qwen3.5-4b", ODD | {"dtype": "float32"}),
    "hybrid int4, Ada": Case("qwen3.6-27b", LONGER | {"kv_cache_dtype": "int4_had"}, "int4", "int4", (8, 9)),
    "hybrid int4, Ampere": Case("qwen3.6-27b", LONGER, "int4", "int4", (8, 0)),
    "experts fp8": Case("qwen3.5-35b-a3b", ODD | {"kv_cache_dtype": "fp8"}, "fp8"),
    "experts": Case("qwen3.5-122b-a10b", LONGER),
    "experts int4": Case("qwen3.5-122b-a10b", LONGER, "int4"),
    "experts of Qwen3": Case("qwen3-30b-a3b", LONGER),
    "short": Case("qwen3-1.7b", {"max_model_len": 50, "max_num_seqs": 2}),
    "many": Case("qwen3-8b", {"max_model_len": 1001, "max_num_seqs": 256}),
}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Pretend that the one device is an NVIDIA GPU; nothing runs there."""
    monkeypatch.setattr(Mesh, "platform", property(lambda self: "gpu"))
    monkeypatch.setattr(_compat, "sm_count", lambda: 132)
    monkeypatch.setattr(runner, "has_room", lambda leaves: True)
    monkeypatch.setattr(runner, "key_rounding", lambda *call: None)  # runs the target


def engine_of(case: Case) -> Engine:
    """An engine whose parameters are shapes."""
    raw = PRESETS[case.model] | {"num_hidden_layers": LAYERS}
    draft = draft_config(drafter_of(raw, None), "the drafter") if case.has_drafter else None
    target, mesh = target_config(raw), Mesh.of(1)
    args = EngineArgs(compile_at_start=False, **{"dtype": "bfloat16", "kv_cache_memory_bytes": 2 << 30} | case.options)
    config = EngineConfig.of(args, target, draft)

    def model(config_of_model, seed, quantization):
        params = functools.partial(random_params, config_of_model, config.dtype, mesh, seed, quantization)
        return Model(config_of_model, jax.eval_shape(params), None)

    drafter = model(draft, 1, case.draft_quantization) if draft else None
    return Engine(model(target, 0, case.target_quantization), drafter, mesh=mesh, config=config)


def largest_of_each_step(shapes):
    """The shape of each step that has most tokens, and among those the narrowest tables."""
    largest = {}
    for shape in shapes:
        size = (shape.rows * shape.tokens, -shape.pages)
        if shape.step not in largest or size > largest[shape.step][0]:
            largest[shape.step] = size, shape
    return [shape for _, shape in largest.values()]


@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS.values())],
    ids=[*CASES, *OTHERS],
)  # fmt: skip
def test_programs_lower(monkeypatch, case):
    monkeypatch.setattr(_compat, "compute_capability", lambda: case.capability)
    engine = engine_of(case)
    shapes = engine.shapes.programs()
    failed = {}
    with on_an_h200():
        for shape in shapes if RUNS_LONG else largest_of_each_step(shapes):
            try:
                engine.runner.program(shape).trace().lower(lowering_platforms=("cuda",))
            except Exception as error:
                failed[str(shape)] = repr(error)
    assert not failed
