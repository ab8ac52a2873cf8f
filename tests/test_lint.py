"""What `make lint` runs finds nothing: as tests, so that mypy's half a minute passes beside others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", ["mypy", "ruff check .", "ruff format --check ."])
def test_it_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
