"""Matrices in fp8, and products with them in fp8: a drafter's weights are read in half the time of bfloat16.

Both operands are e4m3, the weights ahead of time and the activations on the way, each row with a scale of its own, so
that the product is the tensor cores' and the scales are applied behind it. Only a drafter may be quantised so: what it
says less exactly costs acceptance, and never changes an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from dflash_jax.spec import DraftConfig
from dflash_jax.weights.tables import PROJECTIONS, Parameter, build, checkpoint_table, output_axes, parameters_of
from pallas_kernels import product, quantize_gated, quantize_rows, split_product

QUANTIZED = (*PROJECTIONS, "lm_head")
CONTEXT = "context_kv_proj"  # keys and values of all layers, of the context alone

Place = Callable[[tuple[str, ...], tuple[int, ...]], Sharding]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight whose real values are `values * scales`; stands where the array stood, and has its shape.

    Attributes:
        values: all axes of the weight, those of its output rows first.
        scales: one for each output row.
        is_whole: on one device, where kernels need no `shard_map` around them.
    """

    values: Float8e4m3fn[Array, "*rows_and_inputs"]
    scales: Float[Array, "*rows"]
    is_whole: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.values.shape

    def product(self, x: Float[Array, "*T I"] | QuantizedRows, dtype: DTypeLike = jnp.float32) -> Float[Array, "*T O"]:
        """X @ weight.T in that dtype, for all O output rows of I numbers each."""
        raw, of_token, of_output = self.raw_product(x, dtype)
        return (raw * of_token[..., None] * of_output).astype(dtype)

    def raw_product(
        self, x: Float[Array, "*T I"] | QuantizedRows, dtype: DTypeLike, *, is_added: bool = False
    ) -> tuple[Float[Array, "*T O"] | Float[Array, "S *T O"], Float[Array, "*T"], Float[Array, " O"]]:
        """The same before it is scaled: a product, scales of its tokens, and of its outputs.

        The product of e4m3 numbers is in bfloat16 for that dtype, else in float32: in float16 it would be infinite. For
        `add_norm` (`is_added`) it may be split, as `split_product` gives it.
        """
        implementation: Literal["reference"] | None = None if self.is_whole else "reference"
        if not isinstance(x, QuantizedRows):
            x = QuantizedRows(*quantize_rows(x, implementation=implementation), x.dtype)
        matrix = self.values.reshape(-1, x.shape[-1])
        kept = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        multiply = split_product if is_added and self.is_whole else partial(product, implementation=implementation)
        raw = multiply(x.values, matrix, kept)
        return raw, x.scales, self.scales.reshape(-1)

    def gated_product(self, x: Float[Array, "*T D"] | QuantizedRows) -> QuantizedRows:
        """Hidden units of an MLP, silu(gate) * up, for a weight [E, 2, I, D] of both, on one device."""
        raw, of_token, _ = self.raw_product(x, x.dtype)
        products = raw.reshape(*x.shape[:-1], *self.scales.shape)
        return QuantizedRows(*quantize_gated(products, of_token, self.scales), x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedRows:
    """Activations of tokens, whose real values are `values * scales`, where whoever computed them quantised them.

    Attributes:
        values: all axes of the activations.
        scales: one for each token.
        dtype: of the activations, had they been left alone.
    """

    values: Float8e4m3fn[Array, "*T I"]
    scales: Float[Array, "*T"]
    dtype: DTypeLike = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the activations."""
        return self.values.shape


def to_e4m3(x: Float[Array, "..."], rows: int) -> tuple[Float8e4m3fn[Array, "..."], Float[Array, "..."]]:
    """Numbers in e4m3 and their float32 scales, one for each row of the first `rows` axes: x = numbers * scales."""
    numbers, scales = quantize_rows(x.reshape(*x.shape[:rows], -1), implementation="reference")
    return numbers.reshape(x.shape), scales


def quantize_draft(
    params: Mapping[str, Any], config: DraftConfig, target: Mapping[str, Any], place: Place
) -> dict[str, Any]:
    """A drafter's parameters with quantised projections and a quantised head.

    Args:
        params: of the drafter; they stay as they are, and their memory goes when nobody holds them.
        config: of the drafter.
        target: the target's parameters, of whose head a drafter without one gets a copy as `lm_head`.
        place: sharding of an array, given its letters and shape.
    """

    def quantized(parameter: Parameter) -> Any:
        array = parameter.of(params)
        return _quantized(array, parameter.axes, place) if parameter.path[-1] in QUANTIZED else array

    found = build(parameters_of(checkpoint_table(config), config), quantized)
    if "lm_head" not in found:
        found["lm_head"] = _quantized(target.get("lm_head", target["embed_tokens"]), ("V", "D"), place)
    attentions = [found[f"layers_{i}"]["self_attn"] for i in range(config.num_hidden_layers)]
    for ending in ("", "_bias"):
        if f"kv_proj{ending}" in attentions[0]:
            found[f"{CONTEXT}{ending}"] = _joined(*_join_queries(attentions, ending))
    return found


def _join_queries(attentions: Iterable[dict[str, Any]], ending: str) -> list[Any]:
    """Make one array of all projections of each block; returns those without queries, which its context wants."""
    keys_values = []
    for attention in attentions:
        keys_values.append(attention.pop(f"kv_proj{ending}"))
        attention[f"qkv_proj{ending}"] = _joined(attention.pop(f"q_proj{ending}"), keys_values[-1])
    return keys_values


def _joined(*weights: Any) -> Any:
    """Projections of heads [K, J, ..] side by side within each kv head."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *weights)


def _quantized(weight: Array, axes: tuple[str, ...], place: Place) -> Quantized:
    """A weight in fp8, split over the devices as it was."""
    rows = output_axes(axes)
    placed = place(axes, weight.shape), place(axes[:rows], weight.shape[:rows])
    values, scales = _quantize(weight, rows=rows, placed=placed)
    return Quantized(values, scales, is_whole=placed[0].num_devices == 1)


@partial(jax.jit, static_argnames=("rows", "placed"))
def _quantize(weight: Array, *, rows: int, placed: tuple[Sharding, Sharding]) -> tuple[Array, Array]:
    return lax.with_sharding_constraint(to_e4m3(weight, rows), placed)
