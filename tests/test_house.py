"""The rules of the house that can be checked mechanically."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("dflash_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]

ARCHITECTURE = ROOT / "docs" / "architecture.md"


def drawn_arrows() -> dict[str, set[str]]:
    """What each room may import, as the picture in docs/architecture.md says: a line for each room, lowest first."""
    picture = ARCHITECTURE.read_text().split("```rooms\n")[1].split("```")[0]
    lines = (line.split("#")[0].split() for line in picture.splitlines())
    return {name: set(imported) for name, *imported in filter(None, lines)}


ARROWS = drawn_arrows()
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES}


def room(module: str) -> str | None:
    """The room of a module of this project: the longest drawn name that it begins with; None for other modules."""
    if module.split(".")[0] not in ("dflash_jax", "pallas_kernels"):
        return None
    parts = module.removeprefix("dflash_jax.").split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in ARROWS), None)


def imports(file: Path):
    """Modules that a file imports; of `from package import module`, the module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_are_those_of_the_picture(file):
    home = room(module_of(file))
    if home is None:  # dflash_jax itself re-exports
        assert module_of(file) == "dflash_jax"
        return
    used = {room(name) for name in imports(file)} - {home, None}
    assert used <= ARROWS[home], f"{home} may not import {used - ARROWS[home]}"


def test_the_picture_has_no_circle_and_no_arrow_too_many():
    below: list[str] = []
    for name, imported in ARROWS.items():
        assert imported <= {*below}, f"{name} is drawn below {imported - {*below}}, which it imports"
        below.append(name)
    used = {(room(module_of(file)), room(name)) for file in FILES for name in imports(file)}
    assert {(name, other) for name, others in ARROWS.items() for other in others} <= used


LIGHT = {  # what each of these must not bring along: seconds of start, and hundreds of megabytes
    "dflash_jax.base.outputs": ("jax", "pallas_kernels", "transformers"),
    "dflash_jax.base.values": ("jax", "pallas_kernels", "transformers"),
    "dflash_jax.spec": ("jax", "pallas_kernels", "transformers"),
    "dflash_jax.options": ("jax", "pallas_kernels", "transformers"),
    "dflash_jax.text.renderer": ("jax", "pallas_kernels"),
    "dflash_jax.serve.server": ("jax", "pallas_kernels", "torch"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_what_needs_no_jax_imports_none(module):
    code = f"import {module}, sys; print(sorted({{*{LIGHT[module]!r}}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


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


def test_the_glossary_has_the_words_of_the_code():
    glossary = ARCHITECTURE.read_text().split("## Glossary")[1]
    words = set(re.findall(r"^\| `(\w+)` \|", glossary, re.MULTILINE))
    names = {
        part.rstrip("s")
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            getattr(node, "id", None),
            getattr(node, "attr", None),
            getattr(node, "arg", None),
            getattr(node, "name", None),
        )
        if isinstance(name, str)
        for part in re.findall(r"[A-Z]?[a-z]+", name.replace("_", " "))
    }
    assert len(words) >= 10
    assert not {word for word in words if word.rstrip("s") not in {name.lower() for name in names}}
