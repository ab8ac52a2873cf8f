"""Reading config.json: both spellings, both drafter formats, and one clear sentence for everything wrong."""

import dataclasses

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.spec import (
    Dense,
    FullAttention,
    LayerMask,
    LayerSpec,
    WindowAttention,
    check_draft_fits,
    draft_config,
    target_config,
)
from dflash_jax.spec.draft import default_target_layer_ids
from tests.pairs import DRAFT, TARGET

FULL, SLIDING = "full_attention", "sliding_attention"


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}


def draft(**changes) -> dict:
    dflash = DRAFT["dflash_config"] | changes.pop("dflash_config", {})
    return DRAFT | changes | {"dflash_config": {n: v for n, v in dflash.items() if v is not None}}


# --- targets


def test_head_dim_is_not_hidden_size_over_heads():
    assert target_config(TARGET | {"head_dim": 40}).head_dim == 40
    assert target_config(without(TARGET, "head_dim")).head_dim == 128  # Qwen3's own default
    llama = TARGET | {"architectures": ["LlamaForCausalLM"]}
    assert target_config(without(llama, "head_dim")).head_dim == 8


def test_llama_has_no_qk_norm_and_no_windows():
    config = target_config(
        TARGET
        | {
            "architectures": ["LlamaForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
        }
    )
    assert not config.qk_norm
    assert set(config.layers) == {LayerSpec.attention(None, causal=True)}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [None] * 5),
        ({"sliding_window": 8}, [None] * 5),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, [None, None, None, 8, 8]),
        ({"layer_types": [FULL, SLIDING, FULL, SLIDING, FULL], "sliding_window": 8}, [None, 8, None, 8, None]),
        (
            {"layer_types": [FULL] * 5, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            [None] * 5,
        ),
    ],
)
def test_windows_of_layers(fields, windows):
    assert [mask.window for mask in target_config(TARGET | fields).layers] == windows


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "rope_theta": 1e6}},
        ),
    ],
)
def test_both_spellings_of_rope(old, new):
    base = without(TARGET, "rope_theta")
    assert target_config(base | old) == target_config(base | new)


def test_rope_of_both_is_part_of_the_key():
    config = target_config(TARGET)
    assert hash(config) != hash(target_config(TARGET | {"rope_theta": 2e4}))
    assert config != target_config(TARGET | {"rope_theta": 2e4})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures", "Qwen3ForCausalLM"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps", "missing"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, ["dynamic", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor"]),
        ({"layer_types": [FULL]}, ["1", "num_hidden_layers=5"]),
        ({"layer_types": [SLIDING] * 5}, ["sliding_window", "missing"]),
        ({"layer_types": ["linear_attention"] * 5}, ["linear_attention", "full_attention"]),
        ({"layer_types": 5}, ["layer_types=5", "list"]),
        ({"layer_types": [[FULL]] * 5}, ["layer_types", "list"]),
        ({"architectures": "Qwen3ForCausalLM"}, ["architectures='Qwen3ForCausalLM'", "list"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"rope_theta": float("inf")}, ["rope_theta=inf"]),
        ({"attention_bias": "no"}, ["attention_bias='no'", "true or false"]),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": "x"}, ["max_window_layers='x'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'"]),
        ({"eos_token_id": [1, None]}, ["eos_token_id=[1, None]"]),
        ({"quantization_config": {"weight_block_size": [128]}}, ["weight_block_size=[128]"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "attention_factor": "x"}}, ["attention_factor='x'"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            ["low_freq_factor=4", "high_freq_factor=4"],
        ),
    ],
)
def test_bad_target(fields, words):
    with pytest.raises(ConfigError) as error:
        target_config({n: v for n, v in (TARGET | fields).items() if v is not None}, "some/config.json")
    for word in ["some/config.json", *words]:
        assert word in str(error.value)


# --- drafters


def test_masks_by_layer_type():
    fields = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 8}
    assert draft_config(draft(**fields)).layers == (
        LayerSpec.attention(8, causal=True),
        LayerSpec.attention(None, causal=False),
        LayerSpec.attention(8, causal=True),
    )
    for override in ({"is_causal": False}, {"dflash_config": {"causal": False}}):
        assert draft_config(draft(**fields, **override)).layers[0] == LayerSpec.attention(8, causal=False)
    for override in ({"is_causal": True}, {"dflash_config": {"causal": True}}):
        assert draft_config(draft(**fields, **override)).layers[1] == LayerSpec.attention(None, causal=True)


def test_layers_say_what_they_are_made_of():
    sliding, full = draft_config(draft(layer_types=[SLIDING, FULL], sliding_window=8)).layers
    assert sliding == LayerSpec(WindowAttention(8, causal=True), Dense())
    assert full == LayerSpec(FullAttention(causal=False), Dense())
    assert (sliding.mixer.mask, full.mixer.mask) == (LayerMask("causal", 8), LayerMask("block", None))
    assert (sliding.window, full.window) == (8, None)


def test_window_of_dflash_config():
    config = draft_config(draft(dflash_config={"use_swa": True, "swa_window_size": 32}))
    assert set(config.layers) == {LayerSpec.attention(32, causal=False)}
    typed = draft(layer_types=[SLIDING, FULL], dflash_config={"use_swa": True, "swa_window_size": 32})
    assert draft_config(typed).layers == (LayerSpec.attention(32, causal=True), LayerSpec.attention(None, causal=False))


def test_trained_window_is_kept_when_use_sliding_window_is_unset():
    config = draft_config(draft(layer_types=[SLIDING, FULL], sliding_window=16, use_sliding_window=False))
    assert config.layers[0] == LayerSpec.attention(16, causal=True)


def test_block_size_in_either_place():
    assert draft_config(draft(block_size=9)).block_size == 9
    assert draft_config(without(draft(dflash_config={"block_size": 7}), "block_size")).block_size == 7


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [  # published drafters, and the formula of the reference implementation
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_default_taps(target_layers, draft_layers, ids):
    assert default_target_layer_ids(target_layers, draft_layers) == ids


def test_number_of_taps_may_differ_from_layers():
    raw = draft(dflash_config={"target_layer_ids": [0, 2, 4]})
    assert draft_config(raw).target_layer_ids == (0, 2, 4)


def test_default_taps_are_counted_by_what_fc_takes():
    """Not by the layers of the drafter, which newer ones have fewer of than taps."""
    raw = without(draft(dflash_config={"target_layer_ids": None}), "num_target_layers")
    for features, ids in ((1, (4,)), (2, (1, 5)), (3, (1, 3, 5))):
        assert draft_config(raw, num_target_layers=8, fc_inputs=32 * features).target_layer_ids == ids
    with pytest.raises(ConfigError, match=r"capture layers are unknown: set dflash_config\.target_layer_ids"):
        draft_config(raw, num_target_layers=8)
    with pytest.raises(ConfigError, match=r"set dflash_config\.target_layer_ids"):
        draft_config(raw, fc_inputs=64)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (96, ["target_layer_ids names 2 capture layers", "the features of 3"]),
        (65, ["takes 65 inputs", "target_hidden_size=32"]),
        (0, ["takes 0 inputs"]),
    ],
)
def test_taps_that_fc_contradicts(inputs, words):
    assert draft_config(draft(), fc_inputs=64) == draft_config(draft())
    with pytest.raises(ConfigError) as error:
        draft_config(draft(), "some/config.json", fc_inputs=inputs)
    for word in ["some/config.json", *words]:
        assert word in str(error.value)


def test_models_in_each_others_place_are_named():
    with pytest.raises(ConfigError) as error:
        target_config(DRAFT, "some/config.json")
    advice = "give its folder as --draft-model and the target's as --model."
    assert str(error.value) == f"some/config.json: 'DFlashDraftModel' is a drafter, not a target; {advice}"
    with pytest.raises(ConfigError) as error:
        draft_config(TARGET, "some/config.json")
    advice = "give a drafter's folder as --draft-model."
    assert str(error.value) == f"some/config.json: 'Qwen3ForCausalLM' is a target, not a DFlash drafter; {advice}"


@pytest.mark.parametrize("name", ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"])
def test_shifted_tap_ids_mean_the_same(name):
    shifted = draft(dflash_config={"target_layer_ids": None}) | {name: [2, 4]}
    assert draft_config(shifted) == draft_config(draft(dflash_config={"target_layer_ids": [1, 3]}))


def test_contradicting_tap_ids():
    with pytest.raises(ConfigError, match=r"the capture layers contradict.*\[1, 3\].*\[1, 2\]"):
        draft_config(draft() | {"eagle_aux_hidden_state_layer_ids": [2, 3]})


def speculators(**changes) -> dict:
    layer = without(DRAFT, "architectures", "block_size", "dflash_config", "num_target_layers")
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": layer | {"layer_types": [SLIDING, FULL], "sliding_window": 24},
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": 60,
        "block_size": 6,
        "draft_vocab_size": DRAFT["vocab_size"],
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash"},
    } | changes


def test_speculators_format_keeps_windows_and_shifts_ids():
    native = draft(layer_types=[SLIDING, FULL], sliding_window=24)
    assert draft_config(speculators()) == draft_config(native)
    outside = speculators(sliding_window=20)  # vLLM reads the windows from the top level too
    assert draft_config(outside).layers[0] == LayerSpec.attention(20, causal=True)
    symmetric = draft_config(speculators(sliding_window_non_causal=True))
    assert symmetric.layers == (LayerSpec.attention(24, causal=False), LayerSpec.attention(None, causal=False))


def test_speculators_reduced_vocabulary():
    assert draft_config(speculators()).draft_vocab_size is None
    assert draft_config(speculators(draft_vocab_size=20)).draft_vocab_size == 20


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (draft(block_size=1), ["block_size=1", "at least 2"]),
        (without(draft(), "block_size"), ["block_size", "missing"]),
        (draft(dflash_config={"mask_token_id": None}), ["mask_token_id"]),
        (draft(architectures=["DFlash2DraftModel"]), ["DFlash2DraftModel", "DFlashDraftModel"]),
        (draft(dflash_config={"projector_type": "domino"}), ["domino"]),
        (draft(final_logit_softcapping=30.0), ["final_logit_softcapping=30.0"]),
        (draft(dflash_config={"target_layer_ids": []}), ["target_layer_ids"]),
        (draft(is_causal="no"), ["is_causal='no'", "true or false"]),
        (draft(dflash_config={"causal": "false"}), ["causal='false'", "true or false"]),
        (draft(draft_vocab_size="x"), ["draft_vocab_size='x'"]),
        (draft(draft_vocab_size=62), ["draft_vocab_size=62", "61"]),
        (draft(block_size=6, dflash_config={"block_size": 8}), ["block_size=6", "dflash_config has 8"]),
        (speculators(speculators_model_type="eagle3"), ["eagle3", "dflash"]),
        (without(speculators(), "transformer_layer_config"), ["transformer_layer_config"]),
    ],
)
def test_bad_drafter(raw, words):
    with pytest.raises(ConfigError) as error:
        draft_config(raw, "some/config.json")
    for word in ["some/config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, ["hidden_size=64", "32"]),
        ({"target_hidden_size": 48}, ["48", "32"]),
        ({"vocab_size": 62}, ["vocab_size=62", "61"]),
        ({"dflash_config": {"mask_token_id": 61}}, ["mask_token_id=61"]),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, ["[5]", "0 to 4"]),
        ({"dflash_config": {"target_layer_ids": [-1, 2]}}, ["[-1]", "0 to 4"]),
    ],
)
def test_drafter_that_does_not_fit(changes, words):
    with pytest.raises(ConfigError) as error:
        check_draft_fits(target_config(TARGET), draft_config(draft(**changes)), "draft/config.json")
    for word in ["draft/config.json", *words]:
        assert word in str(error.value)


# --- options


def options(**changes):
    args = EngineArgs(max_num_seqs=2, max_num_batched_tokens=64, page_size=16)
    return EngineConfig.of(dataclasses.replace(args, **changes), target_config(TARGET), draft_config(DRAFT))


def test_options_resolve():
    config = options()
    assert (config.dtype, config.kv_cache_dtype) == ("float32", "float32")
    assert (config.max_model_len, config.num_speculative_tokens) == (512, 5)
    assert (config.draft_quantization, options(draft_quantization="fp8").draft_quantization) == (None, "fp8")
    assert options(dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert options(kv_cache_dtype="fp8").kv_cache_dtype == "float8_e4m3fn"
    assert options(kv_cache_dtype="fp8").draft_kv_cache_dtype == "float8_e4m3fn"
    mixed = options(kv_cache_dtype="bfloat16", draft_kv_cache_dtype="fp8_e5m2")
    assert (mixed.kv_cache_dtype, mixed.draft_kv_cache_dtype) == ("bfloat16", "float8_e5m2")
    half = dataclasses.replace(target_config(TARGET), dtype="float16")
    assert EngineConfig.of(EngineArgs(), half, None).dtype == "bfloat16"
    assert EngineConfig.of(EngineArgs(), half, None, on_cpu=True).dtype == "float32"
    assert EngineConfig.of(EngineArgs(dtype="bfloat16"), half, None, on_cpu=True).dtype == "bfloat16"
    assert (config.adaptive_speculation, options(num_speculative_tokens=5).adaptive_speculation) == (True, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, ["float16", "bfloat16"]),
        ({"kv_cache_dtype": "int4"}, ["int4", "fp8_e4m3"]),
        ({"draft_kv_cache_dtype": "int4"}, ["draft_kv_cache_dtype='int4'", "fp8_e4m3"]),
        ({"draft_quantization": "int3"}, ["draft_quantization='int3'", "fp8", "int4"]),
        ({"max_model_len": 513}, ["513", "512"]),
        ({"max_model_len": 0}, ["max_model_len=0"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0"]),
        ({"page_size": 0}, ["page_size=0"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization=1.5"]),
        ({"kv_cache_memory_bytes": -1}, ["kv_cache_memory_bytes=-1"]),
        ({"max_num_queued_seqs": 0}, ["max_num_queued_seqs=0"]),
        ({"compile_at_start": 1}, ["compile_at_start=1"]),
        ({"num_speculative_tokens": 7}, ["7", "1 to 5"]),
        ({"num_speculative_tokens": 0}, ["0", "1 to 5"]),
    ],
)
def test_bad_options(changes, words):
    with pytest.raises(ConfigError) as error:
        options(**changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("changes", [{"num_speculative_tokens": 3}, {"draft_quantization": "fp8"}])
def test_drafts_need_a_drafter(changes):
    with pytest.raises(ConfigError, match="draft_model"):
        EngineConfig.of(EngineArgs(**changes), target_config(TARGET), None)
