"""The installed command `dflash-jax`: light to start, and each command is the module of its name."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dflash_jax import cli

ROOT = Path(__file__).parent.parent


def test_the_project_installs_it():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {
        "dflash-jax": f"{cli.__name__}:{cli.main.__name__}"
    }


def test_it_starts_without_jax():
    code = "import sys; from dflash_jax.cli import main; main(['--help']); print('jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *help_lines, has_jax = run.stdout.splitlines()
    assert [line.split()[0] for line in help_lines if line.startswith("  ")] == list(cli.COMMANDS)
    assert has_jax == "False"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_it_says_what_there_is(arguments, capsys):
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: dflash-jax COMMAND")


def test_a_name_that_is_no_command_is_refused(capsys):
    assert cli.main(["sevre"]) == 2
    assert "'sevre' is not a command; use one of serve, generate, bench" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_the_module_of_its_name(name, monkeypatch):
    home = {"serve": "serve.server", "generate": "generate"}.get(name, f"{name}.__main__")
    calls = []
    monkeypatch.setattr(import_module(f"dflash_jax.{home}"), "main", lambda arguments: calls.append(arguments) or 3)
    assert cli.main([name, "--option", "value"]) == 3
    assert calls == [["--option", "value"]]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_says_that_it_has_started_before_it_imports_jax(name):
    code = f"""
import io, os, sys

class Stream(io.StringIO):
    def write(self, text):
        os.write(1, f"{{text.strip()}}|{{'jax' in sys.modules}}".encode())
        os._exit(0)

sys.stderr = Stream()
from dflash_jax.cli import main
main([{name!r}, "--no-such-option"])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    said, has_jax = run.stdout.rsplit("|", 1)
    assert has_jax == "False"
    # The server's process never imports JAX: it refuses the option at once.
    assert ("there is no --no-such-option" if name == "serve" else "importing modules") in said
