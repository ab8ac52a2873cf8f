"""The folder that data is made in: its files, and a manifest with their hashes and everything they depend on.

A file counts once the manifest names it. The manifest is written after each file, and is all that a run needs to be
resumed.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from dflash_jax.base.errors import ConfigError
from dflash_jax.train.data.files import read_bytes, sha256_of, write_atomically

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True):
    """The entry of a file in the manifest.

    Attributes:
        sha256: of its content.
        counts: what became of the prompts or responses of the file.
    """

    sha256: str
    counts: dict[str, int]


class Manifest(msgspec.Struct, frozen=True):
    """What a folder holds.

    Attributes:
        format_version: of the manifest.
        model: as it was named on the command line.
        arguments: everything that decides what the data is.
        versions: of the software that wrote it last.
        counts: sums over all files.
        prompts: files of prompts that the model made, by name.
        shards: files of responses, by name.
        complete: whether nothing is left to make.
    """

    format_version: int
    model: str
    arguments: dict[str, Any]
    versions: dict[str, str]
    counts: dict[str, int]
    prompts: dict[str, FileEntry]
    shards: dict[str, FileEntry]
    complete: bool


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        ConfigError: it is missing, damaged or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {MANIFEST}; give a folder that `dflash_jax.train.data` has made.")
    try:
        manifest = msgspec.json.decode(read_bytes(path), type=Manifest)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); make the data again in another folder.") from error
    if manifest.format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format_version {manifest.format_version} and this version reads {FORMAT_VERSION}; "
            "make the data again in another folder."
        )
    return manifest


def checked_bytes(path: Path, entry: FileEntry) -> bytes:
    """Read a file that the manifest names.

    Raises:
        ConfigError: it cannot be read, or its sha256 is another.
    """
    content = read_bytes(path)
    if sha256_of([content]) != entry.sha256:
        raise ConfigError(f"{path} does not have the sha256 that {MANIFEST} states; delete it and make it again.")
    return content


class DataFolder:
    """A folder that data is made in, new or begun before with the same arguments.

    Args:
        path: made if absent.
        model: as it was named on the command line.
        arguments: everything that decides what the data is.

    Raises:
        ConfigError: it was begun with other arguments, a file of it is corrupt, or it holds something else.
    """

    def __init__(self, path: Path, *, model: str, arguments: Mapping[str, Any]):
        self.path = path
        stated = json.loads(json.dumps(arguments))  # as the manifest will have them
        versions = {
            "dflash_jax": version("dflash-jax"),
            "jax": version("jax"),
            "python": platform.python_version(),
        }
        old = self._find(stated)
        self.manifest = Manifest(
            format_version=FORMAT_VERSION,
            model=model,
            arguments=stated,
            versions=versions,
            counts=old.counts if old else {},
            prompts=self._intact(old.prompts) if old else {},
            shards=self._intact(old.shards) if old else {},
            complete=False,
        )
        missing = old is None or {*old.prompts, *old.shards} - {*self.manifest.prompts, *self.manifest.shards}
        self._save(complete=old is not None and old.complete and not missing)  # deleted files are made again

    def _find(self, arguments: dict[str, Any]) -> Manifest | None:
        """The manifest of a run with these arguments; None in a folder that is empty or absent."""
        if not (self.path / MANIFEST).exists():
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                others = sorted(p.name for p in self.path.iterdir() if p.name != f".{MANIFEST}.tmp")
            except OSError as error:
                raise ConfigError(
                    f"--out {self.path} cannot be made ({error.strerror}); give another folder."
                ) from error
            if others:
                raise ConfigError(
                    f"--out {self.path} holds {others[0]!r} and no {MANIFEST}; give an empty folder or a new one."
                )
            return None
        manifest = read_manifest(self.path)
        for name in sorted({*arguments, *manifest.arguments}):
            old, new = manifest.arguments.get(name), arguments.get(name)
            if old != new:
                raise ConfigError(
                    f"--out {self.path} was begun with {name}={json.dumps(old)}, now it is {json.dumps(new)}; "
                    "give the same arguments or another folder."
                )
        return manifest

    def _intact(self, entries: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """Entries whose files are present, their hashes checked."""
        present = {name: entry for name, entry in entries.items() if (self.path / name).exists()}
        for name, entry in present.items():
            checked_bytes(self.path / name, entry)
        return present

    def read_prompts(self, name: str) -> bytes:
        """Read a file of prompts that the manifest names."""
        return checked_bytes(self.path / name, self.manifest.prompts[name])

    def add_prompts(self, name: str, lines: Iterable[Any], counts: Mapping[str, int]) -> None:
        """Write a file of prompts, and name it in the manifest."""
        entry = self._write(name, lines, counts)
        self._save(prompts=self.manifest.prompts | {name: entry})

    def add_shard(self, name: str, lines: Iterable[Any], counts: Mapping[str, int]) -> None:
        """Write a file of responses, and name it in the manifest."""
        entry = self._write(name, lines, counts)
        self._save(shards=self.manifest.shards | {name: entry})

    def note_prompts(self, counts: Mapping[str, int]) -> None:
        """Keep counts of what became of the prompts that were read."""
        self._save(counts=dict(counts))

    def finish(self) -> None:
        """Mark the folder complete."""
        self._save(complete=True)

    def _write(self, name: str, lines: Iterable[Any], counts: Mapping[str, int]) -> FileEntry:
        content = msgspec.json.Encoder().encode_lines(list(lines))
        write_atomically(self.path / name, content)
        return FileEntry(sha256_of([content]), dict(counts))

    def _save(self, **changes: Any) -> None:
        manifest = msgspec.structs.replace(self.manifest, **changes)
        of_shards: Counter[str] = Counter()
        for entry in manifest.shards.values():
            of_shards.update(entry.counts)
        self.manifest = msgspec.structs.replace(
            manifest,
            counts=manifest.counts | of_shards,
            prompts=dict(sorted(manifest.prompts.items())),
            shards=dict(sorted(manifest.shards.items())),
        )
        write_atomically(self.path / MANIFEST, msgspec.json.format(msgspec.json.encode(self.manifest)) + b"\n")
