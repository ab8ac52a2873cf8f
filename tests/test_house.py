"""The rules of the house that can be checked mechanically."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("dflash_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]

# What each room may import, besides itself. core, errors and config are at the bottom.
ARROWS = {
    "pallas_kernels": set(),
    "errors": set(),
    "env": set(),
    "progress": set(),
    "core": {"errors"},
    "config": {"core", "errors", "pallas_kernels"},
    "models": {"config", "errors", "pallas_kernels"},
    "cache": {"config", "errors", "pallas_kernels"},
    "checkpoint": {"models", "config", "core", "env", "errors"},
    "engine": {"progress", "cache", "checkpoint", "models", "config", "core", "env", "errors", "pallas_kernels"},
    "renderer": {"checkpoint", "config", "core", "errors"},
    "frontend": {"renderer", "engine", "checkpoint", "config", "core", "env", "errors"},
    "serve": {"frontend", "renderer", "engine", "checkpoint", "config", "core", "env", "errors"},
    "commands": {"errors"},
    "flags": {"config"},
    "bench": {
        "loading",
        "commands",
        "flags",
        "progress",
        "llm",
        "frontend",
        "engine",
        "checkpoint",
        "models",
        "config",
        "core",
        "env",
        "errors",
        "pallas_kernels",
    },
    "loading": {"flags", "frontend", "llm", "progress"},
    "async_llm": {"frontend", "engine", "config", "core", "errors"},
    "llm": {"progress", "frontend", "renderer", "engine", "config", "core", "errors"},
    "eval": {
        "loading",
        "bench",
        "commands",
        "flags",
        "progress",
        "train",
        "llm",
        "frontend",
        "renderer",
        "checkpoint",
        "config",
        "core",
        "errors",
    },
    "train": {
        "loading",
        "eval",
        "flags",
        "progress",
        "llm",
        "frontend",
        "engine",
        "cache",
        "checkpoint",
        "models",
        "config",
        "core",
        "env",
        "errors",
        "pallas_kernels",
    },
    "generate": {"bench", "loading", "flags", "progress", "llm", "frontend", "config", "core", "errors"},
}


def room(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return parts[0]
    return parts[1] if parts[0] == "dflash_jax" and len(parts) > 1 else None


def imports(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_arrows_go_one_way(file):
    own = room(module_of(file))
    if own is None:  # dflash_jax itself re-exports
        return
    used = {room(name) for name in imports(file)} - {own, None}
    assert used <= ARROWS[own], f"{own} may not import {used - ARROWS[own]}"


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_no_torch_and_no_environment(file):
    assert not {name.split(".")[0] for name in imports(file)} & {"torch", "pickle"}
    if file.name != "env.py":
        assert "os.environ" not in file.read_text()


def test_import_is_light_and_without_side_effects():
    code = (
        "import dflash_jax, sys; print(sorted({'torch', 'transformers', 'optax', 'jax', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_are_there_and_no_others():
    assert set(dflash_jax.__all__) <= set(dir(dflash_jax))
    for name in dflash_jax.__all__:
        assert getattr(dflash_jax, name).__name__ == name
        assert getattr(dflash_jax, name).__module__.startswith("dflash_jax.")
    assert not hasattr(dflash_jax, "Engine")
