"""Typed reading of the fields of a `config.json`, with errors that name the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import CheckpointError, ConfigError
from dflash_jax.base.values import is_int

TOKEN_ID_LIMIT = 2**31  # token ids are int32 on the device


class Fields:
    """A JSON object; a null field counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where

    def error(self, sentence: str) -> ConfigError:
        return ConfigError(f"{self.where}: {sentence}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"the field {name!r} is missing; add it to the file.")
        if not is_int(value) or value < 1:
            raise self.error(f"{name}={value!r} must be a positive integer.")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"the field {name!r} is missing; add it to the file.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{name}={value!r} must be a positive number.")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if value not in (True, False):  # some writers store 1 and 0, which equal True and False
            raise self.error(f"{name}={value!r} must be true or false.")
        return bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, or a list of them."""
        value = self.get(name, [])
        ids = value if isinstance(value, list | tuple) else [value]
        if not all(is_int(i) and 0 <= i < TOKEN_ID_LIMIT for i in ids):
            raise self.error(f"{name}={value!r} must be a token id or a list of token ids.")
        return tuple(ids)

    def layer_types(self, num_layers: int, known: tuple[str, ...]) -> list[str] | None:
        """The kind of each layer; None if the file does not say.

        Args:
            num_layers: L.
            known: kinds that are supported.
        """
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
            raise self.error(f"layer_types={types!r} must be a list of {' and '.join(known)}.")
        if len(types) != num_layers:
            raise self.error(f"layer_types names {len(types)} layers, num_hidden_layers={num_layers}; they must agree.")
        unknown = sorted(set(types) - set(known))
        if unknown:
            raise self.error(f"layer type {unknown[0]!r} is not supported; supported are {', '.join(known)}.")
        return list(types)

    def architecture(self, known: tuple[str, ...], mistaken: tuple[str, ...] = (), advice: str = "") -> str:
        """The first of the file's architectures that is known.

        Args:
            known: architectures of this kind of model.
            mistaken: architectures of another kind, whose folder users may give in its place.
            advice: what to say of these after their name.

        Raises:
            ConfigError: none is known.
        """
        names = self.get("architectures")
        if not names:
            raise self.error(f"the field 'architectures' is missing; it must name one of {', '.join(known)}.")
        if not isinstance(names, list):
            raise self.error(f"architectures={names!r} must be a list; it must name one of {', '.join(known)}.")
        for name in names:
            if name in known:
                return name
        if names[0] in mistaken:
            raise self.error(f"{names[0]!r} {advice}")
        raise self.error(f"architecture {names[0]!r} is not supported here; supported are {', '.join(known)}.")

    def sub(self, name: str) -> Fields:
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{name}={value!r} must be an object.")
        return Fields(value, f"{self.where}, {name}")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: the file is absent or cannot be read.
        ConfigError: the file does not hold a JSON object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); give a folder that holds the model."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, not an object; download it again.")
    return raw
