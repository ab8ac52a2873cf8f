"""Compiling at start: afterwards, whatever comes, nothing is compiled."""

import random

import jax
import pytest

from dflash_jax import LLM, SamplingParams, StructuredOutputsParams
from dflash_jax.engine.device.shapes import Shapes, ladder
from dflash_jax.options.engine_config import ROOMY
from dflash_jax.parallel.platform import compiler_options
from tests.pairs import BYTE_VOCABULARY, DRAFT, EOS, MASK, TARGET, prompt, write_byte_tokenizer, write_model


def mixed_params(rng):
    kind = rng.randrange(8)
    common = {"max_tokens": rng.randint(1, 24), "ignore_eos": rng.random() < 0.5, "speculation": rng.random() < 0.7}
    return SamplingParams(
        **common,
        **[
            {"temperature": 0},
            {"temperature": 0.8, "seed": 1},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "n": 2},
            {"temperature": 0, "presence_penalty": 1.0, "logit_bias": {5: 2.0}},
            {"temperature": 0, "logprobs": rng.randint(0, 20)},
            {"temperature": 0, "prompt_logprobs": 1},
            {"temperature": 1.0, "seed": 2, "structured_outputs": StructuredOutputsParams(regex="[ab]{2,30}")},
            {"temperature": 0, "bad_words": ["e"], "logprobs": 2},
        ][kind],
    )


@pytest.mark.parametrize(
    "devices",
    [1, pytest.param(2, marks=[pytest.mark.long, pytest.mark.skipif(jax.device_count() < 2, reason="one GPU")])],
)
def test_nothing_is_compiled_in_service(tmp_path, devices):
    sizes = {"vocab_size": BYTE_VOCABULARY, "eos_token_id": EOS, "num_hidden_layers": 2, "num_target_layers": 2}
    target = write_byte_tokenizer(write_model(tmp_path / "target", TARGET | sizes, 0))
    raw = DRAFT | sizes | {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK}}
    raw |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    raw["block_size"] = 4
    llm = LLM(
        target,
        write_model(tmp_path / "draft", raw, 1),
        max_num_seqs=2 if devices == 1 else 1,
        max_num_batched_tokens=64,
        max_model_len=160,
        page_size=8,
        kv_cache_memory_bytes=165_000,  # too little for two long sequences
        tensor_parallel_size=devices,
        num_speculative_tokens=None if devices == 1 else 3,  # adaptive lengths take many programs
        compile_at_start=True,
    )
    rng = random.Random(0)
    number = 150 if devices == 1 else 60
    params = [mixed_params(rng) for _ in range(number)]
    prompts = [prompt(*rng.choices(range(60), k=rng.choice([1, 3, 9, 30, 70, 130]))) for _ in range(number)]
    outputs = llm.generate(prompts, params)
    assert {output.outputs[0].finish_reason for output in outputs} <= {"length", "stop"}
    assert llm.engine.scheduler.num_preemptions > 0 or devices > 1
    assert llm.engine.num_compiles == 0


def test_the_counter_counts(tmp_path):
    llm = LLM(write_model(tmp_path / "target", TARGET | {"hidden_size": 40}, 0), max_num_seqs=1)
    llm.generate(prompt(1, 2), SamplingParams(temperature=0, max_tokens=3))
    assert llm.engine.num_compiles >= 3  # prefill, its commit, rounds


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("has_experts", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [7, 64, 8192])
def test_shapes_hold_what_comes(on_cpu, adaptive, has_experts, max_num_batched_tokens):
    shapes = Shapes.of(
        max_num_seqs=12,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=40_960,
        table_width=641,
        page_size=64,
        block=16,
        adaptive=adaptive,
        on_cpu=on_cpu,
        has_experts=has_experts,
    )
    assert shapes.batches == (1, 2, 4, 8, 12)
    assert shapes.tables == ((641,) if on_cpu else (64, 641))
    assert shapes.lengths == ((1, 4, 8, 16) if adaptive else (1, 16))
    assert shapes.lengths_at(4) == (shapes.lengths if on_cpu or has_experts else (1, 16))
    assert shapes.lengths_at(8) == ((1, 8, 16) if on_cpu and adaptive else shapes.lengths)
    assert [shapes.batch(n) for n in (1, 3, 12)] == [1, 4, 12]
    assert [shapes.table(n) for n in (65, 641)] == [641, 641]
    known = set(shapes.prefills())
    for prompts in range(1, 13):
        for longest in (1, 15, 16, 17, 33, 500, 9000):
            rows, width = shapes.chunk(prompts, longest)
            assert (rows, width) in known
            assert rows == 1 or rows * width <= max_num_batched_tokens
            assert width == shapes.chunks[0] or width < 2 * longest


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (60, {"max_model_len": 2048, "table_width": 33, "on_cpu": True}),
        (140, {"max_model_len": 2048, "table_width": 33, "on_cpu": False}),
        (140, {"max_model_len": 40_960, "table_width": 641, "on_cpu": False}),
    ],
    ids=["embedded-cpu", "embedded-gpu", "qwen3-8b-gpu"],
)
def test_programs_are_few(most, sizes):
    """Default options need few: on a CPU each takes 280 memory maps, and everywhere seconds of a first start."""
    shapes = Shapes.of(**ROOMY, page_size=64, block=16, adaptive=True, **sizes)
    assert most / 2 < len(set(shapes.programs(None))) <= most


def test_ladder():
    assert ladder(16, 4, 8192) == (16, 64, 256, 1024, 4096, 8192)
    assert ladder(1, 2, 1) == (1,)


@pytest.mark.parametrize(("platform", "on_cpus"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_compiler_options_are_those_of_the_devices(platform, on_cpus):
    """Not of the packages that are installed: beside a GPU's plugin, programs may still run on CPUs."""
    options = compiler_options(platform)
    assert options["xla_gpu_enable_triton_gemm"] is False
    assert ("xla_disable_hlo_passes" in options) == on_cpus
    assert ("xla_cpu_parallel_codegen_split_count" in options) == on_cpus


def test_programs_are_compiled_with_the_options_of_their_devices(tmp_path):
    llm = LLM(write_model(tmp_path, TARGET, 0), max_num_seqs=1)
    program = llm.engine.runner.program(llm.engine.shapes.of_lone_requests()[0])
    assert program.options == compiler_options(jax.default_backend())
