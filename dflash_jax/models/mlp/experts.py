"""A mixture of experts: a router sends each token to some SwiGLUs of many, and one more may see every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from dflash_jax.parallel.collectives import AUTOMATIC, Devices
from dflash_jax.parallel.mesh import AXIS, SPLIT_FIRST, WHOLE
from dflash_jax.spec import DecoderConfig, Experts
from dflash_jax.weights.formats.protocol import QuantizedRows, Stack, Weight, plain
from dflash_jax.weights.formats.weight import in_parts, operand_of, stack_of, weight_of
from dflash_jax.weights.parameters import declare
from dflash_jax.weights.tables import Table, experts_table, shared_expert_table, sparse_mlp_table
from pallas_kernels import add_norm, all_reduce_add_norm, experts, route
from pallas_kernels.experts import Shared
from pallas_kernels.route import Routes

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
        devices, eps = self.devices, self.config.rms_norm_eps
        h = plain(h, "an expert")
        with jax.named_scope("router"):
            run = devices.on_each(partial(routes_of, spec=self.spec, devices=devices), WHOLE, WHOLE)
            routes = run(h, self.routers["gate"], is_token, self.routers.get("shared_expert_gate"))
        self.sow("intermediates", "chosen", routes.chosen)  # kept only where a caller asks for it
        matrices = [stack_of(self.experts.weights[name]) for name in ("gate_up_proj", "down_proj")]
        is_split = devices.share(self.spec.width)  # the third axis of both
        matrix_specs = [matrix.shard(2, AXIS) for matrix in matrices] if is_split else WHOLE
        shared, shared_specs = self._shared()
        is_shared_split = shared_specs != (WHOLE, WHOLE)

        def on_each(x, h, routes, norm, matrices, shared, peers):
            routes = _counted_once(routes, is_split, is_shared_split)
            y = _outputs(h, routes, matrices, shared, devices)
            if is_split or is_shared_split:
                return all_reduce_add_norm(x, y, norm, eps, AXIS, peers)
            return add_norm(x, y, norm, eps, implementation=devices.implementation)

        all_shared_specs = WHOLE if shared is None else shared_specs
        in_specs = (WHOLE, WHOLE, WHOLE, WHOLE, matrix_specs, all_shared_specs, SPLIT_FIRST)
        function = devices.on_each(on_each, in_specs, WHOLE)
        added, normed = function(x, h, routes, next_norm, matrices, shared, devices.peers)
        return added, normed

    def _shared(self) -> tuple[tuple[Weight, Weight] | None, tuple[Any, Any]]:
        """The shared expert's matrices, and how they are split over the devices."""
        if self.spec.shared_width is None:
            return None, (WHOLE, WHOLE)
        weights = self.shared_expert.weights
        gate_up, down = weight_of(weights["gate_up_proj"]), weight_of(weights["down_proj"])
        specs: tuple[Any, Any] = (WHOLE, WHOLE)
        if self.devices.share(gate_up.shape[0]):
            specs = gate_up.shard(0, AXIS) or WHOLE, down.shard(1, AXIS) or WHOLE
        return (gate_up, down), specs


def routes_of(
    h: Float[Array, "B T D"],
    router: Float[Array, "X D"] | Weight,
    is_token: Bool[Array, "B T"],
    gate: Float[Array, " D"] | None,
    spec: Experts,
    devices: Devices = AUTOMATIC,
) -> Routes:
    """The experts of each token, and how much of the shared expert it takes, by that one's gate."""
    logits = in_parts(h, router, kernels=devices.has_kernels)
    shared = None if gate is None else (h, gate)
    return route(
        logits,
        is_token,
        spec.per_token,
        renormalize=spec.renormalize,
        shared=shared,
        implementation=devices.implementation,
    )


def _counted_once(routes: Routes, is_split: bool, is_shared_split: bool) -> Routes:
    """The routes of a device: where outputs are summed over the devices, the first alone weighs what each has whole."""
    if is_split == is_shared_split:
        return routes
    is_first = lax.axis_index(AXIS) == 0
    if is_split:
        return routes._replace(opened=None if routes.opened is None else jnp.where(is_first, routes.opened, 0))
    return routes._replace(weights=jnp.where(is_first, routes.weights, 0))


def _outputs(
    h: Float[Array, "B T D"],
    routes: Routes,
    matrices: list[Stack],
    shared: tuple[Weight, Weight] | None,
    devices: Devices,
) -> Float[Array, "B T D"]:
    """Outputs of the experts and of the shared one, weighted and summed: by one operation if it knows all formats."""
    gate_up, down = (matrix.operand for matrix in matrices)
    run = partial(experts, h, gate_up, down, routes.chosen, routes.weights, implementation=devices.implementation)
    if shared is None:
        return run()
    assert routes.opened is not None
    all_gate_up, all_down = (operand_of(weight) for weight in shared)
    if all_gate_up is not None and all_down is not None:
        return run(shared=Shared(all_gate_up, all_down, routes.opened))
    with jax.named_scope("shared_expert"):
        hidden = shared[0].gated(h, kernels=devices.has_kernels)
        output = shared[1].product(hidden, jnp.float32, kernels=devices.has_kernels)
        return (run().astype(jnp.float32) + routes.opened[..., None] * output).astype(h.dtype)
