"""Tables of tensors: the name, shape and axis order of every tensor of every architecture.

A table maps a tensor's name in the checkpoint to its axes:

    V vocabulary · U draft vocabulary · D model width · C captured features, D of each capture layer · F mlp width
    N query heads · K kv heads · H head size
    HK key heads of Gated DeltaNet, each with c channels of the convolution, r value heads of size dv, z = r dv

Axes in parentheses are one axis in the checkpoint and several in our arrays: `"D (N H)"` is stored as [D, N*H] and held
as [D, N, H]. Our arrays keep the checkpoint's order [out, in]: tensor cores want that K-major operand, and loading a
tensor is a reshape of the mapped file, or a copy where its rows are moved (`orders`). (CPUs hold the transpose:
`formats.transposed`.)

Five names exist for the arrays that our models hold of them alone (`parameters`):

    R query heads of a kv head, N / K · 2R these and their gates · J tensors side by side in a fused array
    E equal parts of the mlp width · I width of such a part, F / E

A mixture of experts has X experts of M hidden units, whose matrices are [X, 2, M, D], gate and up, and [X, D, M]. Its
shared expert is an MLP with the letters SE, SI and SF.
"""

from __future__ import annotations

import math
import re

from dflash_jax.spec import DecoderConfig, Dense, DraftConfig, Experts, GatedDelta, TargetConfig
from dflash_jax.weights.naming import Naming, default_naming

Table = dict[str, str]  # tensor name -> axes

MOST_PARTS = 16  # parts of the mlp width (E): at most so many devices can share it

# Tensors that checkpoints may hold and our models do not need.
IGNORED_TENSORS = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$"  # recomputed; old Llama files have it
    r"|\.input_scale$"  # static scales of activations, which are not quantised
    r"|\.self_attn\.(attn\.)?(q|prob)_scale$|\.q_proj\.(q|output)_scale$"  # for fp8 queries: ours are not quantised
    r"|^(embed_tokens|verifier_lm_head|verifier_norm)\.weight$|^t2d$"  # speculators: copies of the target's
)

# Names of the scale of a layer's stored keys (x = k) and values (x = v); real value = stored value * scale.
KV_SCALE_NAMES = (
    "{x}_scale",  # compressed-tensors, which replaced the older names
    "attn.{x}_scale",  # vLLM
    "{x}_proj.{x}_scale",  # ModelOpt
    "{x}_proj.output_scale",  # Quark, and early compressed-tensors
    "qkv_proj.{x}_scale",
    "kv_scale",  # AutoFP8: one scale for both
)


def attention_table(config: DecoderConfig) -> Table:
    """Tensors of one attention block."""
    queries = "2R" if config.has_gated_attention else "R"
    table = {
        "q_proj.weight": f"(K {queries} H) D",
        "k_proj.weight": "(K 1 H) D",
        "v_proj.weight": "(K 1 H) D",
        "o_proj.weight": "D (N H)",
    }
    if config.attention_bias:
        table |= {
            "q_proj.bias": f"(K {queries} H)",
            "k_proj.bias": "(K 1 H)",
            "v_proj.bias": "(K 1 H)",
            "o_proj.bias": "D",
        }
    if config.qk_norm:
        table |= {"q_norm.weight": "H", "k_norm.weight": "H"}
    return table


def gated_delta_table(*, key_heads_together: bool = False) -> Table:
    """Tensors of one Gated DeltaNet block; `Naming` says what the argument is."""
    apart = {"qkv": "(HK c) D", "z": "(HK z) D", "b": "(HK r 1) D", "a": "(HK r 1) D"}
    together = {"qkvz": "(HK c+z) D", "ba": "(HK r 2) D"}
    return {
        **{f"in_proj_{name}.weight": axes for name, axes in (together if key_heads_together else apart).items()},
        "conv1d.weight": "(HK c) 1 taps",
        "A_log": "(HK r)",
        "dt_bias": "(HK r)",
        "norm.weight": "dv",
        "out_proj.weight": "D (HK z)",
    }


def mlp_table(config: DecoderConfig) -> Table:
    """Tensors of one SwiGLU block."""
    table = {"gate_proj.weight": "(E 1 I) D", "up_proj.weight": "(E 1 I) D", "down_proj.weight": "D F"}
    if config.mlp_bias:
        table |= {"gate_proj.bias": "(E 1 I)", "up_proj.bias": "(E 1 I)", "down_proj.bias": "D"}
    return table


def sparse_mlp_table(experts: Experts, *, experts_apart: bool = False) -> Table:
    """Tensors of one mixture of experts: the router, the experts, and the shared expert with its gate."""
    table = {"gate.weight": "X D"} | {f"experts.{name}": axes for name, axes in experts_table().items()}
    if experts_apart:
        table = {"gate.weight": "X D"}
        for i in range(experts.count):
            table |= {f"experts.{i}.{name}_proj.weight": "M D" for name in ("gate", "up")}
            table |= {f"experts.{i}.down_proj.weight": "D M"}
    if experts.shared_width is not None:
        table |= {f"shared_expert.{name}": axes for name, axes in shared_expert_table().items()}
        table |= {"shared_expert_gate.weight": "1 D"}
    return table


def experts_table() -> Table:
    """The stacked matrices of all experts of a layer."""
    return {"gate_up_proj": "X (2 M) D", "down_proj": "X D M"}


def shared_expert_table() -> Table:
    """Tensors of the expert that sees every token."""
    return {"gate_proj.weight": "(SE 1 SI) D", "up_proj.weight": "(SE 1 SI) D", "down_proj.weight": "D SF"}


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


def checkpoint_table(config: TargetConfig | DraftConfig, naming: Naming | None = None) -> Table:
    """Every tensor of a model, by its full name in the checkpoint.

    Args:
        config: the model's.
        naming: how the checkpoint names tensors; None is `default_naming`.
    """
    naming = naming or default_naming(config)
    outer = outer_table(config).items()
    table = {naming.head if name == "lm_head.weight" else naming.prefix + name: axes for name, axes in outer}
    recurrent = gated_delta_table(key_heads_together=naming.key_heads_together)
    for i, spec in enumerate(config.layers):
        is_recurrent = isinstance(spec.mixer, GatedDelta)
        blocks = {
            "": norms_table(),
            "linear_attn." if is_recurrent else "self_attn.": recurrent if is_recurrent else attention_table(config),
            "mlp.": mlp_table(config)
            if isinstance(spec.mlp, Dense)
            else sparse_mlp_table(spec.mlp, experts_apart=naming.experts_apart),
        }
        for block, tensors in blocks.items():
            table |= {f"{naming.prefix}layers.{i}.{block}{name}": axes for name, axes in tensors.items()}
    return table


def kv_scale_names(config: TargetConfig | DraftConfig, layer: int, x: str, naming: Naming | None = None) -> list[str]:
    """Every full tensor name that a layer's scale of keys (x = k) or values (x = v) may have in a checkpoint."""
    prefix = (naming or default_naming(config)).prefix
    return [f"{prefix}layers.{layer}.self_attn.{name.format(x=x)}" for name in KV_SCALE_NAMES]


def sizes(config: DecoderConfig) -> dict[str, int]:
    """The length of each axis by its name."""
    parts = math.gcd(config.intermediate_size, MOST_PARTS)
    queries = config.num_attention_heads // config.num_key_value_heads
    letters = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "H": config.head_dim,
        "R": queries,
        "2R": 2 * queries,
        "1": 1,
        "E": parts,
        "I": config.intermediate_size // parts,
    }
    if isinstance(config, DraftConfig):
        letters["U"] = config.draft_vocab_size or config.vocab_size
        letters["C"] = len(config.target_layer_ids) * config.target_hidden_size
    mixer = config.gated_delta
    if mixer is not None:
        letters |= {"HK": mixer.key_heads, "c": mixer.channels_per_key, "taps": mixer.conv_width}
        letters |= {"r": mixer.values_per_key, "dv": mixer.value_dim, "z": mixer.values_per_key * mixer.value_dim}
        letters |= {"2": 2, "c+z": letters["c"] + letters["z"]}
    if config.experts is not None:
        letters |= {"X": config.experts.count, "2": 2, "M": config.experts.width}
        shared = config.experts.shared_width or 0
        parts = math.gcd(shared, MOST_PARTS)
        letters |= {"SE": parts, "SI": shared // parts, "SF": shared}
    return letters


def checkpoint_shape(axes: str, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of a tensor in the checkpoint."""
    letters = sizes(config.stored)
    return tuple(math.prod(letters[name] for name in group) for group in axis_groups(axes))


def axis_groups(axes: str) -> list[list[str]]:
    """For each axis of the checkpoint's tensor, the axes that our array has for it."""
    return [(grouped or single).split() for grouped, single in re.findall(r"\(([^)]*)\)|(\S+)", axes)]
