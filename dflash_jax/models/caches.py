"""What layers keep of processed tokens, as layers see it: written to and read through these protocols alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from dflash_jax.spec import GatedDelta, LayerMask
from pallas_kernels.gated_delta import Weights
from pallas_kernels.lib.rotary import Rotary, gated, gates_of


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of the layers of one model, for B sequences: pages in the engine, dense arrays elsewhere."""

    def write(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Store keys and values at their absolute positions.

        Args:
            layer: index of the layer.
            heads: projected heads; each kv head has its query heads, its key and its value side by side, and gates in
                front of them where `rotary` says so.
            rotary: scales, norms and RoPE, which are applied to the heads first.
            positions: absolute positions of the tokens, int32; tokens at negative ones are not stored.

        Returns:
            The queries, with `rotary` applied, and the updated cache.
        """
        ...

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """Attention of q over the stored keys at positions below `kv_length` that the mask lets each query see."""
        ...

    def write_attend(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """`write`, then `attend` with the queries of these heads, and multiply by the sigmoids of their gates."""
        q, cache = self.write(layer, heads, rotary, positions)
        return gated(cache.attend(layer, q, positions, kv_length, mask), gates_of(heads, rotary)), cache


@runtime_checkable
class EvenCache(KVCache, Protocol):
    """A `KVCache` that may keep all layers at equal distances, so that a program can compute where one lies."""

    @property
    def is_even(self) -> bool:
        """Whether layers lie so."""
        ...

    def one_layer(self, layer: Int[Array, ""]) -> KVCache:
        """The cache as layer `layer` sees it: it is layer 0 there."""
        ...

    def with_layer(self, one: KVCache) -> EvenCache:
        """Take over what a layer has written to its own cache (`one_layer`)."""
        ...


@runtime_checkable
class DividedCache(KVCache, Protocol):
    """A `KVCache` that can give each layer its own part, which is alike for layers of a kind."""

    def of_layer(self, layer: int) -> KVCache:
        """What a layer keeps, wherever it lies; any number stands for the layer there."""
        ...

    def with_layer_of(self, layer: int, part: KVCache) -> DividedCache:
        """Take over what a layer has written to its part (`of_layer`)."""
        ...


@runtime_checkable
class ContextCache(KVCache, Protocol):
    """The `KVCache` of a drafter."""

    def write_context(
        self,
        heads: Sequence[Float[Array, "B T K _ H"]],
        rotary: Rotary,
        k_norms: Sequence[Float[Array, " H"] | None],
        positions: Int[Array, "B T"],
    ) -> ContextCache:
        """Store keys and values of every layer at their absolute positions.

        Args:
            heads: projected heads; each kv head has the key and the value of each layer, side by side. They come in
                one array for all layers or in several, first layers first.
            rotary: scales and RoPE, which are applied to keys after their norm.
            k_norms: weight of each layer's key norm, or None.
            positions: absolute positions of the tokens, int32; tokens at negative ones are not stored.
        """
        ...


@runtime_checkable
class RecurrentCache(KVCache, Protocol):
    """A `KVCache` that also holds the recurrent states of a model's Gated DeltaNet layers, for B sequences."""

    def advance(
        self,
        layer: int,
        inputs: Float[Array, "B T HK _"],
        gates: Float[Array, "B T HV 2"],
        weights: Weights,
        positions: Int[Array, "B T"],
        delta: GatedDelta,
    ) -> tuple[Float[Array, "B T HV dv"], RecurrentCache]:
        """Run convolution and recurrence over T tokens that follow what the states contain.

        Args:
            layer: index of the layer.
            inputs: of the convolution, the channels of each key head side by side; what lies behind them is not read.
            gates: projections b and a of each value head, before their activations.
            weights: of convolution and gates.
            positions: absolute positions of the tokens, int32; negative ones, behind the others, are padding.
            delta: sizes of the layer.

        Returns:
            Outputs before the norm, in the dtype of the inputs, and the updated cache.
        """
        ...
