"""Load parameters from safetensors files, by the architecture's table of tensors.

All headers are checked against the table before any tensor is read: a wrong file fails at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from dflash_jax.base.errors import CheckpointError
from dflash_jax.spec import DraftConfig, TargetConfig
from dflash_jax.spec.hybrid import ARCHITECTURES as HYBRIDS
from dflash_jax.weights.formats.protocol import Weight
from dflash_jax.weights.formats.side_by_side import SideBySide
from dflash_jax.weights.formats.transposed import Transposed, inputs_first
from dflash_jax.weights.formats.weight import weight_of
from dflash_jax.weights.layouts import SCALE_SUFFIXES, Matrix, Stored, dequantized
from dflash_jax.weights.naming import SKIPPED, Naming, naming_of
from dflash_jax.weights.parameters import Parameter, build, output_axes, parameters_of
from dflash_jax.weights.quantized import find_quantized, find_widened, grouped, stacked, uniform
from dflash_jax.weights.safetensors import TensorInfo, list_tensors
from dflash_jax.weights.tables import IGNORED_TENSORS, checkpoint_shape, checkpoint_table, kv_scale_names
from dflash_jax.weights.widened import Widened

logger = logging.getLogger(__name__)

Params = dict[str, Any]  # nested dicts of arrays, as Flax modules take them
Placement = Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding | None]

FP8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
MOST_NAMED = 5  # problems that one error lists


@dataclass(frozen=True)
class KVScales:
    """Scales of a stored fp8 KV cache, float32, for each layer and kv head: real value = stored value * scale."""

    k: Float[np.ndarray, "L K"]
    v: Float[np.ndarray, "L K"]


def load_kv_scales(folder: Path, config: TargetConfig | DraftConfig) -> KVScales | None:
    """Load the scales of an fp8 KV cache, which checkpoints give for each layer or for each kv head.

    Returns:
        float32 scales, 1 where the checkpoint has none; None if it has no scale at all.

    Raises:
        CheckpointError: a scale is not positive and finite, has a wrong shape, or is there under two names.
    """
    tensors = list_tensors(folder)
    naming, layers = naming_of(tensors, config), range(config.num_hidden_layers)
    scales_of = {x: [_kv_scale(tensors, kv_scale_names(config, i, x, naming), config) for i in layers] for x in "kv"}
    if all(scale is None for scales in scales_of.values() for scale in scales):
        return None
    one = np.ones(config.stored.num_key_value_heads, np.float32)
    scales = (np.stack([one if scale is None else one * scale for scale in scales_of[x]]) for x in ("k", "v"))
    k, v = (np.repeat(scale, config.kv_copies, axis=1) for scale in scales)
    return KVScales(k=k, v=v)


def _kv_scale(
    tensors: dict[str, TensorInfo], names: list[str], config: TargetConfig | DraftConfig
) -> np.ndarray | None:
    """The scale [] or [K] that has one of these names; None if the checkpoint has none."""
    infos = [tensors[name] for name in names if name in tensors]
    if not infos:
        return None
    info, *others = infos
    if others:
        raise CheckpointError(f"{info.file}: {info.name!r} and {others[0].name!r} are the same scale; remove one.")
    heads = config.stored.num_key_value_heads
    if not jnp.issubdtype(info.dtype, jnp.floating) or tuple(n for n in info.shape if n != 1) not in ((), (heads,)):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} should hold one float, or one for each of {heads} kv heads, and is "
            f"{info.dtype}{list(info.shape)}; export the scales of the KV cache again."
        )
    scale = info.load().astype(np.float32).squeeze()
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} should hold positive finite numbers and holds {scale.tolist()}; "
            "export the scales of the KV cache again."
        )
    return scale


def load_params(
    folder: Path,
    config: TargetConfig | DraftConfig,
    dtype: DTypeLike,
    place: Placement = lambda axes, shape: None,
    *,
    transpose: bool = False,
    quantize: Callable[[np.ndarray], Matrix] | None = None,
    keep_quantized: bool = True,
) -> Params:
    """Load a model's parameters.

    Args:
        folder: holds `*.safetensors`, with or without an index.
        config: the model's.
        dtype: float32 or bfloat16; tensors of other float types are converted. Quantised matrices of a target stay as
            they are stored, whatever the dtype; other tensors in fp8 are multiplied by their scales.
        place: gives the sharding of an array by its axes and shape; None leaves it on the default device.
        transpose: hold projections as CPUs want them: `Transposed`, and small ones in fp8 so, too.
        quantize: rounds matrices that are not quantised (`layouts.rounded`, `layouts.rounded_int4`), also those of
            experts, but not the gates of Gated DeltaNet; None leaves them.
        keep_quantized: keep quantised matrices as they are stored; False widens those in fp8, for training.

    Returns:
        Nested dicts of arrays and weights, as the Flax modules take them.

    Raises:
        CheckpointError: a tensor is missing, surplus, or has a shape or dtype that the table does not expect.
    """
    tensors = list_tensors(folder)
    naming = naming_of(tensors, config)
    tensors = _without_skipped(folder, tensors, config)
    table = checkpoint_table(config, naming)
    parameters = parameters_of(table, config)
    quantized = find_quantized(tensors, parameters, table, config, on_cpu=transpose) if keep_quantized else {}
    widened = find_widened(tensors, table, quantized, config) if keep_quantized else {}
    _check(folder, tensors, table, config, naming, {**quantized, **widened})
    _log_widened(folder, tensors, parameters, quantized, widened, dtype)

    def put(array: np.ndarray, axes: tuple[str, ...], floating: DTypeLike = dtype) -> jax.Array:
        # Whoever does not wait reads on while transfers hold the arrays before: the host's memory would not do.
        placed = jax.block_until_ready(jax.device_put(array, place(axes, array.shape)))
        return placed.astype(floating if jnp.issubdtype(placed.dtype, jnp.floating) else jnp.int32)

    def read_one(name: str) -> np.ndarray:
        if name not in widened:
            return read_tensor(tensors, name, config)
        return widened[name].read().reshape(checkpoint_shape(table[name], config))

    def dense(parameter: Parameter) -> jax.Array | Transposed:
        array = parameter.join({name: read_one(name) for name in parameter.parts})
        if transpose and parameter.is_projection:
            return Transposed(put(inputs_first(array, output_axes(parameter.axes)), ("D", "D")), parameter.shape)
        return put(array, parameter.axes, jnp.float32 if parameter.is_float32 else dtype)

    def read(parameter: Parameter) -> jax.Array | Weight:
        loaders = _loaders(parameter, read_one, quantized, quantize)
        if parameter.is_experts:
            return stacked(parameter, loaders, place) if loaders else dense(parameter)
        matrices = {name: load() for name, load in loaders.items()}
        pieces = uniform(parameter, matrices)
        weights = [grouped(p, matrices, place) if matrices.keys() & p.parts else dense(p) for p in pieces]
        return weights[0] if len(weights) == 1 else _side_by_side(parameter, weights)

    return build(parameters, read)


def _log_widened(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    parameters: Iterable[Parameter],
    quantized: Mapping[str, Stored],
    widened: Mapping[str, Widened],
    dtype: DTypeLike,
) -> None:
    """Warn of matrices that take more bytes than in the file."""
    experts = {name for p in parameters if p.is_experts for name in p.parts if name in tensors} - quantized.keys()
    if twice := sum(tensors[name].dtype in FP8 for name in experts):
        logger.warning(
            "%s: %d matrices of experts in fp8 are held in %s: twice the bytes.", folder, twice, jnp.dtype(dtype)
        )
    if widened:
        count, name = len(widened), next(iter(widened))
        logger.warning("%s: %d packed matrices are held in %s, %s among them.", folder, count, jnp.dtype(dtype), name)


def _side_by_side(parameter: Parameter, weights: Iterable[jax.Array | Weight]) -> SideBySide:
    return SideBySide(tuple(map(weight_of, weights)), parameter.axis, output_axes(parameter.axes))


def _loaders(
    parameter: Parameter,
    read: Callable[[str], np.ndarray],
    quantized: Mapping[str, Stored],
    quantize: Callable[[np.ndarray], Matrix] | None,
) -> dict[str, Callable[[], Matrix]]:
    """What reads each quantised matrix of a parameter, or rounds one if that is asked for.

    Those of a layer's experts are all of them or none: `find_quantized` sees to it.
    """
    loaders = {name: quantized[name].load for name in parameter.parts if name in quantized}
    others = [name for name in parameter.parts if name not in quantized]
    if quantize is None or not (parameter.is_experts or parameter.is_rounded) or not others:
        return loaders
    if parameter.is_experts and not parameter.is_stacked:  # one tensor with the matrices of all
        [name] = others
        matrices = read(name).reshape(-1, *parameter.shape[-2:])
        return {f"{name}[{i}]": partial(quantize, matrix) for i, matrix in enumerate(matrices)}

    def rounded(name: str) -> Matrix:
        tensor = read(name)
        return quantize(tensor.reshape(len(tensor), -1))

    return loaders | {name: partial(rounded, name) for name in others}


def wide_parameters(folder: Path, config: TargetConfig | DraftConfig) -> list[Parameter]:
    """The parameters of a checkpoint that is not packed: its matrices have 16 or 32 bits, or are in fp8. Reads headers.

    Raises:
        CheckpointError: as `load_params`; packed matrices are missing ones.
    """
    tensors = list_tensors(folder)
    naming = naming_of(tensors, config)
    table = checkpoint_table(config, naming)
    _check(folder, _without_skipped(folder, tensors, config), table, config, naming, {})
    return parameters_of(table, config)


def _without_skipped(
    folder: Path, tensors: dict[str, TensorInfo], config: TargetConfig | DraftConfig
) -> dict[str, TensorInfo]:
    """A hybrid's tensors without those for images (`model.visual`) and of the built-in drafter (`mtp`)."""
    if not isinstance(config, TargetConfig) or config.architecture not in HYBRIDS:
        return tensors
    groups = {name: SKIPPED.match(name) for name in tensors}
    counts = Counter(group.group(1) or group.group(2) for group in groups.values() if group)
    if counts:
        skipped = " and ".join(f"{count} tensors of {group}" for group, count in counts.items())
        logger.info("%s: %s are skipped; only the language model is loaded.", folder, skipped)
    return {name: info for name, info in tensors.items() if groups[name] is None}


def _check(
    folder: Path,
    tensors: dict[str, TensorInfo],
    table: dict[str, str],
    config: TargetConfig | DraftConfig,
    naming: Naming,
    quantized: Mapping[str, Stored | Widened],
) -> None:
    """Raise one error for all tensors that do not fit the table, with file, tensor, expected and actual shape."""
    problems: list[str] = []
    for name, axes in table.items():
        expected, info = checkpoint_shape(axes, config), tensors.get(name)
        if name in quantized:
            problems += quantized[name].problems
        elif info is None and (packed := tensors.get(f"{name.removesuffix('.weight')}.qweight")):
            problems.append(f"{packed.file}: tensor {packed.name!r} is packed, and {name!r} must be at 16 bits")
        elif info is None:
            problems.append(f"{folder}: tensor {name!r} of shape {list(expected)} is missing")
        elif info.shape != expected:
            problems.append(
                f"{info.file}: tensor {name!r} should have shape {list(expected)} and has {list(info.shape)}"
            )
        elif name == "d2t":
            if not np.issubdtype(info.dtype, np.integer):
                problems.append(f"{info.file}: tensor {name!r} should hold integers and holds {info.dtype}")
        elif not jnp.issubdtype(info.dtype, jnp.floating):
            problems.append(f"{info.file}: tensor {name!r} should hold floats and holds {info.dtype}")
    layers = range(config.num_hidden_layers)
    known = table.keys() | {info.name for stored in quantized.values() for info in stored.tensors.values()}
    known |= {name for i in layers for x in "kv" for name in kv_scale_names(config, i, x, naming)}
    for name, info in tensors.items():
        if name in known or IGNORED_TENSORS.search(name) or name == naming.head:  # a tied or copied head
            continue
        base = next((name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix)), None)
        if base not in table or base not in tensors or tensors[base].dtype not in FP8:
            problems.append(f"{info.file}: tensor {name!r} of shape {list(info.shape)} is surplus")
    if problems:
        rest = f"; and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
        raise CheckpointError(
            "; ".join(problems[:MOST_NAMED]) + rest + ". Check that config.json and the weights belong together."
        )


def read_tensor(tensors: Mapping[str, TensorInfo], name: str, config: TargetConfig | DraftConfig) -> np.ndarray:
    """Load a tensor in the checkpoint's shape; one that has a scale is dequantised to float32."""
    array = tensors[name].load()
    scale = next((tensors[name + suffix] for suffix in SCALE_SUFFIXES if name + suffix in tensors), None)
    return array if scale is None else dequantized(array, scale, config.weight_block_size)
