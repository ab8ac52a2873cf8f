"""The declarative table of every architecture: names, shapes and orders of its tensors.

A table maps a tensor's name in the checkpoint to its axes, written in the project's letters:

    V vocabulary · U draft vocabulary · D model width · C concatenated taps · F mlp width
    N query heads · K kv heads · H head size

Axes in parentheses are one axis in the checkpoint and several in our arrays: `"(N H) D"` is stored as
[N*H, D] and held as [N, H, D]. Our arrays keep the checkpoint's order [out, in], which is the K-major operand
that the tensor cores want, so loading a tensor is a reshape of the mapped file and never a transpose.

The same table declares the Flax parameters (`declare`), tells the loader what must be in the files, and gives
each array its sharding (`layout_axes`).
"""

from __future__ import annotations

import math
import re

import flax.linen as nn
import jax

from dflash_jax.config import DecoderConfig, DraftConfig, TargetConfig

Table = dict[str, str]  # tensor name -> axes

# Tensors that checkpoints carry and no model of ours needs.
IGNORED_TENSORS = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$"  # recomputed; old Llama files store it
    r"|\.input_scale$"  # static activation scales: weights are dequantised at load
    r"|\.self_attn\.(attn\.)?(q|prob)_scale$|\.q_proj\.(q|output)_scale$"  # of fp8 queries: ours are not quantised
    r"|^(embed_tokens|verifier_lm_head|verifier_norm)\.weight$|^t2d$"  # speculators: copies of the target's
)

# Where checkpoints keep the scale of an attention's stored keys (x = k) and values (x = v); real = stored * scale.
KV_SCALE_NAMES = (
    "{x}_scale",  # compressed-tensors, and what the older names became
    "attn.{x}_scale",  # vLLM's own
    "{x}_proj.{x}_scale",  # ModelOpt
    "{x}_proj.output_scale",  # Quark, and compressed-tensors at first
    "qkv_proj.{x}_scale",
    "kv_scale",  # one for both, as AutoFP8 wrote it
)


def attention_table(config: DecoderConfig) -> Table:
    """Tensors of one attention block."""
    table = {
        "q_proj.weight": "(N H) D",
        "k_proj.weight": "(K H) D",
        "v_proj.weight": "(K H) D",
        "o_proj.weight": "D (N H)",
    }
    if config.attention_bias:
        table |= {"q_proj.bias": "(N H)", "k_proj.bias": "(K H)", "v_proj.bias": "(K H)", "o_proj.bias": "D"}
    if config.qk_norm:
        table |= {"q_norm.weight": "H", "k_norm.weight": "H"}
    return table


def mlp_table(config: DecoderConfig) -> Table:
    """Tensors of one SwiGLU block."""
    table = {"gate_proj.weight": "F D", "up_proj.weight": "F D", "down_proj.weight": "D F"}
    if config.mlp_bias:
        table |= {"gate_proj.bias": "F", "up_proj.bias": "F", "down_proj.bias": "D"}
    return table


def norms_table() -> Table:
    """The two norms of a decoder layer."""
    return {"input_layernorm.weight": "D", "post_attention_layernorm.weight": "D"}


def outer_table(config: TargetConfig | DraftConfig) -> Table:
    """Tensors outside the layers."""
    if isinstance(config, TargetConfig):
        head = {} if config.tie_word_embeddings else {"lm_head.weight": "V D"}
        return {"embed_tokens.weight": "V D", "norm.weight": "D", **head}
    own_head = {} if config.draft_vocab_size is None else {"lm_head.weight": "U D", "d2t": "U"}
    return {"fc.weight": "D C", "hidden_norm.weight": "D", "norm.weight": "D", **own_head}


def checkpoint_table(config: TargetConfig | DraftConfig) -> Table:
    """Every tensor of a model, by its full name in the checkpoint."""
    prefix = "model." if isinstance(config, TargetConfig) else ""
    table = {("" if name == "lm_head.weight" else prefix) + name: axes for name, axes in outer_table(config).items()}
    for i in range(config.num_hidden_layers):
        layer = f"{prefix}layers.{i}."
        table |= {layer + name: axes for name, axes in norms_table().items()}
        table |= {f"{layer}self_attn.{name}": axes for name, axes in attention_table(config).items()}
        table |= {f"{layer}mlp.{name}": axes for name, axes in mlp_table(config).items()}
    return table


def kv_scale_names(config: TargetConfig | DraftConfig, layer: int, x: str) -> list[str]:
    """Every full name that the scale of a layer's keys (x = k) or values (x = v) may have."""
    prefix = "model." if isinstance(config, TargetConfig) else ""
    return [f"{prefix}layers.{layer}.self_attn.{name.format(x=x)}" for name in KV_SCALE_NAMES]


def parameter_path(tensor: str) -> tuple[str, ...]:
    """Where a tensor stands in the parameters: `model.layers.3.mlp.up_proj.weight` -> (layers_3, mlp, up_proj)."""
    name = re.sub(r"^model\.", "", tensor)
    name = re.sub(r"layers\.(\d+)", r"layers_\1", name)
    name = re.sub(r"\.bias$", "_bias", re.sub(r"\.weight$", "", name))
    return tuple(name.split("."))


def sizes(config: DecoderConfig) -> dict[str, int]:
    """The number behind each letter."""
    letters = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "H": config.head_dim,
    }
    if isinstance(config, DraftConfig):
        letters["U"] = config.draft_vocab_size or config.vocab_size
        letters["C"] = len(config.target_layer_ids) * config.target_hidden_size
    return letters


def checkpoint_shape(axes: str, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of a tensor in the checkpoint."""
    letters = sizes(config)
    groups = re.findall(r"\(([^)]*)\)|(\w)", axes)
    return tuple(math.prod(letters[a] for a in (grouped or single).split()) for grouped, single in groups)


def layout_axes(axes: str) -> tuple[str, ...]:
    """The letters of our array, one a dimension."""
    return tuple(re.findall(r"\w", axes))


def declare(module: nn.Module, table: Table, config: DecoderConfig) -> dict[str, jax.Array]:
    """Declare a module's parameters from its table; returns them by their local name (`q_proj`, `q_proj_bias`)."""
    letters = sizes(config)
    declared = {}
    for tensor, axes in table.items():
        (name,) = parameter_path(tensor)
        shape = tuple(letters[a] for a in layout_axes(axes))
        declared[name] = module.param(name, initializer(tensor), shape)
    return declared


def initializer(tensor: str) -> nn.initializers.Initializer:
    """Random weights for a model made from nothing: norms at one, biases at zero, the rest N(0, 0.02)."""
    if tensor.endswith("norm.weight"):
        return nn.initializers.ones
    if tensor.endswith((".bias", "d2t")):
        return nn.initializers.zeros
    return nn.initializers.normal(0.02)
