"""Write parameters to a Hugging Face folder that `loader`, vLLM and the reference implementation can read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array
from safetensors.numpy import save_file

from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.spec import DraftConfig, LayerSpec, RopeConfig, TargetConfig
from dflash_jax.spec.hybrid import text_raw_config
from dflash_jax.weights.formats.protocol import Weight
from dflash_jax.weights.loader import Params
from dflash_jax.weights.parameters import FLOAT32, Parameter, build, checkpoint_tensors, output_axes, parameters_of
from dflash_jax.weights.safetensors import INDEX_NAME, SINGLE_NAME
from dflash_jax.weights.tables import checkpoint_table

WeightDtype = Literal["float32", "bfloat16", "fp8_e4m3"]

# Dtype of the tensors that are not quantised; with fp8_e4m3, projections alone are.
WIDE_DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.bfloat16),
}
# Tensors that fp8_e4m3 quantises. in_proj_a and in_proj_b of Gated DeltaNet are small, and its decays depend on them.
QUANTIZED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "fc.weight")
FP8_LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)  # 448, the largest e4m3 number

# Weights only, one scale for each row. Modules are given by class, since vLLM renames those of a drafter.
# Source: compressed-tensors' QuantizationConfig, as vLLM reads it (compressed_tensors.py, W8A16Fp8).
FP8_QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
    "kv_cache_scheme": None,
}

ROPE_FIELDS = {  # fields of RopeConfig that each rope_type writes, besides rope_type and theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def save_model(
    folder: Path,
    raw_config: Mapping[str, Any],
    config: TargetConfig | DraftConfig,
    params: Params,
    dtype: WeightDtype,
) -> None:
    """Write `model.safetensors`, then `config.json`; each file is replaced whole or not at all.

    Args:
        folder: created if absent; other files in it stay.
        raw_config: the JSON object that `config` was read from; its `quantization_config` is replaced to fit `dtype`.
            Of a hybrid the language model alone is written, with its fields at the top level.
        config: the model's.
        params: nested dicts of arrays and weights, as the Flax modules take them; quantised ones are dequantised.
        dtype: dtype of the stored weights. With fp8_e4m3, projections are fp8 with a float32 scale for each row, in
            compressed-tensors' format, and the rest is bfloat16.

    Raises:
        ConfigError: the dtype is unknown.
        CheckpointError: the folder has an index of other weights, which readers would prefer.
    """
    if dtype not in WIDE_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown; choose one of {', '.join(WIDE_DTYPES)}.")
    if (folder / INDEX_NAME).exists():
        raise CheckpointError(f"{folder} holds {INDEX_NAME}, which would hide the new weights; give another folder.")
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in checkpoint_tensors(config, dense_params(config, params)).items():
        tensors |= stored(name, tensor, dtype)
    text = text_raw_config(raw_config)
    raw = {name: value for name, value in text.items() if name != "quantization_config"}
    quantization = {"quantization_config": FP8_QUANTIZATION} if dtype == "fp8_e4m3" else {}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / SINGLE_NAME, tensors)
    save_json(folder / "config.json", raw | quantization)


def dense_params(config: TargetConfig | DraftConfig, params: Params) -> Params:
    """Parameters with a float32 array in the place of each weight that is no array.

    A weight's product with the identity is its transpose, exactly: every sum has one term that is not 0. So it is for
    all formats that multiply plain activations.
    """

    def dense(parameter: Parameter) -> Array:
        leaf, rows = parameter.of(params), output_axes(parameter.axes)
        if not isinstance(leaf, Weight):
            return leaf
        identity = jnp.eye(math.prod(parameter.shape[rows:]))
        return _transposed(leaf, identity).T.reshape(parameter.shape)

    return build(parameters_of(checkpoint_table(config), config), dense)


@jax.jit
def _transposed(weight: Weight, identity: Array) -> Array:
    return weight.product(identity)


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file; it is replaced whole or not at all."""
    with _replacing(path) as part:
        # safetensors writes the raw memory of an array and ignores strides.
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, part, metadata={"format": "pt"})  # transformers refuses files without it


def save_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file; it is replaced whole or not at all."""
    with _replacing(path) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces it, readable by all, unless an error occurs."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def stored(name: str, array: np.ndarray, dtype: WeightDtype) -> dict[str, np.ndarray]:
    """The tensors that the file holds for one tensor: itself in the stored dtype, and its scale if quantised."""
    if name == "d2t":
        return {name: array.astype(np.int64)}
    if name.endswith(FLOAT32):
        return {name: array.astype(np.float32)}
    if dtype == "fp8_e4m3" and name.endswith(QUANTIZED):
        weight, scale = quantize_rows(array)
        return {name: weight, f"{name}_scale": scale}
    return {name: array.astype(WIDE_DTYPES[dtype])}


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a weight [rows, columns] to float8_e4m3fn; returns it with its float32 scales [rows, 1].

    The largest magnitude of each row becomes 448, the largest e4m3 number.
    """
    wide = weight.astype(np.float32)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    scale = np.maximum(largest / FP8_LARGEST, np.finfo(np.float32).tiny)  # avoids division by zero for a row of zeros
    return (wide / scale).astype(ml_dtypes.float8_e4m3fn), scale


def draft_raw_config(
    config: DraftConfig, num_target_layers: int, *, max_position_embeddings: int = 32768
) -> dict[str, Any]:
    """The `config.json` of a drafter, in the format of the published ones; `draft_config` reads it back.

    Args:
        config: the drafter's; `weight_block_size` is not written, since it describes files that were read.
        num_target_layers: layers of the target.
        max_position_embeddings: the target's: vLLM limits texts to the drafter's value. The default is transformers'.

    Raises:
        ConfigError: the format cannot express the masks of these layers.

    Source: the published checkpoints' config.json; RoPE in the older spelling, which every transformers version reads.
    """
    optional = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if config.target_hidden_size != config.hidden_size else None,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.stored.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        **_rope_fields(config.rope),
        **_mask_fields(config.layers),
        "block_size": config.block_size,
        "num_target_layers": num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
        },
        **{name: value for name, value in optional.items() if value is not None},
    }


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    options = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.rope_type]}
    scaling = {"rope_type": rope.rope_type} | {name: value for name, value in options.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": scaling if options else None}


def _mask_fields(layers: tuple[LayerSpec, ...]) -> dict[str, Any]:
    """Fields of the layers' masks: sliding layers are causal and full ones not, or `is_causal` sets all of them."""
    masks = [layer.mask for layer in layers]
    windows, kinds = {mask.window for mask in masks} - {None}, {mask.mask for mask in masks}
    is_usual = all((mask.mask == "causal") == (mask.window is not None) for mask in masks)
    if len(windows) > 1 or not (is_usual or len(kinds) == 1):
        named = ", ".join(f"{mask.mask} {mask.window or 'full'}" for mask in masks)
        raise ConfigError(
            f"a drafter's config.json cannot say that its layers are {named}; give all sliding layers one window, and "
            "either all layers one mask, or sliding layers causal and full layers block."
        )
    return {
        "layer_types": ["full_attention" if mask.window is None else "sliding_attention" for mask in masks],
        "use_sliding_window": bool(windows),
        "sliding_window": next(iter(windows), None),
        "max_window_layers": len(masks),
        **({} if is_usual else {"is_causal": kinds == {"causal"}}),
    }
