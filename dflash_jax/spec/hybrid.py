"""What the `config.json` of a hybrid says beyond a dense model's: Qwen3-Next, 3.5 and 3.6 with Gated DeltaNet layers.

Source: transformers' Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig, whose defaults these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.spec.fields import Fields
from dflash_jax.spec.model import FullAttention, GatedDelta, LayerSpec

NEXT = "Qwen3NextForCausalLM"
ARCHITECTURES = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    NEXT,
)
HEAD_DIM = 256
PARTIAL_ROTARY_FACTOR = 0.25
FULL_ATTENTION_INTERVAL = 4  # every fourth layer has attention

GATES: dict[str, Literal["silu", "sigmoid"]] = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
OUTER_FIELDS = ("dtype", "torch_dtype", "quantization_config", "eos_token_id")  # stand beside the text's, or inside it


def text_fields(fields: Fields) -> Fields:
    """The fields of the language model, which stand in `text_config` or, in text-only files, at the top level.

    `tie_word_embeddings` of the top level comes before that of `text_config`, as in transformers.
    """
    text = fields.sub("text_config")
    if not text.raw:
        return fields
    outer = {name: fields.get(name) for name in OUTER_FIELDS}
    inner = {name: value for name, value in text.raw.items() if value is not None}
    tied = fields.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return Fields({**outer, **inner, "tie_word_embeddings": tied}, text.where)


def text_raw_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `config.json` of the language model alone: the fields of `text_config` at the top level.

    Args:
        raw: the `config.json` of a model; one without `text_config` is returned as it is.
    """
    fields = Fields(raw, "config.json")
    if not fields.sub("text_config").raw:
        return raw
    text = {name: value for name, value in text_fields(fields).raw.items() if value is not None}
    kind = "Qwen3_5Moe" if "Moe" in fields.architecture(ARCHITECTURES) else "Qwen3_5"
    model_type = "qwen3_5_moe_text" if kind == "Qwen3_5Moe" else "qwen3_5_text"
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": model_type} | text


def hybrid_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """The layers of a hybrid, by `layer_types`, or every `full_attention_interval`-th with attention.

    Raises:
        ConfigError: an unknown kind of layer, an impossible size, or attention without gates.
    """
    count = fields.positive_int("num_hidden_layers")
    types = fields.layer_types(count, ("linear_attention", "full_attention"))
    if types is None:
        interval = fields.positive_int("full_attention_interval", FULL_ATTENTION_INTERVAL)
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate=false is not supported; use a checkpoint whose attention has gates.")
    attention = LayerSpec(FullAttention(gated=True))
    recurrent = LayerSpec(_gated_delta(fields)) if "linear_attention" in types else attention
    return tuple(attention if kind == "full_attention" else recurrent for kind in types)


def _gated_delta(fields: Fields) -> GatedDelta:
    key_heads = fields.positive_int("linear_num_key_heads", 16)
    value_heads = fields.positive_int("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.error(
            f"linear_num_value_heads={value_heads} must be a multiple of linear_num_key_heads={key_heads}."
        )
    gate = fields.get("output_gate_type", "silu")
    if not isinstance(gate, str) or gate not in GATES:
        raise fields.error(f"output_gate_type={gate!r} is not supported; supported are {', '.join(GATES)}.")
    return GatedDelta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.positive_int("linear_key_head_dim", 128),
        value_dim=fields.positive_int("linear_value_head_dim", 128),
        conv_width=fields.positive_int("linear_conv_kernel_dim", 4),
        activation=GATES[gate],
    )
