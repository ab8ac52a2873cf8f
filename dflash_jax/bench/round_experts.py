"""How many experts a round touches: what it must read depends on it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dflash_jax.engine.device.steps import bind_target
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.models.target import TargetModel
from dflash_jax.parallel.platform import compiler_options
from dflash_jax.train.cache import SequenceCache


def experts_touched(engine: Engine, sequences: Seq[Sequence], length: int) -> float | None:
    """Mean number of different experts that a layer with experts sends the newest tokens of the sequences to.

    The model runs over these tokens alone, since the pools that hold their context are donated to rounds; drafts that
    were rejected are not among them.

    Args:
        engine: that has run the sequences.
        sequences: each has at least `length` tokens.
        length: tokens of each that a round verifies.

    Returns:
        None for a target without experts.
    """
    experts = engine.spec.target.experts
    if experts is None:
        return None
    tokens = np.array([[*s.prompt_token_ids, *s.output.token_ids][-length:] for s in sequences], np.int32)

    @partial(jax.jit, compiler_options=compiler_options(engine.mesh.platform))
    def chosen(params: dict, tokens: Int[Array, "B T"]) -> list[Int[Array, "B T k"]]:
        target = bind_target(params, engine.spec)
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        model = TargetModel(target.config, target.devices)
        cache = SequenceCache(is_fused=False)
        _, kept = model.apply({"params": params}, tokens, positions, cache, mutable="intermediates")
        return jax.tree.leaves(kept)

    layers = chosen(engine.runner.params[0], tokens)
    return float(np.mean([len(np.unique(layer)) for layer in map(np.asarray, layers)]))
