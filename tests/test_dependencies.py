"""What is imported is declared in pyproject.toml, and what is declared is needed."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {
    "dflash_jax",
    "pallas_kernels",
    "tests",
    "scripts",
    "deploy",
    *(file.stem for file in ROOT.glob("scripts/*.py")),
}
# What reference vectors are made with: torch, whose CPU build exists for Python 3.11 only, and packers of checkpoints.
# None of it is installed for the suite.
PARITY = {"torch", "auto_round", "auto_round_extension", "compressed_tensors"}
AGENTS = {"agents", "litellm"}  # tests/agents/install.py puts them into an environment of their own
NOT_IMPORTED = {"absl-py", "jinja2"}  # other packages import them without declaring them
NOT_IMPORTED_BY_TESTS = {"beartype", "ipykernel", "mypy", "ruff", "types-pyyaml", "zstandard"}
PRIVATE = {"jax", "jaxlib", "uvicorn"}  # packages of which private names are used


def distribution(requirement: str) -> str:
    """The name of a requirement in its normal form: without extras and versions."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def declared(extra: str | None = None) -> set[str]:
    """The distributions that an extra adds, or that are always installed."""
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    names = {distribution(requirement) for requirement in listed}
    if "dflash-jax" in names:  # an extra that includes the extra `eval`
        names = names - {"dflash-jax"} | declared("eval")
    return names


def modules_below(path: Path) -> list[Path]:
    """All modules of a folder; a file that is a module itself."""
    return [*path.rglob("*.py")] if path.is_dir() else [path] if path.suffix == ".py" else []


def imported(*paths: str) -> set[str]:
    """The distributions that some modules import: files, or all files below a folder."""
    modules = set()
    for file in (file for path in paths for file in modules_below(ROOT / path)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    homes = packages_distributions()
    names = modules - OURS - PARITY - AGENTS - sys.stdlib_module_names
    return {distribution(home) for name in names for home in homes.get(name, [name])}


# Folders and modules that a user without extras can import.
BASE = [f"dflash_jax/{path.name}" for path in (ROOT / "dflash_jax").iterdir() if path.name not in ("eval", "train")]


@pytest.mark.parametrize(
    ("paths", "extras"),
    [
        ((*BASE, "pallas_kernels"), ()),
        (("dflash_jax/eval",), ("eval",)),
        (("dflash_jax", "pallas_kernels", "scripts"), ("train",)),
        (("tests",), ("train", "test")),
        (("deploy",), ("ray",)),
    ],
    ids=["base", "eval", "train", "tests", "deploy"],
)
def test_what_is_imported_is_declared(paths, extras):
    allowed = declared().union(*(declared(extra) for extra in extras))
    assert imported(*paths) - allowed == set()


def test_what_is_declared_is_imported():
    assert declared() - imported("dflash_jax", "pallas_kernels") == NOT_IMPORTED
    assert declared("train") - imported("dflash_jax", "scripts") == set()
    assert declared("ray") - imported("deploy") == set()
    assert declared("test") - imported("tests") == NOT_IMPORTED_BY_TESTS


def test_packages_with_private_names_in_use_have_an_upper_bound():
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["cuda13"]
    bounded = {distribution(text) for text in requirements if "<" in text}
    assert bounded >= PRIVATE
    assert all("<" in text for text in requirements if distribution(text) in PRIVATE)


def test_the_constraints_pin_what_is_declared():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
    names = {distribution(name) for name in pins}
    assert declared() | declared("train") | declared("test") <= names
    assert all(re.fullmatch(r"[\w.!+]+", version) for version in pins.values())
    assert [*pins] == sorted(pins, key=str.lower)


def test_types_ship_with_both_packages():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("dflash_jax", "pallas_kernels"):
        assert (ROOT / package / "py.typed").exists()
        assert "py.typed" in data[package]
