"""Tables of tensors: the name, shape and axis order of every tensor of every architecture.

A table maps a tensor's name in the checkpoint to its axes:

    V vocabulary · U draft vocabulary · D model width · C captured features, D of each capture layer · F mlp width
    N query heads · K kv heads · H head size
    HK key heads of Gated DeltaNet, each with c channels of the convolution, r value heads of size dv, z = r dv

Axes in parentheses are one axis in the checkpoint and several in our arrays: `"D (N H)"` is stored as [D, N*H] and held
as [D, N, H]. Our arrays keep the checkpoint's order [out, in]: tensor cores want that K-major operand, and loading a
tensor is a reshape of the mapped file, or a copy where its rows are moved (`orders`). (CPUs hold the transpose:
`formats.transposed`.)

Projections of the same input are held as one array, so that one matrix product reads them all (`FUSED`). Five names
exist for that alone:

    R query heads of a kv head, N / K · 2R these and their gates · J tensors side by side in a fused array
    E equal parts of the mlp width · I width of such a part, F / E

A mixture of experts has X experts of M hidden units, whose matrices are [X, 2, M, D], gate and up, and [X, D, M]. Its
shared expert is an MLP with the letters SE, SI and SF.

Heads are fused within each kv head: queries "(K R H) D", keys and values "(K 1 H) D" become [K, J, H, D] with
J = R + 2, the kv head's R query heads, then its key, then its value; gated attention has R gates before them. Gate and
up, both "(E 1 I) D", become [E, J, I, D] with J = 2. Gated DeltaNet has [HK, J, D] with J = c + z: query, key, values
and output gates of a key head. So the axis that devices share, K, E or HK, comes first: each device holds whole groups
of heads or parts of the mlp, and its share of the array is one matrix [rows, D].

The same table declares the Flax parameters (`declare`), lists what must be in the files and what the exporter writes
(`parameters_of`), and gives each array its sharding (`Parameter.axes`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

import flax.linen as nn
import numpy as np

from dflash_jax.spec import DecoderConfig, Dense, DraftConfig, Experts, GatedDelta, TargetConfig
from dflash_jax.weights.initial import initializer
from dflash_jax.weights.naming import Naming, default_naming
from dflash_jax.weights.orders import Order, inverse, row_orders

Table = dict[str, str]  # tensor name -> axes
T = TypeVar("T")

# Fused parameters, and the tensors in each; Qwen3-Next's files have those of Gated DeltaNet fused. A drafter's queries
# stay apart: its context needs keys and values alone.
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "target": {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
        "in_proj_ba": ("in_proj_b", "in_proj_a", "in_proj_ba"),
    },
    "draft": {"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
}

MOST_PARTS = 16  # parts of the mlp width (E): at most so many devices can share it

# All matrices except the head.
PROJECTIONS = (
    "qkv_proj",
    "q_proj",
    "kv_proj",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "in_proj",
    "in_proj_ba",
    "out_proj",
    "fc",
)
FLOAT32 = ("A_log", "dt_bias")  # held in float32 whatever the model's dtype: a decay is an exponential of both
# Tensors that checkpoints may hold and our models do not need.
IGNORED_TENSORS = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$"  # recomputed; old Llama files have it
    r"|\.input_scale$"  # static scales of activations, which are not quantised
    r"|\.self_attn\.(attn\.)?(q|prob)_scale$|\.q_proj\.(q|output)_scale$"  # for fp8 queries: ours are not quantised
    r"|^(embed_tokens|verifier_lm_head|verifier_norm)\.weight$|^t2d$"  # speculators: copies of the target's
)

EXPERT = re.compile(r"(^|\.)experts\.\d+\.")  # a tensor of one expert

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
    apart = {"qkv": "(HK c) D", "z": "(HK z) D", "b": "(HK r) D", "a": "(HK r) D"}
    together = {"qkvz": "(HK c+z) D", "ba": "(HK 2r) D"}
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
        letters |= {"2r": 2 * letters["r"], "c+z": letters["c"] + letters["z"]}
    if config.experts is not None:
        letters |= {"X": config.experts.count, "2": 2, "M": config.experts.width}
        shared = config.experts.shared_width or 0
        parts = math.gcd(shared, MOST_PARTS)
        letters |= {"SE": parts, "SI": shared // parts, "SF": shared}
    return letters


def checkpoint_shape(axes: str, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of a tensor in the checkpoint."""
    letters = sizes(config)
    return tuple(math.prod(letters[name] for name in group) for group in _groups(axes))


def _groups(axes: str) -> list[list[str]]:
    """For each axis of the checkpoint's tensor, the axes that our array has for it."""
    return [(grouped or single).split() for grouped, single in re.findall(r"\(([^)]*)\)|(\S+)", axes)]


@dataclass(frozen=True)
class Parameter:
    """A parameter array, made of one checkpoint tensor or of several side by side.

    Attributes:
        path: its keys in the parameters, for example `layers_3`, `mlp`, `gate_up_proj`.
        axes: the name of each axis.
        parts: for each tensor in it, by its checkpoint name, the shape that the tensor has in the array.
        orders: for tensors whose rows are moved, which row of the checkpoint's each row is.
        offset: what is added to the checkpoint's numbers; 1 for norms that multiply by 1 + w.
        is_float32: whether the array is float32 whatever the model's dtype.
        is_stacked: whether the tensors, one or two of each expert, are stacked rather than side by side.
    """

    path: tuple[str, ...]
    axes: tuple[str, ...]
    parts: Mapping[str, tuple[int, ...]]
    orders: Mapping[str, Order] = field(default_factory=dict, compare=False)
    offset: float = 0.0
    is_float32: bool = False
    is_stacked: bool = False

    def of(self, params: Mapping[str, Any]) -> Any:
        """The parameter's entry in a model's parameters."""
        return reduce(getitem, self.path, params)

    @property
    def is_projection(self) -> bool:
        """Whether it is a matrix of its own, and not the head."""
        return self.path[-1] in PROJECTIONS and not self.is_experts

    @property
    def is_experts(self) -> bool:
        """Whether it holds the matrices of all experts of a layer."""
        return "experts" in self.path

    @property
    def axis(self) -> int:
        """The axis along which the parts lie side by side."""
        return self.axes.index("J") if "J" in self.axes else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        first, *_ = shapes = list(self.parts.values())
        if self.is_stacked:
            return (len(shapes) // 2, 2, *first) if "2" in self.axes else (len(shapes), *first)
        return (*first[: self.axis], sum(shape[self.axis] for shape in shapes), *first[self.axis + 1 :])

    def join(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Build the array from tensors in the checkpoint's shapes."""
        if self.is_stacked:
            return np.stack([tensors[name] for name in self.parts]).reshape(self.shape)
        parts = [self._moved(name, tensors[name]).reshape(shape) for name, shape in self.parts.items()]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)
        return array.astype(np.float32) + np.float32(self.offset) if self.offset else array

    def join_rows(self, matrices: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """Build [*O, C] from matrices [O, C] that have a row for each output: packed numbers, or scales.

        Args:
            matrices: by the tensors' names in the checkpoint.
            rows: the number of output axes.
        """
        parts = [self._moved(name, matrices[name]).reshape(*shape[:rows], -1) for name, shape in self.parts.items()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.axis)

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors in the array, by checkpoint name; they still have to be reshaped to the checkpoint's shapes."""
        if self.is_stacked:
            return dict(zip(self.parts, array.reshape(len(self.parts), *array.shape[-2:]), strict=True))
        ends = np.cumsum([shape[self.axis] for shape in self.parts.values()])
        numbers = array.astype(np.float32) - np.float32(self.offset) if self.offset else array
        tensors = dict(zip(self.parts, np.split(numbers, ends[:-1], axis=self.axis), strict=True))
        for name, order in self.orders.items():
            tensors[name] = tensors[name].reshape(len(order), -1)[inverse(order)]
        return tensors

    def _moved(self, name: str, tensor: np.ndarray) -> np.ndarray:
        return tensor[self.orders[name]] if name in self.orders else tensor


def output_axes(axes: tuple[str, ...]) -> int:
    """Number of output axes of a matrix: 1 if it projects to the model width, [D, ...], else all but the last."""
    return 1 if axes[0] == "D" else len(axes) - 1


def parameters_of(table: Table, config: DecoderConfig) -> list[Parameter]:
    """The parameter arrays that hold the tensors of a table; paths are relative to the same module as its names."""
    letters, orders = sizes(config), row_orders(config)
    fused = FUSED["draft" if isinstance(config, DraftConfig) else "target"]
    fused_name = {part: name for name, parts in fused.items() for part in parts}
    parameters: dict[tuple[str, ...], Parameter] = {}
    for tensor, axes in table.items():
        *outer, name = re.sub(r"\.weight$", "", re.sub(r"\.bias$", "_bias", tensor)).split(".")
        base = name.removesuffix("_bias")
        path = _modules(outer) + (fused_name.get(base, base) + name.removeprefix(base),)
        is_fused = base in fused_name
        array_axes = tuple(axis for group in _groups(axes) for axis in group if is_fused or axis != "1")
        shape = tuple(letters[axis] for axis in array_axes)
        is_stacked = EXPERT.search(tensor) is not None
        if is_stacked:
            array_axes = ("X", "2", *array_axes) if is_fused else ("X", *array_axes)
        elif is_fused:
            array_axes = (array_axes[0], "J", *array_axes[2:])
        is_centered = config.zero_centered_norms and base.endswith("norm") and axes in ("D", "H")
        earlier = parameters.get(path)
        parameters[path] = Parameter(
            path,
            array_axes,
            {**(earlier.parts if earlier else {}), tensor: shape},
            {**(earlier.orders if earlier else {}), **({tensor: orders[base]} if base in orders else {})},
            offset=1.0 if is_centered else 0.0,
            is_float32=is_centered or name in FLOAT32,
            is_stacked=is_stacked,
        )
    return list(parameters.values())


def _modules(names: list[str]) -> tuple[str, ...]:
    """Flax module names of a checkpoint prefix: `model.layers.3.mlp` -> (layers_3, mlp); experts share a module."""
    names = [name for name, before in zip(names, ["", *names], strict=False) if before != "experts"]
    joined = re.sub(r"^(model\.language_model|language_model\.model|language_model|model)(\.|$)", "", ".".join(names))
    return tuple(filter(None, re.sub(r"layers\.(\d+)", r"layers_\1", joined).split(".")))


def build(parameters: Iterable[Parameter], make: Callable[[Parameter], T]) -> dict[str, Any]:
    """Nested dicts as Flax modules take them, with `make(parameter)` at the path of each parameter."""
    tree: dict[str, Any] = {}
    for parameter in parameters:
        *outer, leaf = parameter.path
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[leaf] = make(parameter)
    return tree


def checkpoint_tensors(config: TargetConfig | DraftConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint tensors of a model's parameters by name, in the checkpoint's shapes, on the host."""
    table, tensors = checkpoint_table(config), {}
    for parameter in parameters_of(table, config):
        for name, part in parameter.split(np.asarray(parameter.of(params))).items():
            tensors[name] = part.reshape(checkpoint_shape(table[name], config))
    return tensors


def declare(module: nn.Module, table: Table, config: DecoderConfig) -> dict[str, Any]:
    """Declare a module's parameters from its table.

    Returns:
        Arrays, or weights of another format, by their local names (`o_proj`, `o_proj_bias`).
    """
    declared: dict[str, Any] = {}
    for parameter in parameters_of(table, config):
        (name,) = parameter.path
        if module.has_variable("params", name):  # Flax would compare the shape with that of the arrays inside a weight
            declared[name] = module.get_variable("params", name)
        else:
            declared[name] = module.param(name, initializer(name), parameter.shape)
    return declared
