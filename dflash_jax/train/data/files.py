"""Files that are written atomically, and JSON lines whose errors name file and line."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dflash_jax.base.errors import ConfigError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it holds either its old or its new content, even after a power cut.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name, too, survives a power cut
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); make room or give another folder.") from error


def read_bytes(path: Path) -> bytes:
    """Read a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a JSONL file.") from error


def sha256_of(contents: Iterable[bytes]) -> str:
    """The sha256 of concatenated bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def json_lines(content: bytes, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with file and line for errors; empty lines are skipped.

    Args:
        content: of the file.
        name: of the file, for errors.

    Raises:
        ConfigError: a line is not a JSON object in UTF-8.
    """
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON ({error}); give one JSON object a line.") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where} is a JSON {type(fields).__name__}; give one JSON object a line.")
        yield where, fields
