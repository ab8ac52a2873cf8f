"""The dense MLP: SwiGLU, up to its last projection."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from dflash_jax.models.projections import project_swiglu
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DecoderConfig
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.tables import declare, mlp_table


class MLP(nn.Module):
    """Hidden units of a SwiGLU; the layer applies `down_proj`, together with the next norm."""

    config: DecoderConfig
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        self.weights = declare(self, mlp_table(self.config), self.config)

    def __call__(self, x: Float[Array, "B T D"] | QuantizedRows) -> Float[Array, "B T F"] | QuantizedRows:
        """silu(gate) * up of normed inputs."""
        weight, bias = self.weights["gate_up_proj"], self.weights.get("gate_up_proj_bias")
        return project_swiglu(x, weight, bias, self.devices)
