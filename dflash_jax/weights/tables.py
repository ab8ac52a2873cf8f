"""The declarative table of every architecture: names, shapes and orders of its tensors.

A table maps a tensor's name in the checkpoint to its axes, written in the project's letters:

    V vocabulary · U draft vocabulary · D model width · C concatenated taps · F mlp width
    N query heads · K kv heads · H head size · R query heads of a kv head · J tensors side by side
    E equal parts of the mlp width · I rows of such a part

Axes in parentheses are one axis in the checkpoint and several in our arrays: `"D (N H)"` is stored as
[D, N*H] and held as [D, N, H]. Our arrays keep the checkpoint's order [out, in], which is the K-major operand
that the tensor cores want, so loading a tensor is a reshape of the mapped file; only CPUs want it transposed.

Projections of the same input are one array, so that one matrix product reads them: `FUSED`. Those of the heads lie
side by side within each kv head, as "(K R H) D" for queries and "(K 1 H) D" for keys and values become [K, J, H, D]
with J = R + 2, so that devices which share the kv heads hold whole groups of heads; those of the mlp within each of E
parts. The letter that devices may share comes first, so that such an array is one matrix [rows, D] on each of them.

The same table declares the Flax parameters (`declare`), tells the loader what must be in the files and the exporter
what to write (`parameters_of`), and gives each array its sharding (`Parameter.axes`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

import flax.linen as nn
import numpy as np

from dflash_jax.spec import DecoderConfig, DraftConfig, TargetConfig

Table = dict[str, str]  # tensor name -> axes
T = TypeVar("T")

# Parameters, and the tensors that lie side by side in them. The contexts of a drafter need its keys and values alone.
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "target": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "draft": {"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
}

MOST_PARTS = 16  # of the mlp width: as many devices can share it

PROJECTIONS = ("qkv_proj", "q_proj", "kv_proj", "o_proj", "gate_up_proj", "down_proj", "fc")  # matrices but the head

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
        "q_proj.weight": "(K R H) D",
        "k_proj.weight": "(K 1 H) D",
        "v_proj.weight": "(K 1 H) D",
        "o_proj.weight": "D (N H)",
    }
    if config.attention_bias:
        table |= {"q_proj.bias": "(K R H)", "k_proj.bias": "(K 1 H)", "v_proj.bias": "(K 1 H)", "o_proj.bias": "D"}
    if config.qk_norm:
        table |= {"q_norm.weight": "H", "k_norm.weight": "H"}
    return table


def mlp_table(config: DecoderConfig) -> Table:
    """Tensors of one SwiGLU block."""
    table = {"gate_proj.weight": "(E 1 I) D", "up_proj.weight": "(E 1 I) D", "down_proj.weight": "D F"}
    if config.mlp_bias:
        table |= {"gate_proj.bias": "(E 1 I)", "up_proj.bias": "(E 1 I)", "down_proj.bias": "D"}
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


def sizes(config: DecoderConfig) -> dict[str, int]:
    """The number behind each letter."""
    parts = math.gcd(config.intermediate_size, MOST_PARTS)
    letters = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "H": config.head_dim,
        "R": config.num_attention_heads // config.num_key_value_heads,
        "1": 1,
        "E": parts,
        "I": config.intermediate_size // parts,
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


@dataclass(frozen=True)
class Parameter:
    """An array of ours, made of one tensor of a checkpoint or of several side by side.

    Attributes:
        path: where it stands in the parameters: `layers_3`, `mlp`, `gate_up_proj`.
        axes: its letters, one a dimension.
        parts: the shape of each tensor in it, by the tensor's name in the checkpoint.
    """

    path: tuple[str, ...]
    axes: tuple[str, ...]
    parts: Mapping[str, tuple[int, ...]]

    def of(self, params: Mapping[str, Any]) -> Any:
        """What stands there in a model's parameters."""
        return reduce(getitem, self.path, params)

    @property
    def axis(self) -> int:
        """Along which the parts lie side by side."""
        return self.axes.index("J") if "J" in self.axes else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        first, *_ = shapes = list(self.parts.values())
        return (*first[: self.axis], sum(shape[self.axis] for shape in shapes), *first[self.axis + 1 :])

    def join(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The array, of tensors in the checkpoint's shapes."""
        parts = [tensors[name].reshape(shape) for name, shape in self.parts.items()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors in it, in our shapes."""
        ends = np.cumsum([shape[self.axis] for shape in self.parts.values()])
        return dict(zip(self.parts, np.split(array, ends[:-1], axis=self.axis), strict=True))


def output_axes(axes: tuple[str, ...]) -> int:
    """How many axes of a matrix are those of its output rows: [D, ...] gives the model's width, [..., D] takes it."""
    return 1 if axes[0] == "D" else len(axes) - 1


def parameters_of(table: Table, config: DecoderConfig) -> list[Parameter]:
    """The arrays that hold the tensors of a table; their paths begin where its names do."""
    letters = sizes(config)
    fused = FUSED["draft" if isinstance(config, DraftConfig) else "target"]
    whole = {part: name for name, parts in fused.items() for part in parts}
    found: dict[tuple[str, ...], Parameter] = {}
    for tensor, axes in table.items():
        *outer, name = re.sub(r"\.weight$", "", re.sub(r"\.bias$", "_bias", tensor)).split(".")
        base = name.removesuffix("_bias")
        path = _modules(outer) + (whole.get(base, base) + name.removeprefix(base),)
        array_axes = tuple(re.findall(r"\w", axes))
        shape = tuple(letters[axis] for axis in array_axes)
        before = found[path].parts if path in found else {}
        if base in whole:
            array_axes = tuple("J" if axis in "R1" else axis for axis in array_axes)
        found[path] = Parameter(path, array_axes, {**before, tensor: shape})
    return list(found.values())


def _modules(names: list[str]) -> tuple[str, ...]:
    """`model.layers.3.mlp` -> (layers_3, mlp)."""
    joined = re.sub(r"^model(\.|$)", "", ".".join(names))
    return tuple(filter(None, re.sub(r"layers\.(\d+)", r"layers_\1", joined).split(".")))


def build(parameters: Iterable[Parameter], make: Callable[[Parameter], T]) -> dict[str, Any]:
    """Nested dicts, as Flax modules take them, with something for each parameter."""
    tree: dict[str, Any] = {}
    for parameter in parameters:
        *outer, leaf = parameter.path
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[leaf] = make(parameter)
    return tree


def checkpoint_tensors(config: TargetConfig | DraftConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by name, in its shapes, out of a model's parameters; on the host."""
    table, tensors = checkpoint_table(config), {}
    for parameter in parameters_of(table, config):
        for name, part in parameter.split(np.asarray(parameter.of(params))).items():
            tensors[name] = part.reshape(checkpoint_shape(table[name], config))
    return tensors


def declare(module: nn.Module, table: Table, config: DecoderConfig) -> dict[str, Any]:
    """Declare a module's parameters from its table.

    Returns:
        By their local name (`o_proj`, `o_proj_bias`), arrays or what stands in their place (`Quantized`, `Transposed`).
    """
    declared: dict[str, Any] = {}
    for parameter in parameters_of(table, config):
        (name,) = parameter.path
        if module.has_variable("params", name):  # Flax would take the shape of what is inside for a weight's own
            declared[name] = module.get_variable("params", name)
        else:
            declared[name] = module.param(name, initializer(parameter), parameter.shape)
    return declared


def initializer(parameter: Parameter) -> nn.initializers.Initializer:
    """Random weights for a model made from nothing: norms at one, biases at zero, the rest N(0, 0.02)."""
    name = parameter.path[-1]
    if name.endswith("norm"):
        return nn.initializers.ones
    if name.endswith("_bias") or name == "d2t":
        return nn.initializers.zeros
    return nn.initializers.normal(0.02)
