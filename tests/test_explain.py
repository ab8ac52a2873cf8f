"""`python -m dflash_jax.explain`: it names the calls that a traced round makes, and what serves them."""

from __future__ import annotations

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import explain
from dflash_jax.engine.device.acceptance import accepted
from dflash_jax.engine.device.slots import DEFERRED, Caches, FlatParams, Slots, StepSpec, Tables
from dflash_jax.engine.device.steps import greedy_round
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import draft_config, target_config
from dflash_jax.state.paged_kv import PagedKVCache, Place
from dflash_jax.weights.formats.fp8 import quantize_draft
from dflash_jax.weights.formats.screened import shapes_of_screen
from dflash_jax.weights.parameters import build, parameters_of
from dflash_jax.weights.tables import checkpoint_table
from pallas_kernels import _compat
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.registry import Device, Operation
from tests.packers import AUTO_ROUND
from tests.pairs import GOLDEN

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}

TARGET = {  # two layers in the widths of Qwen3-8B
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
DRAFT = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_target_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 2048,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 151669},
}
FP8 = ["--draft-quantization", "fp8", "--kv-cache-dtype", "fp8"]
H100 = Device("cuda", (9, 0))
UNSEEN = {"paged_attention", "write_kv"}  # rounds that attend in one kernel make no such calls; prefills do


@pytest.fixture
def models(tmp_path):
    """Flags of folders with the two files."""
    for name, raw in (("target", TARGET), ("draft", DRAFT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    return ["--model", str(tmp_path / "target"), "--draft-model", str(tmp_path / "draft")]


def key(argument):
    """What choices depend on: dtype and shape, all tokens on one axis; masks and numbers as they are."""
    if isinstance(argument, Arguments):
        arrays = argument.q, argument.page_table
        pages = argument.k_pages.shape[1:], argument.k_pages.dtype
        return *((x.shape, x.dtype) for x in arrays), pages, argument.mask, argument.window
    if isinstance(argument, int | str):
        return argument
    if isinstance(argument, tuple):
        return tuple(map(key, argument))
    if not isinstance(argument, jax.Array | jax.ShapeDtypeStruct):
        return jnp.dtype(argument)
    shape = argument.shape
    return (shape if len(shape) == 4 else (math.prod(shape[:-1]), shape[-1])), argument.dtype


def keys(name, call):
    if name in ("write_kv", "write_context"):  # the size of a pool is not known to `explain`
        return name, call[0].shape[1:], call[0].dtype
    return name, *map(key, call)


def picked_by_a_round(monkeypatch, step, kv_dtype):
    """Every call that is left to the registry while an engine's greedy round is traced for an H100: what serves it."""
    picked = {}
    original = Operation.pick

    def pick(self, name, call, **how):
        implementation = original(self, name, call, **how)
        if name is None:
            picked[keys(self.name, call)] = implementation.name
        return implementation

    monkeypatch.setattr(Operation, "pick", pick)
    monkeypatch.setattr(_compat, "compute_capability", lambda: H100.generation)
    struct, pages = jax.ShapeDtypeStruct, -(-step.context // step.page_size)
    target, draft = target_config(TARGET), draft_config(DRAFT)
    params = [
        build(parameters_of(checkpoint_table(config), config), lambda parameter: struct(parameter.shape, jnp.bfloat16))
        for config in (target, draft)
    ]
    params[0]["screen"] = shapes_of_screen(TARGET["vocab_size"], TARGET["hidden_size"])
    mesh = Mesh.of(1)
    if step.is_quantized:
        quantize = functools.partial(quantize_draft, config=draft, place=mesh.place)
        params[1] = jax.eval_shape(lambda draft, target: quantize(draft, target=target), params[1], params[0])

    def cache(pools, groups):
        return PagedKVCache(pools, pools, places=tuple(Place(group, group, 0) for group in groups), mesh=mesh)

    def run(params, pools, draft_pools, features, slots, tables):
        caches = Caches(cache(pools, (0, 0)), cache(draft_pools, (1, 0)), features)
        spec = StepSpec(target, draft, step.tokens, mesh)
        state = Slots(slots), caches, Tables(tables)
        after = greedy_round(FlatParams.of(params), *state, spec=spec, length=step.tokens, confirm=accepted)
        return jax.tree.leaves(after)  # no caches of shapes, whose types are checked

    pool = functools.partial(struct, (64, 8, step.page_size, 128))
    pools, draft_pools = [pool(kv_dtype)], [pool(jnp.bfloat16)] * 2
    features, slots = struct((64, DEFERRED, 2 * 4096), jnp.bfloat16), struct((64, 3), jnp.int32)
    jax.eval_shape(
        run, tuple(params), pools, draft_pools, features, slots, struct((step.batch, 2 * pages + 2), jnp.int32)
    )
    return picked


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("options", [[], FP8], ids=["bf16", "fp8"])
def test_it_names_the_calls_of_a_round(monkeypatch, models, batch, options):
    args = explain.parse_args([*models, "--batch-size", str(batch), "--draft-kv-cache-dtype", "bfloat16", *options])
    steps = list(explain.steps_of(args, H100))
    explained = {
        keys(explanation.call.operation.name, explanation.call.arguments): explanation.chosen
        for step in steps
        for explanation in explain.explain(*H100, step.calls())
    }
    picked = picked_by_a_round(monkeypatch, steps[-1], steps[0].kv_dtype)
    assert {call: explained.get(call) for call in picked} == picked
    assert {name for name, *_ in explained.keys() - picked.keys()} <= UNSEEN


@pytest.mark.parametrize(("name", "bits"), [("q35_int4_autoround", "int4"), ("q35_fp8_block", "fp8")])
def test_it_names_the_products_of_a_quantised_target(name, bits):
    args = explain.parse_args(["--model", str(GOLDEN / name / "target"), "--dtype", "bfloat16"])
    target = next(explain.steps_of(args, H100))
    calls = [(call.label.rpartition(" x ")[2], call.operation.name) for call in target.calls()]
    products = {label.split()[0]: operation for label, operation in calls if operation.endswith("product")}
    packed = {"qkv_proj", "o_proj", "down_proj", "out_proj"}
    assert {operation for label, operation in calls if label.startswith("gate_up_proj")} == {"quantized_swiglu"}
    assert {weight for weight, operation in products.items() if operation == f"{bits}_product"} == packed
    assert products["head"] == "largest_product"
    [beside] = {label for label, operation in calls if operation == "quantized_product_beside"}
    assert re.fullmatch(
        rf"in_proj {'4' if bits == 'int4' else '8'} bits \[\d+, \d+\] and in_proj_ba bfloat16\[\d+, \d+\]", beside
    )


@pytest.mark.parametrize(("quantization", "name"), [(AUTO_ROUND, "int4_experts"), (FP8_BLOCKS, "fp8_experts")])
def test_it_names_the_experts_of_a_quantised_target(tmp_path, quantization, name):
    raw = json.loads((GOLDEN / "q35_moe_tied" / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    args = explain.parse_args(["--model", str(tmp_path), "--dtype", "bfloat16"])
    calls = {call.operation.name: call for call in next(explain.steps_of(args, H100)).calls() if "xperts" in call.label}
    assert list(calls) == [name]
    assert calls[name].label == f"3 of experts {4 if name[0] == 'i' else 8} bits [8, 2, 24, 64]"
    [router] = [call for call in next(explain.steps_of(args, H100)).calls() if " x gate " in call.label]
    assert router.operation.name == "product"


def test_it_names_the_calls_of_a_hybrid():
    """Queries have gates beside them in one product, and Gated DeltaNet has its own."""
    folder = GOLDEN / "q35_dense"
    args = explain.parse_args(["--model", str(folder / "target"), "--draft-model", str(folder / "draft")])
    target = next(step for step in explain.steps_of(args, H100) if not step.is_draft)
    calls = {
        (explained.call.operation.name, explained.call.label) for explained in explain.explain(*H100, target.calls())
    }
    assert {"gated_delta_verify", "gated_delta_fold", "gated_delta_prefill"} <= {name for name, _ in calls}
    products = [label for name, label in calls if name == "product"]
    for weight in ("qkv_proj bfloat16[384, 64]", "out_proj bfloat16[64, 64]"):
        assert any(weight in label for label in products)
    [beside] = [label for name, label in calls if name == "product_beside"]
    assert beside.endswith("x in_proj bfloat16[192, 64] and in_proj_ba bfloat16[8, 64]")


def test_the_table(models, capsys):
    assert explain.main([*models, "--compute-capability", "9.0", "--batch-size", "1", "4"]) == 0
    title, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "On an NVIDIA GPU of compute capability 9.0:"
    assert head == "| batch | model | operation | call | served by | others |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    served = {(batch, model, call.split("x ")[-1].split(" ")[0]): by for batch, model, _, call, by, _ in cells}
    assert served["1", "target", "qkv_proj"] == "weight_first"
    assert served["4", "target", "qkv_proj"] == "mosaic"
    [others] = {others for batch, _, _, call, _, others in cells if batch == "1" and "x qkv_proj" in call}
    reason = "mosaic: It was measured faster for 17 to 256 tokens; these are 16."
    narrow = "narrow: It was measured faster for weights of up to 256 rows; these are 6144."
    assert others == f"{reason} {narrow} " + " ".join(
        f"{slower}: 'weight_first' is preferred." for slower in ("triton", "reference")
    )


def test_without_options_it_speaks_of_the_embedded_pair_and_this_device(capsys):
    assert explain.main(["--batch-size", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"On {Device.default()}:")
    assert "| 1 | drafter | write_context |" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--platform", "cuda"], "give a compute capability for cuda, and only for cuda"),
        (["--platform", "tpu", "--compute-capability", "9.0"], "give a compute capability for cuda, and only for cuda"),
        (["--model", "nowhere"], "nowhere is not a folder"),
        (["--page-size", "48", "--dtype", "bfloat16", "--model", "/"], "config.json"),
    ],
)
def test_mistakes_are_told_in_a_sentence(capsys, options, message):
    assert explain.main(options) == 2
    assert message in capsys.readouterr().err


def test_a_drafter_is_needed_to_quantise_one(models, capsys):
    assert explain.main([*models[:2], "--draft-quantization", "fp8"]) == 2
    assert "needs a drafter" in capsys.readouterr().err
