"""Gated DeltaNet as a mixer: its projections and its gated norm. The recurrence is the cache's (`advance`)."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.models.caches import KVCache, RecurrentCache
from dflash_jax.models.projections import project_beside
from dflash_jax.models.rope import Rope
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.parallel.mesh import AXIS, WHOLE
from dflash_jax.spec import DecoderConfig, GatedDelta
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import gated_delta_table
from pallas_kernels import gated_norm
from pallas_kernels.gated_delta import Weights


class GatedDeltaNet(nn.Module):
    """One Gated DeltaNet block up to its output projection, over layer `index` of the cache.

    Source: arXiv 2412.06464; transformers 5.24, `Qwen3_5GatedDeltaNet`.
    """

    config: DecoderConfig
    index: int
    devices: Devices = AUTOMATIC

    output = "out_proj"  # the projection that the layer applies to what the block returns

    def setup(self) -> None:
        mixer = self.config.layers[self.index].mixer
        assert isinstance(mixer, GatedDelta)
        self.mixer = mixer
        self.weights = declare(self, gated_delta_table(), self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"] | QuantizedRows,
        rope: Rope,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B T HK I"], KVCache]:
        """Advance the recurrence over normed inputs x; `rope` and `kv_length` are for attention alone.

        Returns:
            The gated outputs, those of the I channels of a key head's value heads side by side; the updated cache.
        """
        assert isinstance(cache, RecurrentCache)
        delta = self.mixer
        # [B, T, HK, c + r dv] and [B, T, HK, r, 2]
        channels, gates = project_beside(x, self.weights["in_proj"], self.weights["in_proj_ba"], self.devices)
        both = gates.reshape(*gates.shape[:2], delta.value_heads, 2)
        out, after = cache.advance(self.index, channels, both, self.recurrent, positions, delta)
        return self._gated_norm(out, channels), after

    @property
    def recurrent(self) -> Weights:
        """The weights of convolution and gates, as the cache takes them."""
        conv = self.weights["conv1d"].reshape(self.mixer.key_heads, -1, self.mixer.conv_width)
        heads = (self.mixer.value_heads,)
        return Weights(conv, self.weights["A_log"].reshape(heads), self.weights["dt_bias"].reshape(heads))

    def _gated_norm(
        self, out: Float[Array, "B T HV dv"], channels: Float[Array, "B T HK _"]
    ) -> Float[Array, "B T HK I"]:
        """Norm the outputs of each head and multiply them by the activation of their gates, the last channels."""
        devices = self.devices
        run = partial(
            gated_norm,
            eps=self.config.rms_norm_eps,
            activation=self.mixer.activation,
            implementation=devices.implementation,
        )
        spec = PartitionSpec(None, None, AXIS) if devices.share(self.mixer.key_heads) else WHOLE
        normed: Array = devices.on_each(run, (spec, spec, WHOLE), spec)(out, channels, self.weights["norm"])
        return normed
