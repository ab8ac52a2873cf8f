"""A mixture of experts: a router sends each token to some SwiGLUs of many, and one more may see every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.parallel.mesh import AXIS, SPLIT_FIRST, WHOLE
from dflash_jax.spec import DecoderConfig, Experts
from dflash_jax.weights.formats.protocol import QuantizedRows, Weight, plain
from dflash_jax.weights.formats.weight import stack_of, weight_of
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import Table, experts_table, shared_expert_table, sparse_mlp_table
from pallas_kernels import add_norm, all_reduce_add_norm, experts

ROUTERS = ("gate.weight", "shared_expert_gate.weight")


class Matrices(nn.Module):
    """The parameters of a table, in a module of their own."""

    config: DecoderConfig
    table: Table

    def setup(self) -> None:
        self.weights = declare(self, self.table, self.config)


class SparseMLP(nn.Module):
    """A mixture of experts, added to the residual stream together with the norm that follows.

    On several devices each holds a part of the width of every expert, so that none waits for another whatever the
    router chooses; the router lies whole on all of them.

    Source: transformers' Qwen3MoeSparseMoeBlock and Qwen3_5MoeSparseMoeBlock.
    """

    config: DecoderConfig
    devices: Devices = AUTOMATIC

    @property
    def spec(self) -> Experts:
        """Sizes of the mixture, which all layers with experts share."""
        assert self.config.experts is not None
        return self.config.experts

    def setup(self) -> None:
        table = sparse_mlp_table(self.spec)
        self.routers = declare(self, {name: table[name] for name in ROUTERS if name in table}, self.config)
        self.experts = Matrices(self.config, experts_table())
        if self.spec.shared_width is not None:
            self.shared_expert = Matrices(self.config, shared_expert_table())

    def __call__(
        self,
        x: Float[Array, "B T D"],
        h: Float[Array, "B T D"] | QuantizedRows,
        next_norm: Float[Array, " D"],
        is_token: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Add the experts' outputs to the residual stream, then norm it.

        Args:
            x: residual stream.
            h: its norm.
            next_norm: weight of the norm that follows.
            is_token: whether a row is a token; padding is sent to no expert, which would have to be read for it.

        Returns:
            The new residual stream, and its norm.
        """
        spec, devices, eps = self.spec, self.devices, self.config.rms_norm_eps
        h = plain(h, "an expert")
        with jax.named_scope("router"):
            chosen, weights = devices.on_each(partial(route, spec=spec), WHOLE, WHOLE)(h, self.routers["gate"])
            chosen = jnp.where(is_token[..., None], chosen, spec.count)
        self.sow("intermediates", "chosen", chosen)  # kept only where a caller asks for it
        matrices = [stack_of(self.experts.weights[name]) for name in ("gate_up_proj", "down_proj")]
        is_split = devices.share(spec.width)  # the third axis of both
        matrix_specs = [matrix.shard(2, AXIS) for matrix in matrices] if is_split else WHOLE
        shared, shared_specs = self._shared()

        def on_each(x, h, chosen, weights, norm, matrices, shared, peers):
            gate_up, down = (matrix.operand for matrix in matrices)
            y = experts(h, gate_up, down, chosen, weights, implementation=devices.implementation)
            is_shared_split = shared_specs != (WHOLE, WHOLE)
            if shared is not None:
                with jax.named_scope("shared_expert"):
                    output = _shared_output(h, shared, devices)
                y = _sum(y, output, is_split, is_shared_split)
            if is_split or is_shared_split:
                return all_reduce_add_norm(x, y, norm, eps, AXIS, peers)
            return add_norm(x, y, norm, eps, implementation=devices.implementation)

        all_shared_specs = WHOLE if shared is None else (WHOLE, *shared_specs)
        in_specs = (WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, matrix_specs, all_shared_specs, SPLIT_FIRST)
        function = devices.on_each(on_each, in_specs, WHOLE)
        added, normed = function(x, h, chosen, weights, next_norm, matrices, shared, devices.peers)
        return added, normed

    def _shared(self) -> tuple[tuple[Array, Weight, Weight] | None, tuple[Any, Any]]:
        """The shared expert's gate, its matrices, and how these are split over the devices."""
        if self.spec.shared_width is None:
            return None, (WHOLE, WHOLE)
        weights = self.shared_expert.weights
        gate_up, down = weight_of(weights["gate_up_proj"]), weight_of(weights["down_proj"])
        specs: tuple[Any, Any] = (WHOLE, WHOLE)
        if self.devices.share(gate_up.shape[0]):
            specs = gate_up.shard(0, AXIS) or WHOLE, down.shard(1, AXIS) or WHOLE
        return (self.routers["shared_expert_gate"], gate_up, down), specs


def route(
    h: Float[Array, "B T D"], router: Float[Array, "X D"] | Weight, spec: Experts
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The experts of each token, the largest first and of equals the first, int32, and their weights, float32.

    Logits are summed in float32 and not rounded: in bfloat16 many would tie.
    """
    logits = weight_of(router).product(h, jnp.float32)
    largest, chosen = lax.top_k(logits, spec.per_token)
    whole = largest if spec.renormalize else logits
    return chosen, jnp.exp(largest - jax.nn.logsumexp(whole, axis=-1, keepdims=True))


def _sum(
    routed: Float[Array, "B T D"], shared: Float[Array, "B T D"], is_split: bool, is_shared_split: bool
) -> Float[Array, "B T D"]:
    """The sum of both outputs, to be summed over the devices if one of them is a device's part: once if it is whole."""
    if is_split == is_shared_split:
        return routed + shared
    is_first = lax.axis_index(AXIS) == 0
    return jnp.where(is_first | is_split, routed, 0) + jnp.where(is_first | is_shared_split, shared, 0)


def _shared_output(
    h: Float[Array, "B T D"], shared: tuple[Float[Array, " D"], Weight, Weight], devices: Devices
) -> Float[Array, "B T D"]:
    """The shared expert's output, scaled by the sigmoid of its gate."""
    gate, gate_up, down = shared
    hidden = gate_up.gated(h, kernels=devices.has_kernels)
    opened = jax.nn.sigmoid(jnp.einsum("btd,d->bt", h, gate, preferred_element_type=jnp.float32))
    output = down.product(hidden, jnp.float32, kernels=devices.has_kernels)
    return (opened[..., None] * output).astype(h.dtype)
