"""Reading a target's `config.json`, and the fields that a drafter's has in common with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_jax.base.values import is_int
from dflash_jax.spec import experts, hybrid
from dflash_jax.spec.fields import Fields
from dflash_jax.spec.model import LayerSpec, RopeConfig, TargetConfig
from dflash_jax.spec.quantization import block_structure, quantization

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", *hybrid.ARCHITECTURES)
DRAFTERS = ("DFlashDraftModel", "DFlashSpeculator")
DEFAULT_WINDOW = 4096  # tokens: Qwen3's default of sliding_window, where use_sliding_window is set
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def target_config(raw: Mapping[str, Any], where: str = "config.json") -> TargetConfig:
    """Read a target's `config.json`.

    Args:
        raw: the parsed file.
        where: the file's name in errors.

    Raises:
        ConfigError: unknown architecture, missing field or impossible value.
    """
    fields = Fields(raw, where)
    advice = "is a drafter, not a target; give its folder as --draft-model and the target's as --model."
    architecture = fields.architecture(ARCHITECTURES, DRAFTERS, advice)
    if architecture in hybrid.ARCHITECTURES:
        return _hybrid_config(hybrid.text_fields(fields), architecture)
    qwen3 = architecture != "LlamaForCausalLM"
    windows = _windows(fields, architecture)
    layers = experts.with_experts(
        tuple(LayerSpec.attention(window, causal=True) for window in windows), fields, architecture
    )
    return TargetConfig(
        **decoder_fields(
            fields,
            qk_norm=qwen3,
            default_head_dim=128 if qwen3 else None,
            has_dense_mlp=experts.has_dense_mlp(layers),
        ),
        **_outer_fields(fields, architecture),
        layers=layers,
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
    )


def _windows(fields: Fields, architecture: str) -> list[int | None]:
    """The window of each layer of a model without recurrent layers."""
    count = fields.positive_int("num_hidden_layers")
    if architecture == "LlamaForCausalLM":  # it has no windows, whatever its config says
        return [None] * count
    is_windowed = fields.flag("use_sliding_window")
    if architecture == "Qwen3MoeForCausalLM":  # all layers or none, as in transformers
        return [fields.positive_int("sliding_window", DEFAULT_WINDOW) if is_windowed else None] * count
    default_window = DEFAULT_WINDOW if is_windowed else None
    return layer_windows(Fields({"sliding_window": default_window, **fields.raw}, fields.where), count)


def _hybrid_config(fields: Fields, architecture: str) -> TargetConfig:
    """The configuration of a hybrid, of the fields of its language model."""
    layers = experts.with_experts(hybrid.hybrid_layers(fields), fields, architecture)
    decoder = decoder_fields(
        fields,
        qk_norm=True,
        default_head_dim=hybrid.HEAD_DIM,
        partial_rotary_factor=hybrid.PARTIAL_ROTARY_FACTOR,
        has_dense_mlp=experts.has_dense_mlp(layers),
    )
    rope: RopeConfig = decoder["rope"]
    longest = fields.positive_int("max_position_embeddings")
    if rope.rope_type == "yarn":  # these files keep the length that the model was trained with
        longest = max(longest, int(rope.factor * rope.original_max_position_embeddings))
    return TargetConfig(
        **decoder,
        **_outer_fields(fields, architecture),
        layers=layers,
        max_position_embeddings=longest,
        zero_centered_norms=True,
    )


def _outer_fields(fields: Fields, architecture: str) -> dict[str, Any]:
    """The arguments of `TargetConfig` that all architectures read alike."""
    return {
        "architecture": architecture,
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "weight_block_size": weight_block_size(fields),
        "quantization": quantization(fields),
    }


def decoder_fields(
    fields: Fields,
    *,
    qk_norm: bool,
    default_head_dim: int | None,
    partial_rotary_factor: float | None = None,
    has_dense_mlp: bool = True,
) -> dict[str, Any]:
    """The arguments of `DecoderConfig` except `layers`; missing fields default as in the Hugging Face classes.

    Args:
        fields: the file's.
        qk_norm: whether queries and keys are normed.
        default_head_dim: H of files that do not say; None is the hidden size over the heads.
        partial_rotary_factor: share of the rotated dimensions in files that do not say; None refuses other than all.
        has_dense_mlp: whether a layer has an MLP of `intermediate_size`.
    """
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.error(f"hidden_act={activation!r} is not supported; supported is 'silu'.")
    hidden, heads = fields.positive_int("hidden_size"), fields.positive_int("num_attention_heads")
    kv_heads = fields.positive_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.")
    head_dim = fields.positive_int("head_dim", default_head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim={head_dim} must be even for rotary embeddings.")
    return {
        "vocab_size": fields.positive_int("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.positive_int("intermediate_size") if has_dense_mlp else 0,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.real("rms_norm_eps"),
        "rope": _rope(fields, head_dim, partial_rotary_factor),
        "qk_norm": qk_norm,
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias") and not qk_norm,  # Qwen3 layers have none
        "dtype": str(fields.get("dtype", fields.get("torch_dtype", "bfloat16"))).removeprefix("torch."),
    }


def _rope(fields: Fields, head_dim: int, default_partial: float | None) -> RopeConfig:
    """Read RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (earlier versions).

    If a file has a value twice, transformers' choice wins: `rope_scaling` over `rope_parameters`, the outer
    `original_max_position_embeddings` over the one inside them.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    scaling = fields.sub(name)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise scaling.error(f"rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    partial = _partial_rotary_factor(scaling, fields, head_dim, default_partial)
    theta = Fields({"rope_theta": scaling.get("rope_theta", fields.get("rope_theta"))}, fields.where)
    original = fields.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
    options: dict[str, Any] = {"rope_type": rope_type, "theta": theta.real("rope_theta", 10_000.0)}
    options["partial_rotary_factor"] = partial
    if rope_type in ("yarn", "llama3"):
        max_positions = fields.positive_int("max_position_embeddings")
        original = Fields({"original_max_position_embeddings": original}, scaling.where).positive_int(
            "original_max_position_embeddings", max_positions
        )
        options["original_max_position_embeddings"] = original
        if rope_type == "yarn" and scaling.get("factor") is None:
            options["factor"] = max_positions / original
    if rope_type != "default" and "factor" not in options:
        options["factor"] = scaling.real("factor")
    if rope_type == "llama3":
        options |= {name: scaling.real(name) for name in ("low_freq_factor", "high_freq_factor")}
        if options["low_freq_factor"] >= options["high_freq_factor"]:
            raise scaling.error(
                f"low_freq_factor={options['low_freq_factor']} must be below "
                f"high_freq_factor={options['high_freq_factor']}."
            )
    if rope_type == "yarn":
        options |= {name: scaling.real(name, default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
        present = (name for name in ("attention_factor", "mscale", "mscale_all_dim") if scaling.get(name))
        options |= {name: scaling.real(name) for name in present}
        options["truncate"] = scaling.flag("truncate", True)
    return RopeConfig(**options)


def _partial_rotary_factor(scaling: Fields, fields: Fields, head_dim: int, default: float | None) -> float:
    """The share of rotated dimensions, which stands inside of the RoPE fields or beside them."""
    outer = fields.get("partial_rotary_factor", 1.0 if default is None else default)
    partial = Fields({"partial_rotary_factor": scaling.get("partial_rotary_factor", outer)}, scaling.where)
    factor = partial.real("partial_rotary_factor")
    if default is None and factor != 1.0:
        raise scaling.error(f"partial_rotary_factor={factor} is not supported; supported is 1.0.")
    rotated = RopeConfig(partial_rotary_factor=factor).rotary_dim(head_dim)
    if factor > 1 or rotated < 2 or rotated % 2:
        raise scaling.error(
            f"partial_rotary_factor={factor} rotates {rotated} of head_dim={head_dim} dimensions; they must be an even "
            "number of at least 2 and at most all."
        )
    return factor


def layer_windows(fields: Fields, num_layers: int) -> list[int | None]:
    """The window of each layer in tokens; None for full attention.

    `layer_types` decides if the file has it. A sliding layer keeps its window even if `use_sliding_window` is unset:
    ignoring a trained window costs most of the acceptance (48 % -> 11 %, tpu-inference #3526).
    """
    window = fields.get("sliding_window")
    types = fields.layer_types(num_layers, ("full_attention", "sliding_attention"))
    if types is None:
        first = fields.get("max_window_layers", 28) if fields.flag("use_sliding_window") and window else num_layers
        if not is_int(first) or first < 0:
            raise fields.error(f"max_window_layers={first!r} must be an integer of at least 0.")
        types = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * max(num_layers - first, 0)
    if "sliding_attention" not in types:
        return [None] * num_layers
    window = fields.positive_int("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


def weight_block_size(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns that share a scale (`weight_scale_inv`) in a block-wise fp8 checkpoint; else None."""
    config = fields.sub("quantization_config")
    size = config.get("weight_block_size", block_structure(config))
    if size is None:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(is_int(n) and n >= 1 for n in size):
        raise fields.error(f"weight_block_size={size!r} must be two positive integers.")
    return size[0], size[1]
