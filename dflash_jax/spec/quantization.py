"""What a `config.json` says of quantised matrices. Which tensors are quantised, the files alone decide (`weights`).

A configuration names modules by regexes, suffixes and classes that differ from writer to writer, and the tensors of a
fused array need not agree. So it is asked only for what tensors do not show, and compared with what they do.

Sources: auto-round 0.16's export_to_autoround; GPTQModel's QUANTIZE_CONFIG; AutoAWQ's WQLinear_GEMM;
compressed-tensors 0.20's QuantizationConfig; DeepSeek's and Qwen's fp8 checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import is_int
from dflash_jax.spec.fields import Fields

# Names of `--quantization` and of quant_method, as vLLM and SGLang have them, by what they mean.
METHODS: Mapping[str, tuple[str, ...]] = {
    "auto-round": ("auto-round", "auto_round", "inc"),
    "gptq": ("gptq", "auto_gptq", "gptq_marlin"),
    "awq": ("awq", "auto_awq", "awq_marlin"),
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("fp8",),
}
METHOD_OF = {name: method for method, names in METHODS.items() for name in names}
Packing = Literal["gptq", "awq"]


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of its quantised matrices.

    Attributes:
        method: `quant_method`, as the file spells it; None if it does not say.
        bits: of a number of most matrices; None if the file does not say.
        packing: how AutoRound, GPTQ and AWQ pack 4-bit numbers; None for other methods.
        zero_offset: what must be added to stored zero points: 1 in the first version of GPTQ's packing, else 0.
        group_sizes: every number of inputs that share a scale, of any module; -1 is all; empty if it does not say.
        is_symmetric: whether all modules have the zero point 8; None if the file does not say, or if they differ.
    """

    method: str | None
    bits: int | None
    packing: Packing | None
    zero_offset: int
    group_sizes: tuple[int, ...]
    is_symmetric: bool | None


def quantization(fields: Fields) -> Quantization | None:
    """Read the `quantization_config` of a target; None without one.

    Raises:
        ConfigError: an unknown packing, or an impossible group size.
    """
    config = fields.sub("quantization_config")
    if not config.raw:
        return None
    name = config.get("quant_method")
    method = METHOD_OF.get(str(name), None if name is None else str(name))
    packing, offset = _packing(config, method)
    modules = list(_modules(config))
    symmetric = {
        bool(flag) for module in modules for key in ("sym", "symmetric") if (flag := module.get(key)) is not None
    }
    return Quantization(
        method=None if name is None else str(name),
        bits=8 if method == "fp8" else next((bits for module in modules if is_int(bits := _bits(module))), None),
        packing=packing,
        zero_offset=offset,
        group_sizes=tuple(sorted({_group_size(config, module) for module in modules} - {0})),
        is_symmetric=next(iter(symmetric)) if len(symmetric) == 1 else None,
    )


def quantizes(asked: str | None, found: Quantization | None, where: str) -> bool:
    """Whether the option `quantization` asks to quantise a checkpoint at load, which fp8 does where it is not yet.

    Args:
        asked: the option; None asks for nothing.
        found: of the checkpoint's configuration.
        where: the checkpoint's name in errors.

    Raises:
        ConfigError: they differ.
    """
    if asked is None:
        return False
    if found is None and asked == "fp8":
        return True
    if found is None:
        raise ConfigError(
            f"quantization={asked!r}, but {where} has no quantization_config; leave it out, give a checkpoint that is "
            "quantised so, or quantise at load with 'fp8'."
        )
    if METHOD_OF[asked] != METHOD_OF.get(str(found.method), found.method):
        raise ConfigError(
            f"quantization={asked!r}, but {where} has quant_method {found.method!r}; leave it out, or give that."
        )
    return False


def block_structure(config: Fields) -> Any:
    """Rows and columns of the blocks that share a scale, as compressed-tensors names them; None if it names none."""
    return next((size for module in _modules(config) if (size := module.get("block_structure")) is not None), None)


def _packing(config: Fields, method: str | None) -> tuple[Packing | None, int]:
    """How 4-bit numbers are packed, and what their stored zero points lack."""
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise config.error(f"version={version!r} is not supported; supported is AWQ's 'gemm'.")
        return "awq", 0
    if method == "gptq":
        version = str(config.get("checkpoint_format", "gptq"))
        if version not in ("gptq", "gptq_v2"):
            raise config.error(f"checkpoint_format={version!r} is not supported; supported are 'gptq' and 'gptq_v2'.")
        return "gptq", int(version == "gptq")
    if method != "auto-round":
        return None, 0
    name = str(config.get("packing_format", config.get("backend", "auto_round:auto_gptq")))
    if "awq" in name:
        return "awq", 0
    if name == "auto_round" or "gptq" in name:  # only the name tells whether zero points are stored less 1
        return "gptq", int("gptq" in name and "v2" not in name)
    return None, 0  # llm_compressor, fp8: other tensors


def _modules(config: Fields) -> Iterator[Mapping[str, Any]]:
    """What the configuration says of all modules, of single ones, and of groups of them."""
    yield config.raw
    for name in ("extra_config", "dynamic"):
        yield from (module for module in config.sub(name).raw.values() if isinstance(module, Mapping))
    for group in config.sub("config_groups").raw.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _bits(module: Mapping[str, Any]) -> Any:
    """The bits of a number, by the three names that they have."""
    return next((module[name] for name in ("bits", "w_bit", "num_bits") if module.get(name) is not None), None)


def _group_size(config: Fields, module: Mapping[str, Any]) -> int:
    """Inputs of a module that share a scale; 0 if it does not say, or has blocks."""
    size = module.get("group_size")
    if size is None or isinstance(size, list | tuple):
        return 0
    if not is_int(size) or (size < 1 and size not in (-1, 0)):
        raise config.error(f"group_size={size!r} must be a positive integer, or -1 for all inputs.")
    return int(size)
