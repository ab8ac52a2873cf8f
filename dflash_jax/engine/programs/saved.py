"""Compiled programs in files: a start that finds its programs neither traces nor compiles them.

JAX's own cache is asked once a program is traced and lowered, which holds Python's lock, so that one program waits for
the other: 3 s each with Qwen3.6-27B, on top of which come seconds to compile. These files are found without tracing, by
everything that a program is traced from: its arguments, the code of this package, versions, settings and devices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import os
import platform
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from dflash_jax.base.env import xla_flags
from dflash_jax.engine.programs.program import Program
from dflash_jax.parallel.platform import load_runtime

PACKAGES = ("dflash_jax", "pallas_kernels")  # whose code programs are traced from
UNUSED_SECONDS = 30 * 86_400  # after which the programs of another version, or of other devices, are deleted
COMPRESSION = 1  # of zlib, the fastest: a sixth of the bytes on CPUs, in a twentieth of the time that loading takes

logger = logging.getLogger(__name__)


class SavedPrograms:
    """Programs of one version of the code, on the devices of this process, in files.

    Nothing here raises: what cannot be saved or read is compiled.

    Args:
        folder: with a folder in it for each version. JAX unpickles what lies there, so it must be the user's own.
    """

    def __init__(self, folder: Path):
        self._folder: Path | None = folder / _digest(_origin())[:32]
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(self._folder)
            load_runtime()
            for other in folder.iterdir():
                if time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                    shutil.rmtree(other, ignore_errors=True)
        except OSError as error:
            logger.warning("compiled programs are not kept for the next start (DFLASH_CACHE_DIR moves them): %s", error)
            self._folder = None

    def load(self, program: Program) -> Callable[..., Any] | None:
        """The executable of a program, whose result's structure is set; None if there is none."""
        file = self._file(program)
        if file is None or not file.exists():
            return None
        try:
            described, _, data = zlib.decompress(file.read_bytes()).partition(b"\n")
            result: Any = jax.tree.structure(_built(json.loads(described), program.arguments))
            arguments = jax.tree.structure((tuple(0 for _ in program.leaves), {}))
            results = jax.tree.structure([0] * result.num_leaves)
            executable: Callable[..., Any] = serialize_executable.deserialize_and_load(
                data, arguments, results, execution_devices=_devices(program)
            )
        except Exception as error:  # whatever is wrong with it, it can be compiled
            logger.warning("%s is compiled again, since %s cannot be read: %s", program.label, file, error)
            file.unlink(missing_ok=True)
            return None
        program.result = result
        return executable

    def save(self, program: Program, executable: Any) -> None:
        """Save the executable of a program that this process has compiled, and not run: XLA's CPU backend refuses then.

        It holds Python's lock while it serialises, 0.14 s for a round of the embedded pair.
        """
        file = self._file(program)
        if file is None:
            return
        try:
            described = _described(program.result, program.arguments)
            if not _are_alike(jax.tree.structure(_built(described, program.arguments)), program.result):
                raise ValueError(f"its result cannot be described: {program.result}")
            data, _, _ = serialize_executable.serialize(executable)
            written = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            written.write_bytes(zlib.compress(json.dumps(described).encode() + b"\n" + data, COMPRESSION))
            written.replace(file)  # whole or not at all, whoever else writes it
        except Exception as error:
            logger.info("%s is not kept for the next start: %s", program.label, error)

    def _file(self, program: Program) -> Path | None:
        """The file of a program; None if it has no devices, or its text may be that of another one."""
        devices = [device.id for device in _devices(program)]
        if self._folder is None or not devices:
            return None
        function, structure, leaves, static = program.key
        named = [(name, _named(value)) for name, value in static]
        text = repr((_named(function), str(structure), leaves, named, program.options, devices))
        return None if " at 0x" in text else self._folder / _digest(text)  # the address of an object without a name


def _described(result: Any, arguments: Sequence[Any]) -> Any:
    """The structure of a result for JSON: most of it is an argument that was changed, whose place stands for it.

    Beside arguments there are tuples, None, and dataclasses of this package without static fields.
    """
    if (node := result.node_data()) is None:
        return 0
    for i, argument in enumerate(arguments):
        if _are_alike(result, argument):
            return {"argument": i}
    kind, _ = node
    parts = [_described(part, arguments) for part in result.children()]
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "parts": parts}


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two structures are the same; JAX takes dataclasses of as many fields for equal, so texts are compared."""
    return one == other and str(one) == str(other)


def _built(described: Any, arguments: Sequence[Any]) -> Any:
    """A tree of such a structure."""
    if described == 0:
        return 0
    if "argument" in described:
        structure = arguments[described["argument"]]
        return jax.tree.unflatten(structure, [0] * structure.num_leaves)
    parts = [_built(part, arguments) for part in described["parts"]]
    module, _, name = described["type"].rpartition(".")
    if module == "builtins":
        return tuple(parts) if name == "tuple" else None
    kind = getattr(importlib.import_module(module), name) if module.startswith("dflash_jax.") else None
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise ValueError(f"{described['type']} is no part of a result.")
    return kind(*parts)


def _devices(program: Program) -> list[jax.Device]:
    """The devices of a program in the order of its mesh, as far as its arguments lie on any."""
    shardings = [leaf.sharding for leaf in program.leaves if leaf.sharding]
    meshes = [s.mesh.devices.flat if isinstance(s, NamedSharding) else s.device_set for s in shardings]
    return list(max(meshes, key=len, default=()))


def _named(value: Any) -> str:
    """A text of a value that is the same in every process: functions of modules have names."""
    if isinstance(value, partial):
        return repr((_named(value.func), value.args, sorted(value.keywords.items())))
    name = getattr(value, "__qualname__", "<none>")
    return repr(value) if "<" in name else f"{value.__module__}.{name}"  # "<locals>" may be functions of one name


def _origin() -> str:
    """All that programs depend on beside their own arguments."""
    devices = [(device.id, device.device_kind) for device in jax.devices()]
    client = jax.devices()[0].client
    settings = sorted((name, value) for name, value in jax.config.values.items() if "cache" not in name)
    parts = [jax.__version__, jaxlib.__version__, client.platform_version, devices, settings, xla_flags(), _sources()]
    if client.platform == "cpu":  # code for the features of one processor, cut up for its number of cores
        parts += [platform.machine(), _processor(), os.cpu_count()]
    return repr(parts)


def _processor() -> str:
    """The processor's name and features, as Linux lists them; as Python names it elsewhere."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return repr(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


def _sources() -> str:
    """Digest of the code of both packages."""
    specs = map(find_spec, PACKAGES)
    folders = [folder for spec in specs for folder in (spec and spec.submodule_search_locations) or ()]
    files = [file for folder in folders for file in Path(folder).rglob("*.py")]
    return _digest(repr([(str(file), file.read_bytes()) for file in sorted(files)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
