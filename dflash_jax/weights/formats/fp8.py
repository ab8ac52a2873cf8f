"""Weights in fp8 (e4m3) with one scale for each output row: a drafter reads them in half the time of bfloat16.

Activations are quantised to e4m3 as well, one scale for each token, so tensor cores multiply fp8 by fp8 and the scales
are applied to the product. Only drafters are quantised so: their errors cost acceptance and never change an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, Sharding
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, Int

from dflash_jax.spec import DraftConfig
from dflash_jax.weights.formats.protocol import Limit, Product, QuantizedRows, Rows
from dflash_jax.weights.parameters import PROJECTIONS, Parameter, build, output_axes, parameters_of
from dflash_jax.weights.tables import checkpoint_table
from pallas_kernels import fp8_swiglu, gated, largest, largest_product, product, quantize_rows, split_product

QUANTIZED = (*PROJECTIONS, "lm_head")
CONTEXT = "context_kv_proj"  # projects the context to keys and values of all layers at once

Place = Callable[[tuple[str, ...], tuple[int, ...]], Sharding]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight in fp8 with one scale for each output row; the real values are `values * scales`.

    Attributes:
        values: e4m3 numbers in the weight's shape, output axes first.
        scales: float32, one for each output row.
        is_whole: the weight lies on one device, so that Pallas kernels can multiply it without a `shard_map`.
    """

    values: Float8e4m3fn[Array, "*O_and_I"]
    scales: Float[Array, "*O"]
    is_whole: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [*O, *I]."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def wants_quantized_rows(self) -> bool:
        """Inputs come quantised on one device; on several, each device quantises its own part of a row."""
        return self.is_whole

    @property
    def needs_kernels(self) -> bool:
        """Parts of a drafter's weights are multiplied by XLA."""
        return False

    def product(self, x: Rows, dtype: DTypeLike | None = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """X @ weight.T; kernels are used whenever the weight is whole, since fp8 weights are never trained."""
        dtype = x.dtype if dtype is None else dtype
        raw, (of_token, of_output) = self._raw(x, dtype, in_parts=False)
        return (raw * of_token[..., None] * of_output.reshape(-1)).astype(dtype)

    def unscaled(self, x: Rows, *, kernels: bool) -> Product:
        """The raw product of a whole weight, with both scales; else the scaled product."""
        if not (kernels and self.is_whole):
            return Product(self.product(x), None)
        return Product(*self._raw(x, x.dtype, in_parts=False))

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """Like `unscaled`, in parts where `split_product` makes such."""
        if not (kernels and self.is_whole):
            return Product(self.product(x), None)
        return Product(*self._raw(x, x.dtype, in_parts=True))

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """Hidden units of an MLP; a whole weight gives them quantised, as the next weight wants them."""
        if not (kernels and self.is_whole):
            return gated(self.product(x).reshape(*x.shape[:-1], *self.scales.shape))
        rows = self._quantized(x)
        units = fp8_swiglu(rows.values, rows.scales, self.values, self.scales, _kept(x.dtype))
        return QuantizedRows(*units, x.dtype)

    def largest(
        self, x: Rows, length: Int[Array, ""] | None = None, limit: Limit = None, *, kernels: bool
    ) -> tuple[Int[Array, "*T"], Float[Array, "*T"]]:
        """Argmax and its logit; with kernels the logit lacks the token's scale, which no argmax depends on."""
        if not kernels:
            return largest(self.product(x, jnp.float32), limit)
        values = x.values if isinstance(x, QuantizedRows) else quantize_rows(x)[0]
        return largest_product(values, self.values, self.scales, length, limit)

    def shard(self, axis: int, name: str) -> Quantized:
        """Specs of the numbers, and of the scales, which are split only along output axes."""
        spec = PartitionSpec(*[None] * axis, name)
        specs: Any = {"values": spec, "scales": spec if axis < self.scales.ndim else PartitionSpec()}
        return replace(self, **specs)

    def _raw(
        self, x: Rows, dtype: DTypeLike, *, in_parts: bool
    ) -> tuple[Float[Array, "*T O"] | Float[Array, "S *T O"], tuple[Float[Array, "*T"], Float[Array, "*O"]]]:
        """Unscaled product, with its per-token and per-output scales."""
        rows = self._quantized(x)
        matrix = self.values.reshape(-1, x.shape[-1])
        multiply = split_product if in_parts else partial(product, implementation=self._implementation)
        return multiply(rows.values, matrix, _kept(dtype)), (rows.scales, self.scales)

    def _quantized(self, x: Rows) -> QuantizedRows:
        if isinstance(x, QuantizedRows):
            return x
        return QuantizedRows(*quantize_rows(x, implementation=self._implementation), x.dtype)

    @property
    def _implementation(self) -> Literal["reference"] | None:
        return None if self.is_whole else "reference"


def _kept(dtype: DTypeLike) -> Any:
    """The dtype of raw products: e4m3 numbers reach 448, so float16 would overflow, and float32 takes its place."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def to_e4m3(x: Float[Array, "..."], rows: int) -> tuple[Float8e4m3fn[Array, "..."], Float[Array, "..."]]:
    """Quantise to e4m3 with a float32 scale for each row, rows being the first `rows` axes: x = numbers * scales."""
    numbers, scales = quantize_rows(x.reshape(*x.shape[:rows], -1), implementation="reference")
    return numbers.reshape(x.shape), scales


def quantize_draft(
    params: Mapping[str, Any], config: DraftConfig, target: Mapping[str, Any], place: Place
) -> dict[str, Any]:
    """A drafter's parameters with quantised projections and a quantised head.

    Queries are joined to keys and values in `qkv_proj`, since blocks need all of them. The context needs keys and
    values alone, of all layers at once: `CONTEXT`.

    Args:
        params: the drafter's parameters; they are left unchanged.
        config: the drafter's.
        target: the target's parameters; a drafter without a head gets a quantised copy of theirs as `lm_head`, unless
            they have an 8-bit copy already, as `screen`.
        place: gives the sharding of an array by its axes and shape.
    """

    def quantized(parameter: Parameter) -> Any:
        array = parameter.of(params)
        return _quantized(array, parameter.axes, place) if parameter.path[-1] in QUANTIZED else array

    small = build(parameters_of(checkpoint_table(config), config), quantized)
    if "lm_head" not in small and "screen" not in target:
        small["lm_head"] = _quantized(target.get("lm_head", target["embed_tokens"]), ("V", "D"), place)
    attentions = [small[f"layers_{i}"]["self_attn"] for i in range(config.num_hidden_layers)]
    for ending in ("", "_bias"):
        if f"kv_proj{ending}" in attentions[0]:
            small[f"{CONTEXT}{ending}"] = _joined(*_join_queries(attentions, ending))
    return small


def _join_queries(attentions: Iterable[dict[str, Any]], ending: str) -> list[Any]:
    """Join queries to keys and values in each layer, in place; returns the projections to keys and values alone."""
    keys_values = []
    for attention in attentions:
        keys_values.append(attention.pop(f"kv_proj{ending}"))
        attention[f"qkv_proj{ending}"] = _joined(attention.pop(f"q_proj{ending}"), keys_values[-1])
    return keys_values


def _joined(*weights: Any) -> Any:
    """Join projections of heads [K, J, ...] within each kv head, along J."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *weights)


def _quantized(weight: Array, axes: tuple[str, ...], place: Place) -> Quantized:
    """Quantise a weight; numbers and scales are split over the devices as `place` says."""
    rows = output_axes(axes)
    placed = place(axes, weight.shape), place(axes[:rows], weight.shape[:rows])
    values, scales = _quantize(weight, rows=rows, placed=placed)
    return Quantized(values, scales, is_whole=placed[0].num_devices == 1)


@partial(jax.jit, static_argnames=("rows", "placed"))
def _quantize(weight: Array, *, rows: int, placed: tuple[Sharding, Sharding]) -> tuple[Array, Array]:
    return lax.with_sharding_constraint(to_e4m3(weight, rows), placed)
