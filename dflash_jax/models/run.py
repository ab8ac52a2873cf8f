"""The layers of a model, one after another, or in a loop where one CPU runs them.

Python traces and lowers one layer of each kind: a jitted function of parameters and of a part of the cache stands for
all of them, and XLA inlines it. Programs of a GPU are as fast as with layers apart (27B on an H200).

XLA's CPU backend compiles every kernel of a program by itself, again for each layer: 688 kernels in a round of the
embedded pair, whose target has 16 layers, where a loop has 293. Accelerators have no such loop: a branch waits for the
host there, and kernels that are equal are compiled once anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dflash_jax.models.caches import DividedCache, EvenCache, KVCache
from dflash_jax.models.layers import DecoderLayer
from dflash_jax.models.rope import Rope, rope_tables
from dflash_jax.spec import DecoderConfig, Dense, LayerSpec
from dflash_jax.weights.formats.one_of import OneOf
from dflash_jax.weights.formats.protocol import QuantizedRows, Weight
from dflash_jax.weights.formats.weight import weight_of
from dflash_jax.weights.parameters import PROJECTIONS
from pallas_kernels.lib.norm import rms_norm

LEAST_LOOPED = 3  # layers


class Ran(NamedTuple):
    """What layers leave.

    Attributes:
        x: residual stream after the last of them.
        captured: residual stream after each capture layer among them, by index.
        hidden: x after the norm that follows.
        cache: what is kept of processed tokens, these included.
    """

    x: Float[Array, "B T D"]
    captured: dict[int, Float[Array, "B T D"]]
    hidden: Float[Array, "B T D"] | QuantizedRows
    cache: KVCache


class _Inputs(NamedTuple):
    """What all layers take."""

    rope: Rope
    positions: Int[Array, "B T"]
    kv_length: Int[Array, " B"]


def run_layers(
    config: DecoderConfig,
    layers: Sequence[DecoderLayer],
    x: Float[Array, "B T D"],
    last_norm: Float[Array, " D"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    taps: tuple[int, ...] = (),
) -> Ran:
    """Run the first layers of a model over embeddings.

    Args:
        config: of the model.
        layers: from its first one on.
        x: embeddings.
        last_norm: weight of the norm behind the layers.
        positions: absolute positions of the tokens, int32.
        cache: what is kept of earlier positions.
        taps: capture layers; those that are not among `layers` are left out.
    """
    inputs = _Inputs(rope_tables(config, positions), positions, positions.max(axis=1) + 1)
    norms = [*(layer.norms["input_layernorm"] for layer in layers), last_norm]
    begin = Ran(x, {}, rms_norm(x, norms[0], config.rms_norm_eps), cache)
    if isinstance(cache, EvenCache) and cache.is_even and _are_equal(layers):
        return _in_a_loop(layers, begin, norms[1:], inputs, cache, taps)
    return _apart(layers, begin, norms[1:], inputs, taps)


def _apart(
    layers: Sequence[DecoderLayer], begin: Ran, norms: list[Array], inputs: _Inputs, taps: tuple[int, ...]
) -> Ran:
    """Run layers of any kinds."""
    x, captured, h, cache = begin
    once: dict[LayerSpec, Any] = {}  # what traces the layers of a kind
    for layer, next_norm in zip(layers, norms, strict=True):
        if isinstance(cache, DividedCache):
            kind = layer.config.layers[layer.index]
            if kind not in once:
                once[kind] = jax.jit(partial(_one, layer.clone(parent=None)))
            x, h, part = once[kind](_parameters(layer), x, h, next_norm, inputs, cache.of_layer(layer.index))
            cache = cache.with_layer_of(layer.index, part)
        else:
            x, h, cache = layer(x, h, next_norm, *inputs, cache)
        if layer.index in taps:
            captured[layer.index] = x
    return Ran(x, captured, h, cache)


def _one(
    layer: DecoderLayer, params: Any, x: Array, h: Array | QuantizedRows, next_norm: Array, inputs: _Inputs, part: Any
) -> tuple[Array, Array | QuantizedRows, Any]:
    """Run a layer with the parameters of any of its kind, and that one's part of the cache."""
    result: Any = layer.apply({"params": params}, x, h, next_norm, *inputs, part)
    x, h, part = result
    return x, h, part


def _are_equal(layers: Sequence[DecoderLayer]) -> bool:
    """Whether one CPU runs these layers, and they are dense with attention, and alike but for their numbers."""
    if len(layers) < LEAST_LOOPED or not layers[0].devices.is_cpu or not layers[0].has_attention:
        return False
    specs = {layer.config.layers[layer.index] for layer in layers}
    forms = [jax.tree.flatten(jax.tree.map(_form, _parameters(layer))) for layer in layers]
    weights = jax.tree.leaves(_parameters(layers[0]), is_leaf=lambda leaf: isinstance(leaf, Weight))
    return (
        len(specs) == 1
        and all(isinstance(spec.mlp, Dense) for spec in specs)
        and all(form == forms[0] for form in forms)
        and not any(isinstance(weight, Weight) and weight.wants_quantized_rows for weight in weights)
    )


def _form(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _parameters(layer: DecoderLayer) -> dict[str, Any]:
    params: dict[str, Any] = dict(layer.variables["params"])
    return params


def _in_a_loop(
    layers: Sequence[DecoderLayer],
    begin: Ran,
    norms: list[Array],
    inputs: _Inputs,
    cache: EvenCache,
    taps: tuple[int, ...],
) -> Ran:
    """Run equal layers. Matrices stay apart (`OneOf`); norms and biases, which are small, are stacked."""
    captured = sorted(tap for tap in set(taps) if tap < len(layers))
    rows = np.full(len(layers), len(captured), np.int32)  # the last row is of layers that nobody captures
    rows[captured] = np.arange(len(captured))
    one, params = layers[0].clone(parent=None), _stacked([_parameters(layer) for layer in layers])

    def step(carry: Any, numbers: Any) -> tuple[Any, None]:
        x, h, cache, outputs = carry
        index, row, next_norm, small = numbers
        chosen, of_layer = {"params": params.of(index, small)}, cache.one_layer(index)
        after: Any = one.apply(chosen, x, h, next_norm, *inputs, of_layer)
        x, h, of_layer = after
        outputs = lax.dynamic_update_index_in_dim(outputs, x, row, 0)
        return (x, h, cache.with_layer(of_layer), outputs), None

    outputs = jnp.zeros((len(captured) + 1, *begin.x.shape), begin.x.dtype)
    of_layers = jnp.arange(len(layers)), jnp.asarray(rows), jnp.stack(norms), params.small
    (x, h, cache, outputs), _ = lax.scan(step, (begin.x, begin.hidden, cache, outputs), of_layers)
    return Ran(x, {layer: outputs[row] for row, layer in enumerate(captured)}, h, cache)


class _Stacked(NamedTuple):
    """Parameters of equal layers.

    Attributes:
        matrices: of each projection, the weights of all layers; None for other parameters.
        small: norms and biases, stacked; None for projections.
        structure: of one layer's parameters.
    """

    matrices: list[tuple[Weight, ...] | None]
    small: list[Array | None]
    structure: Any

    def of(self, index: Int[Array, ""], small: list[Array | None]) -> Any:
        """Parameters of one layer, whose norms and biases the loop has taken from the stacks."""
        pairs = zip(self.matrices, small, strict=True)
        return self.structure.unflatten(
            [array if weights is None else OneOf(weights, index) for weights, array in pairs]
        )


def _stacked(params: list[dict[str, Any]]) -> _Stacked:
    """Stack what is small in the parameters of layers."""
    flat: Any = [jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Weight)) for tree in params]
    matrices, small = list[Any](), list[Any]()
    for of_layers in zip(*(leaves for leaves, _ in flat), strict=True):
        is_matrix = of_layers[0][0][-1].key in PROJECTIONS
        leaves = [leaf for _, leaf in of_layers]
        matrices.append(tuple(map(weight_of, leaves)) if is_matrix else None)
        small.append(None if is_matrix else jnp.stack(leaves))
    return _Stacked(matrices, small, flat[0][1])
