"""The parameter arrays of a model: which tensors of its table each array holds, and how.

Projections of the same input are held as one array, so that one matrix product reads them all (`FUSED`). Heads are
fused within each kv head: queries "(K R H) D", keys and values "(K 1 H) D" become [K, J, H, D] with J = R + 2, the kv
head's R query heads, then its key, then its value; gated attention has R gates before them. Gate and up, both "(E 1
I) D", become [E, J, I, D] with J = 2. Gated DeltaNet has [HK, J, D] with J = c + z: query, key, values and output
gates of a key head. So the axis that devices share, K, E or HK, comes first: each device holds whole groups of heads
or parts of the mlp, and its share of the array is one matrix [rows, D].

The tables of `tables` declare the Flax parameters (`declare`), list what must be in the files and what the exporter
writes (`parameters_of`), and give each array its sharding (`Parameter.axes`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

import flax.linen as nn
import numpy as np

from dflash_jax.spec import DecoderConfig, DraftConfig, TargetConfig
from dflash_jax.weights.initial import initializer
from dflash_jax.weights.orders import Order, inverse, row_orders
from dflash_jax.weights.tables import Table, axis_groups, checkpoint_shape, checkpoint_table, sizes

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
EXPERT = re.compile(r"(^|\.)experts\.\d+\.")  # a tensor of one expert


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
    def is_rounded(self) -> bool:
        """Whether quantising a model rounds it: the decays of Gated DeltaNet depend on its gates, which are small."""
        return self.is_projection and self.path[-1] != "in_proj_ba"

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
        array_axes = tuple(axis for group in axis_groups(axes) for axis in group if is_fused or axis != "1")
        shape = tuple(letters[axis] for axis in array_axes)
        is_stacked = EXPERT.search(tensor) is not None
        if is_stacked:
            array_axes = ("X", "2", *array_axes) if is_fused else ("X", *array_axes)
        elif is_fused:
            joint = array_axes.index("1") if "1" in array_axes else 1
            array_axes = (*array_axes[:joint], "J", *array_axes[joint + 1 :])
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
