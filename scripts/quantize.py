"""Write a model or a drafter with int4 or fp8 weights, in a published layout that other engines know, too.

    python scripts/quantize.py SOURCE OUT --format int4 --calibration TEXTS...      # GPTQ; see docs/quantize.md
    python scripts/quantize.py SOURCE OUT --format fp8-block
    python scripts/quantize.py build/draft dflash_jax/drafters/smollm2-135m-instruct --format fp8-channel

Projections are quantised; embedding, head, norms, convolutions, the gates of Gated DeltaNet, vision and MTP stay at 16
bits, as in published checkpoints. Only fp8 serves for drafters: drafts change slightly, outputs never.

The model goes through layer by layer. With a calibration text, each layer is run twice: as it is, to see the inputs of
its projections, and quantised, so that the next one sees what it will see in use.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from shards import Shards

from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.models.layers import DecoderLayer
from dflash_jax.models.rope import rope_tables
from dflash_jax.options.commands import run_command
from dflash_jax.options.flags import HelpFormatter
from dflash_jax.spec import DraftConfig, TargetConfig, draft_config, read_json, target_config
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.cache import SequenceCache
from dflash_jax.weights.drafter import fc_inputs
from dflash_jax.weights.encodings import Encoding, Fp8Blocks, Fp8Rows, Int4
from dflash_jax.weights.export import save_json, stored
from dflash_jax.weights.folder import WANTED_FILES
from dflash_jax.weights.formats.array import ArrayWeight
from dflash_jax.weights.formats.protocol import Product, Rows, plain
from dflash_jax.weights.layouts import SCALE_SUFFIXES
from dflash_jax.weights.loader import Params, read_tensor, wide_parameters
from dflash_jax.weights.parameters import Parameter, build, parameters_of
from dflash_jax.weights.safetensors import INDEX_NAME, TensorInfo, list_tensors
from dflash_jax.weights.tables import IGNORED_TENSORS, checkpoint_table
from pallas_kernels.lib.norm import rms_norm

TEXTS = (".py", ".txt", ".md", ".rst")  # files of a calibration folder
ROWS = 4096  # tokens that a layer computes at a time, on the device
PACKED = re.compile(r"\.(qweight|weight_packed)$")
FORMATS = ("int4", "fp8-block", "fp8-channel")

Moments = dict[tuple[str, ...], Float[Array, "I I"]]  # mean of x x^T over the inputs x of the parameter at a path


@dataclass(frozen=True, eq=False)
class Observed(ArrayWeight):
    """An array that notes the sum of x x^T over the rows x that it multiplies, while a program is traced.

    Attributes:
        sums: to which it adds under its path.
        path: its place in the layer's parameters.
    """

    sums: Moments
    path: tuple[str, ...]

    def product(self, x: Rows, dtype: Any = None, *, kernels: bool = False) -> Float[Array, "*T O"]:
        """The array's product, without kernels."""
        rows = plain(x, "a plain array").reshape(-1, x.shape[-1])
        self.sums[self.path] = jnp.matmul(rows.T, rows, precision="highest")
        return super().product(x, dtype)

    def split(self, x: Rows, *, kernels: bool) -> Product:
        """The product in one part."""
        return self.unscaled(x, kernels=False)

    def gated(self, x: Rows, *, kernels: bool) -> Rows:
        """As `ArrayWeight`, without kernels."""
        return super().gated(x, kernels=False)


class Calibration:
    """The residual stream of a calibration text, on its way through the layers of a target.

    Args:
        config: the target's.
        embedded: embeddings of the text, float32; they stay on the host, where a layer's outputs replace them.
        rows: tokens that a layer computes at a time.

    Attributes:
        stream: the residual stream before the next layer.
    """

    def __init__(self, config: TargetConfig, embedded: Float[np.ndarray, "B T D"], rows: int = ROWS):
        self._config, self.stream = config, embedded
        self._batch = max(1, rows // embedded.shape[1])

    def moments(self, index: int, params: Params) -> Moments:
        """What the projections of a layer see, by their paths."""
        totals: Moments = {}
        for part in self._parts():
            _, sums = _run(self._alone(index), params, self.stream[part], is_observed=True)
            totals = {path: sums[path] + totals.get(path, 0) for path in sums}
        return {path: total / self.stream[..., 0].size for path, total in totals.items()}

    def advance(self, index: int, params: Params) -> None:
        """Replace the residual stream by what it is after a layer."""
        for part in self._parts():
            self.stream[part] = _run(self._alone(index), params, self.stream[part], is_observed=False)[0]

    def _parts(self) -> Iterator[slice]:
        return (slice(start, start + self._batch) for start in range(0, len(self.stream), self._batch))

    def _alone(self, index: int) -> TargetConfig:
        """The configuration of one layer: equal layers share a program."""
        return replace(self._config, layers=(self._config.layers[index],))


@partial(jax.jit, static_argnames=("config", "is_observed"))
def _run(
    config: TargetConfig, params: Params, x: Float[Array, "B T D"], *, is_observed: bool
) -> tuple[Float[Array, "B T D"], Moments]:
    """The residual stream after the only layer of a model, and, if asked for, sums of x x^T for its projections."""
    sums: Moments = {}
    projections = {p.path[1:] for p in parameters_of(checkpoint_table(config), config) if p.is_rounded}

    def observed(path: tuple[Any, ...], array: Array) -> Array | Observed:
        keys = tuple(str(entry.key) for entry in path)
        return Observed(array, sums, keys) if is_observed and keys in projections else array

    layer, norm = DecoderLayer(config, 0), params["input_layernorm"]
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    variables = {"params": jax.tree_util.tree_map_with_path(observed, params)}
    rope, length = rope_tables(config, positions), positions.max(axis=1) + 1
    after, _, _ = layer.apply(
        variables, x, rms_norm(x, norm, config.rms_norm_eps), norm, rope, positions, length, SequenceCache()
    )
    return after, sums


@dataclass(frozen=True)
class Source:
    """A folder to quantise.

    Attributes:
        folder: where it is.
        raw: its config.json.
        config: what that says.
        tensors: all tensors by name, of vision and MTP, too.
        parameters: the arrays that our models make of them.
    """

    folder: Path
    raw: dict[str, Any]
    config: TargetConfig | DraftConfig
    tensors: dict[str, TensorInfo]
    parameters: list[Parameter]

    @staticmethod
    def of(folder: Path) -> Source:
        """Read a folder's configuration and the headers of its weights.

        Raises:
            ConfigError: a bad configuration, or a model with experts.
            CheckpointError: a file or tensor is missing or damaged, or the weights are in 4 bits.
        """
        path = folder / "config.json"
        raw = read_json(path)
        config: TargetConfig | DraftConfig
        if "speculators_model_type" in raw or "DFlash" in str(raw.get("architectures")):
            config = draft_config(raw, str(path), fc_inputs=fc_inputs(folder))
        else:
            config = target_config(raw, str(path))
        if config.experts is not None:
            raise ConfigError(
                f"{path}: {raw['architectures'][0]} has {config.experts.count} experts, which this command does not "
                "quantise; give a dense model."
            )
        tensors = list_tensors(folder)
        packed = next(filter(PACKED.search, tensors), None)
        if packed is not None:
            raise CheckpointError(f"{folder}: {packed!r} has 4 bits already; give the folder that it was made of.")
        return Source(folder, raw, config, tensors, wide_parameters(folder, config))

    def layers(self) -> Iterator[tuple[int | None, list[Parameter]]]:
        """The parameters of each layer with its index; first those outside of all layers, with None."""
        by_layer: dict[int | None, list[Parameter]] = {None: []}
        for parameter in self.parameters:
            number = re.fullmatch(r"layers_(\d+)", parameter.path[0])
            by_layer.setdefault(int(number.group(1)) if number else None, []).append(parameter)
        yield from by_layer.items()

    def read(self, parameters: Sequence[Parameter]) -> dict[str, np.ndarray]:
        """The tensors of parameters in the checkpoint's shapes; fp8 is multiplied by its scales."""
        return {name: read_tensor(self.tensors, name, self.config) for p in parameters for name in p.parts}

    def further(self) -> dict[str, np.ndarray]:
        """What we do not load and others do, such as vision and MTP, as it is; fp8 goes to bfloat16."""
        known = {name for parameter in self.parameters for name in parameter.parts}
        scaled = {name: [s for x in SCALE_SUFFIXES if (s := name + x) in self.tensors] for name in self.tensors}
        scales = {scale for found in scaled.values() for scale in found}
        tensors = {}
        for name in self.tensors.keys() - known - scales:
            if not IGNORED_TENSORS.search(name):
                array = read_tensor(self.tensors, name, self.config)
                tensors |= stored(name, array, "bfloat16") if scaled[name] else {name: array}
        return tensors

    def wide(self) -> list[str]:
        """Names of the modules with matrices that stay at 16 bits; nobody asks for those of a drafter."""
        if isinstance(self.config, DraftConfig):
            return []
        rounded = {name for parameter in self.parameters if parameter.is_rounded for name in parameter.parts}
        matrices = {n for n, info in self.tensors.items() if n.endswith(".weight") and len(info.shape) > 1} - rounded
        return sorted({name.removesuffix(".weight") for name in matrices} | {"lm_head"})

    def configuration(self, encoding: Encoding) -> dict[str, Any]:
        """The config.json of the quantised folder."""
        raw = dict(self.raw) | {"quantization_config": encoding.configuration(self.wide())}
        if isinstance(text := raw.get("text_config"), Mapping):
            raw["text_config"] = {name: value for name, value in text.items() if name != "quantization_config"}
        return raw


def quantize(source: Source, out: Path, encoding: Encoding, calibration: Calibration | None = None) -> int:
    """Write a quantised folder, layer by layer; returns the bytes of its tensors.

    Args:
        source: what to quantise.
        out: created if absent; other files in it stay.
        encoding: of the quantised matrices.
        calibration: of the source's model, which it goes through; None rounds to the nearest numbers.

    Raises:
        ConfigError: a matrix does not fit the encoding.
        CheckpointError: the folder has an index of other weights, or is the source.
    """
    if out.resolve() == source.folder.resolve() or (out / INDEX_NAME).exists():
        raise CheckpointError(f"{out} holds weights that would be hidden or lost; give another folder.")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".quantize-") as temporary:
        shards = Shards(Path(temporary))
        shards.add(source.further())
        for index, parameters in source.layers():
            arrays = source.read(parameters)
            moments = {}
            if calibration is not None and index is not None:
                moments = calibration.moments(index, _params(parameters, arrays))
            for parameter in parameters:
                for name in parameter.parts:
                    if not parameter.is_rounded:
                        shards.add(stored(name, arrays[name], "bfloat16"))
                        continue
                    base, matrix = name.removesuffix("weight"), arrays[name].astype(np.float32)
                    tensors = encoding.tensors(name, matrix, moments.get(parameter.path[1:]))
                    shards.add({base + suffix: array for suffix, array in tensors.items()})
                    arrays[name] = encoding.dense(tensors)
            if calibration is not None and index is not None:
                calibration.advance(index, _params(parameters, arrays))
                print(f"layer {index + 1} of {source.config.num_hidden_layers}", flush=True)
        shards.finish(out)
    if isinstance(source.config, TargetConfig):
        _copy_others(source.folder, out)
    save_json(out / "config.json", source.configuration(encoding))
    return shards.nbytes


def _params(parameters: Sequence[Parameter], arrays: Mapping[str, np.ndarray]) -> Params:
    """The parameters of a layer, in float32."""
    inside = [replace(parameter, path=parameter.path[1:]) for parameter in parameters]
    return build(inside, lambda p: jnp.asarray(p.join({name: arrays[name] for name in p.parts}), jnp.float32))


def _copy_others(source: Path, out: Path) -> None:
    """Copy tokenizer, templates and the like."""
    for pattern in WANTED_FILES:
        for path in source.glob(pattern):
            if path.suffix != ".safetensors" and path.name not in ("config.json", INDEX_NAME):
                shutil.copy(path, out / path.name)


def calibrated(source: Source, texts: Sequence[Path], samples: int, length: int) -> Calibration:
    """A calibration text in pieces.

    Args:
        source: a target with a tokenizer.
        texts: files, and folders of which all texts are taken.
        samples: pieces at most, evenly from all of the text.
        length: tokens of a piece.

    Raises:
        CheckpointError: the folder has no tokenizer.
        ConfigError: a drafter, a text that is too short or missing, or pieces longer than the model takes.
    """
    config, tokenizer = source.config, Tokenizer.of(source.folder)
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{source.folder} is a drafter, and only targets are calibrated; leave out --calibration.")
    if tokenizer is None:
        raise CheckpointError(f"{source.folder} has no tokenizer for the calibration text; add its tokenizer.json.")
    if length > config.max_position_embeddings:
        raise ConfigError(f"--length {length} is more than the model's {config.max_position_embeddings}; give less.")
    contents = (file.read_text(encoding="utf-8") for path in texts for file in _files(path))
    tokens = np.array([token for content in contents for token in tokenizer.encode(content)], np.int32)
    pieces = tokens[: len(tokens) // length * length].reshape(-1, length)
    if not len(pieces):
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens, fewer than --length {length}; give more text."
        )
    chosen = pieces[np.linspace(0, len(pieces) - 1, min(samples, len(pieces))).astype(int)]
    embedding = next(parameter for parameter in source.parameters if parameter.path == ("embed_tokens",))
    (table,) = source.read([embedding]).values()
    return Calibration(config, table[chosen].astype(np.float32))


def _files(path: Path) -> list[Path]:
    """A file, or all texts of a folder."""
    if not path.exists():
        raise ConfigError(f"--calibration {path} does not exist; give text files or folders.")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in TEXTS)
    if not files:
        kinds = f"{', '.join(TEXTS[:-1])} and {TEXTS[-1]}"
        raise ConfigError(f"--calibration {path} holds none of {kinds}; give text files.")
    return files


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command's arguments, checked against each other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    parser.add_argument("source", type=Path, help="folder of the model or drafter, at 16 or 32 bits or in fp8")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--format", choices=FORMATS, required=True, help="format of the written matrices")
    parser.add_argument("--calibration", type=Path, nargs="+", help="int4: text files and folders to round for (GPTQ)")
    parser.add_argument("--nearest", action="store_true", help="int4: round to the nearest numbers, without a text")
    parser.add_argument("--asymmetric", action="store_true", help="int4: a zero point for each group")
    parser.add_argument("--group-size", type=int, default=128, help="int4: inputs that share a scale")
    parser.add_argument("--samples", type=int, default=128, help="pieces of the calibration text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    args = parser.parse_args(arguments)
    if args.format == "int4" and (args.calibration is None) != args.nearest:
        parser.error("--format int4 needs either --calibration with texts or --nearest")
    if args.format != "int4" and (args.calibration or args.nearest or args.asymmetric):
        parser.error(f"--format {args.format} takes none of --calibration, --nearest and --asymmetric")
    args.run = run
    return args


def run(args: argparse.Namespace) -> int:
    """Quantise and print how large the result is; returns 0.

    Raises:
        DFlashError: the source cannot be quantised so.
    """
    source = Source.of(args.source)
    int4 = Int4(args.group_size, symmetric=not args.asymmetric)
    encoding = {"int4": int4, "fp8-block": Fp8Blocks(), "fp8-channel": Fp8Rows()}[args.format]
    if encoding is int4 and isinstance(source.config, DraftConfig):
        raise ConfigError(
            f"{args.source} is a drafter, whose files are read in fp8 or wider; give --format fp8-channel."
        )
    calibration = None if args.calibration is None else calibrated(source, args.calibration, args.samples, args.length)
    print(f"{quantize(source, args.out, encoding, calibration):,} bytes in {args.out}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error."""
    return run_command(parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
