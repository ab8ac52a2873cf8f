"""Weights and optimizer of a drafter in training, their shardings, and the jitted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from dflash_jax.base.errors import ConfigError
from dflash_jax.models.drafters.dflash import DraftModel
from dflash_jax.parallel.mesh import SPLIT
from dflash_jax.progress import phase
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.train.cache import SequenceCache
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.objective import Batch, Measured, block_loss, target_features
from dflash_jax.weights.loader import Params
from dflash_jax.weights.parameters import Parameter, build, parameters_of
from dflash_jax.weights.tables import checkpoint_table


class TrainState(NamedTuple):
    """All that a step changes, in float32.

    Attributes:
        params: the drafter's.
        optimizer: state of the optimizer.
        progress: share of the run that was done before the last step.
    """

    params: Params
    optimizer: Any
    progress: Float[Array, ""]


def make_mesh(config: TrainConfig) -> Mesh:
    """A mesh of axes `dp`, which splits the batch, and `tp`, which splits weights.

    Raises:
        ConfigError: there are fewer devices.
    """
    wanted, devices = config.data_parallel_size * config.tensor_parallel_size, jax.devices()
    if wanted > len(devices):
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} times tensor_parallel_size={config.tensor_parallel_size} "
            f"needs {wanted} devices and JAX sees {len(devices)}; lower one of them."
        )
    shape = (config.data_parallel_size, config.tensor_parallel_size)
    return jax.make_mesh(shape, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=devices[:wanted])


def place(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Split a weight over `tp` on its first letter that can be split evenly, as the engine does; else replicate it."""
    letters = zip(axes, shape, strict=True)
    first = next((i for i, (axis, n) in enumerate(letters) if axis in SPLIT and n % mesh.shape["tp"] == 0), None)
    return NamedSharding(mesh, PartitionSpec(*("tp" if i == first else None for i in range(len(axes)))))


def shardings(mesh: Mesh, config: DraftConfig) -> Params:
    """Shardings of the parameters of a drafter."""
    parameters = parameters_of(checkpoint_table(config), config)
    return build(parameters, lambda parameter: place(mesh, parameter.axes, parameter.shape))


def learning_rate(config: TrainConfig, progress: Any, xp: ModuleType = np) -> Any:
    """Linear warm-up, then a cosine down to min_learning_rate.

    Args:
        config: options of the run.
        progress: share of the run that is done, 0 to 1.
        xp: `numpy` on the host, `jax.numpy` inside of a jitted function.
    """
    warm = max(config.warmup_ratio, 1e-9)
    cosine = 0.5 * (1 + xp.cos(xp.pi * (progress - warm) / max(1 - warm, 1e-9)))
    lowest = config.min_learning_rate
    return config.learning_rate * xp.where(progress < warm, progress / warm, lowest + (1 - lowest) * cosine)


def make_optimizer(config: TrainConfig, draft: DraftConfig) -> optax.GradientTransformation:
    """AdamW, or Muon with AdamW for norms and biases, after clipping the gradient; for a learning rate of -1.

    Only matrices decay. With both optimizers a step changes a weight by about the learning rate.
    Source: Muon is Scalable for LLM Training, arXiv 2502.16982; it advises a fifth of that.
    """
    decay = config.weight_decay, lambda params: jax.tree_util.tree_map_with_path(_decays, params)
    if config.optimizer == "adamw":
        steps = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.95), optax.add_decayed_weights(*decay))
    else:
        steps = optax.contrib.muon(
            learning_rate=-1.0,
            weight_decay=decay[0],
            weight_decay_mask=decay[1],
            adam_b2=0.95,
            muon_weight_dimension_numbers=_matrices(draft),
            consistent_rms=1.0,
        )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), steps)


def _matrices(draft: DraftConfig) -> Any:
    """How each array of a drafter is a matrix, or several, for Muon; None for vectors."""

    def matrix(parameter: Parameter) -> optax.contrib.MuonDimensionNumbers | None:
        axes = [(letter, i) for i, letter in enumerate(parameter.axes) if letter != "J"]  # J counts matrices
        width = [i for letter, i in axes if letter == "D"]
        others = [i for letter, i in axes if letter != "D"]
        return optax.contrib.MuonDimensionNumbers(width, others) if width and others else None

    return build(parameters_of(checkpoint_table(draft), draft), matrix)


def _decays(path: tuple[Any, ...], array: jax.Array) -> bool:
    """Whether a parameter is a matrix; biases of heads have two axes and are none."""
    return array.ndim > 1 and not path[-1].key.endswith("_bias")


def init_state(
    draft: DraftConfig, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int, params: Params | None = None
) -> TrainState:
    """A state with a fresh optimizer, on the mesh.

    Args:
        draft: configuration of the drafter.
        optimizer: of `make_optimizer`.
        mesh: of `make_mesh`.
        seed: decides random weights.
        params: weights to start from; None draws random ones.
    """
    places = shardings(mesh, draft)
    if params is None:
        params = jax.jit(partial(_random_params, draft), out_shardings=places)(jax.random.key(seed))
    params = jax.tree.map(lambda array, where: jax.device_put(array.astype(jnp.float32), where), params, places)
    return TrainState(params, *_settled((optimizer.init(params), jnp.float32(0)), mesh))


def _settled(tree: Any, mesh: Mesh) -> Any:
    """Replicate the arrays that are not on the mesh yet."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, replicated), tree)


def _random_params(draft: DraftConfig, key: jax.Array) -> Params:
    block = jnp.zeros((1, draft.block_size, draft.hidden_size))
    positions = jnp.arange(draft.block_size)[None]
    model = DraftModel(draft)
    features = jnp.zeros((1, draft.block_size, len(draft.target_layer_ids) * draft.target_hidden_size))

    def touch(module: DraftModel) -> None:
        cache = module.write_context(features, positions, SequenceCache())
        module(block, positions, cache)

    return model.init(key, method=touch)["params"]


Step = Callable[[TrainState, Batch, Params, Array | np.ndarray | None, Array | np.float32], tuple[TrainState, Measured]]


def make_step(
    config: TrainConfig, target: TargetConfig, draft: DraftConfig, optimizer: optax.GradientTransformation
) -> Step:
    """The step `(state, batch, target params, features or None, progress) -> state, measured`, not compiled.

    Args:
        config: options of the run.
        target: configuration of the target.
        draft: configuration of the drafter.
        optimizer: of `make_optimizer`.
    """
    dtype = jnp.dtype(config.dtype)

    def loss(params: Params, batch: Batch, frozen: Params, features: jax.Array) -> tuple[jax.Array, Measured]:
        return block_loss(
            jax.tree.map(lambda array: array.astype(dtype), params),
            batch,
            features,
            frozen["embed_tokens"],
            frozen["lm_head" if "lm_head" in frozen else "embed_tokens"],
            config=draft,
            loss=config.loss,
            gamma=config.decay,
            alpha=config.dpace_alpha,
        )

    def step(
        state: TrainState, batch: Batch, frozen: Params, known: Array | np.ndarray | None, progress: Array | np.float32
    ) -> tuple[TrainState, Measured]:
        taps = draft.target_layer_ids
        features = target_features(frozen, target, taps, batch.tokens) if known is None else known
        gradients, measured = jax.grad(loss, has_aux=True)(state.params, batch, frozen, features)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        rate = learning_rate(config, progress, jnp)
        params = jax.tree.map(lambda param, update: param - rate * update, state.params, updates)
        return TrainState(params, optimizer_state, jnp.float32(progress)), measured

    return step


def compile_step(
    step: Step, shapes: Sequence[tuple[int, int, int]], state: TrainState, frozen: Params, mesh: Mesh, width: int | None
) -> dict[int, Step]:
    """Compile the step for all shapes of batches, side by side; the state is donated.

    Args:
        step: of `make_step`.
        shapes: tokens T, rows B and anchors A.
        state: only its shapes and shardings matter.
        frozen: the target's parameters; likewise.
        mesh: that both are on.
        width: C of the features that come with a batch; None if the step computes them.

    Returns:
        Compiled steps by T.
    """
    places = (jax.tree.map(lambda array: array.sharding, state), None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=places)

    def compiled(shape: tuple[int, int, int]) -> Step:
        T, B, A = shape
        batch = put_batch(Batch(np.zeros((B, T), np.int32), np.zeros(B, np.int32), np.zeros((B, A), np.int32)), mesh)
        dtype = jax.tree.leaves(frozen)[0].dtype
        known = None if width is None else jax.ShapeDtypeStruct((B, T, width), dtype)
        return jitted.lower(state, batch, frozen, known, np.float32(0)).compile()

    with phase("compiling the step", len(shapes)) as now, ThreadPoolExecutor() as pool:
        return dict(zip((T for T, _, _ in shapes), now.over(pool.map(compiled, shapes)), strict=True))


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Put a batch on the devices, its rows split over `dp`."""
    rows = NamedSharding(mesh, PartitionSpec("dp"))
    return Batch(*(jax.device_put(np.asarray(array), rows) for array in batch))
