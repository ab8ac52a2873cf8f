"""The dense MLP: SwiGLU."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Bool, Float

from dflash_jax.models.projections import project_add_norm, project_swiglu
from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.spec import DecoderConfig
from dflash_jax.weights.formats.protocol import QuantizedRows
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import mlp_table


class MLP(nn.Module):
    """A SwiGLU, added to the residual stream together with the norm that follows."""

    config: DecoderConfig
    devices: Devices = AUTOMATIC

    def setup(self) -> None:
        self.weights = declare(self, mlp_table(self.config), self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        h: Float[Array, "B T D"] | QuantizedRows,
        next_norm: Float[Array, " D"],
        is_token: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | QuantizedRows]:
        """Add the MLP's output to the residual stream, then norm it.

        Args:
            x: residual stream.
            h: its norm.
            next_norm: weight of the norm that follows.
            is_token: whether a row is a token rather than padding; here all rows are computed.

        Returns:
            The new residual stream, and its norm.
        """
        weights, eps = self.weights, self.config.rms_norm_eps
        hidden = project_swiglu(h, weights["gate_up_proj"], weights.get("gate_up_proj_bias"), self.devices)
        down, bias = weights["down_proj"], weights.get("down_proj_bias")
        return project_add_norm(x, hidden, down, bias, next_norm, eps, self.devices)
