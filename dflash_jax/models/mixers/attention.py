"""Softmax attention as a mixer: its projections. The attention itself is the cache's (`models.layers.KVCache`)."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.models.rope import Rope
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DecoderConfig
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.formats.weight import project, weight_of
from dflash_jax.weights.tables import attention_table, declare
from pallas_kernels.lib.rotary import Rotary


class Attention(nn.Module):
    """Projections of one attention block."""

    config: DecoderConfig
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        # An fp8 drafter has qkv_proj, joined of the parameters in its table; they are taken as they come.
        if self.has_variable("params", "qkv_proj"):
            self.weights = dict(self.variables["params"])
        else:
            self.weights = declare(self, attention_table(self.config), self.config)

    def heads(self, x: Float[Array, "B T D"] | QuantizedRows, rope: Rope) -> tuple[Float[Array, "B T K J H"], Rotary]:
        """Project to [q..q, k, v] for each kv head, J heads side by side.

        Returns:
            The heads, and the scales, norms and rotation that the cache still has to apply to them.
        """
        if "qkv_proj" not in self.weights:
            return jnp.concatenate([self._project("q_proj", x), self.keys_values(x)], axis=-2), self._rotary(rope)
        if "qkv_proj_bias" in self.weights:
            return self._project("qkv_proj", x), self._rotary(rope)
        weight = weight_of(self.weights["qkv_proj"])
        heads, scales = weight.unscaled(x, kernels=self.devices.is_single)
        return heads.reshape(*x.shape[:2], *weight.shape[:-1]), self._rotary(rope, scales)

    def keys_values(self, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T K 2 H"]:
        """Project to [k, v] for each kv head; drafters only, whose queries have a weight of their own."""
        return self._project("kv_proj", x)

    def _project(self, name: str, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T K J H"]:
        return project(x, self.weights[name], self.weights.get(f"{name}_bias"), kernels=self.devices.is_single)

    def _rotary(self, rope: Rope, scales: tuple[Array, Array] | None = None) -> Rotary:
        """What heads need before attention; `scales` are those of an fp8 product, for each token and each output."""
        norms = self.weights.get("q_norm"), self.weights.get("k_norm")
        return Rotary(*rope, *norms, scales, self.config.rms_norm_eps)
