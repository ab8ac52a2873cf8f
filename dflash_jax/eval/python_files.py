"""Read Python files from folders, archives and JSONL. Nothing here is run or imported."""

from __future__ import annotations

import gzip
import json
import lzma
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast


@dataclass(frozen=True)
class SourceFile:
    """A name and a text."""

    path: str
    text: str


def read_folder(folder: Path) -> Iterator[SourceFile]:
    """The `.py` files of a folder and its subfolders, in order; files that are not UTF-8 are skipped."""
    for path in sorted(folder.rglob("*.py")):
        yield from _decoded(path.relative_to(folder).as_posix(), path.read_bytes())


def read_archive(path: Path) -> Iterator[SourceFile]:
    """The `.py` files of a tar archive; files that are not UTF-8 are skipped.

    Raises:
        tarfile.TarError: it is no tar archive.
    """
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if stream is not None:
                yield from _decoded(member.name, stream.read())


def read_documents(path: Path) -> list[SourceFile] | None:
    """The `text` of every line of a JSONL file, named by its `path`; None if the first line has no `text`.

    Raises:
        ValueError: a later line has no `text`.
    """
    sources = []
    with _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            fields = _object(line)
            if isinstance(fields.get("text"), str):
                sources.append(SourceFile(str(fields.get("path", f"line {number}")), fields["text"]))
            elif not sources:
                return None
            else:
                raise ValueError(f"line {number} has no text")
    return sources or None


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return lzma.open(path) if path.suffix == ".xz" else path.open("rb")


def _object(line: bytes) -> dict:
    """A line as a JSON object; an empty one if the line is none."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _decoded(path: str, content: bytes) -> Iterator[SourceFile]:
    try:
        yield SourceFile(path, content.decode())
    except UnicodeDecodeError:
        return
