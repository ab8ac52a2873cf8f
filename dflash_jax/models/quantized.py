"""Matrices in fp8, and products with them in fp8: a drafter's weights are read in half the time of bfloat16.

Both operands are e4m3, the weights ahead of time and the activations on the way, each row with a scale of its own, so
that the product is the tensor cores' and the scales are applied behind it. Only a drafter may be quantised so: what it
says less exactly costs acceptance, and never changes an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn

from dflash_jax.config import DraftConfig
from dflash_jax.models.tables import PROJECTIONS, Parameter, build, checkpoint_table, output_axes, parameters_of
from pallas_kernels import product, quantize_gated, quantize_rows

QUANTIZED = (*PROJECTIONS, "lm_head")

Place = Callable[[tuple[str, ...], tuple[int, ...]], Sharding]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight whose real values are `values * scales`; stands where the array stood, and has its shape.

    Activations, too, where they come quantised: their rows are tokens.

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

    def product(self, x: Float[Array, "*T I"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*T O"]:
        """X @ weight.T in that dtype, for all O output rows of I numbers each."""
        raw, of_token, of_output = self.raw_product(x, dtype)
        return (raw * of_token[..., None] * of_output).astype(dtype)

    def raw_product(
        self, x: Float[Array, "*T I"] | Quantized, dtype: DTypeLike
    ) -> tuple[Float[Array, "*T O"], Float[Array, "*T"], Float[Array, " O"]]:
        """The same in parts: a product, scales of its tokens, and of its outputs.

        The product of e4m3 numbers is in bfloat16 for that dtype, else in float32: in float16 it would be infinite.
        """
        implementation: Literal["reference"] | None = None if self.is_whole else "reference"
        if not isinstance(x, Quantized):
            x = Quantized(*quantize_rows(x, implementation=implementation))
        matrix = self.values.reshape(-1, x.shape[-1])
        kept = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        raw = product(x.values, matrix, kept, implementation=implementation)
        return raw, x.scales, self.scales.reshape(-1)

    def gated_product(self, x: Float[Array, "*T D"]) -> Quantized:
        """Hidden units of an MLP, silu(gate) * up, for a weight [E, 2, I, D] of both, on one device."""
        raw, of_token, _ = self.raw_product(x, x.dtype)
        products = raw.reshape(*x.shape[:-1], *self.scales.shape)
        return Quantized(*quantize_gated(products, of_token, self.scales))


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
    for name, layer in found.items():
        if name.startswith("layers_"):
            _join_queries(layer["self_attn"])
    return found


def _join_queries(attention: dict[str, Any]) -> None:
    """One array for all projections of a block; those of its context, without queries, stay beside it."""
    for ending in ("", "_bias"):
        if f"q_proj{ending}" in attention:
            parts = attention.pop(f"q_proj{ending}"), attention[f"kv_proj{ending}"]
            attention[f"qkv_proj{ending}"] = jax.tree.map(lambda q, kv: jnp.concatenate([q, kv], axis=1), *parts)


def _quantized(weight: Array, axes: tuple[str, ...], place: Place) -> Quantized:
    """A weight in fp8, split over the devices as it was."""
    rows = output_axes(axes)
    placed = place(axes, weight.shape), place(axes[:rows], weight.shape[:rows])
    values, scales = _quantize(weight, rows=rows, placed=placed)
    return Quantized(values, scales, is_whole=placed[0].num_devices == 1)


@partial(jax.jit, static_argnames=("rows", "placed"))
def _quantize(weight: Array, *, rows: int, placed: tuple[Sharding, Sharding]) -> tuple[Array, Array]:
    return lax.with_sharding_constraint(to_e4m3(weight, rows), placed)
