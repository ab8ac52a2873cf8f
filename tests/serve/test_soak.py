"""A short soak of a server; `scripts/soak_server.py` without flags is the long one."""

import subprocess
import sys
from pathlib import Path

from tests.serve.live import MODEL

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak_server.py"


def test_mixed_requests_are_neither_lost_nor_mixed_up(tmp_path):
    size = ["--requests=48", "--concurrency=24", "--kinds=8", f"--log={tmp_path / 'log'}"]
    run = subprocess.run(
        [sys.executable, SCRIPT, *size, "--", *MODEL, "--max-num-seqs=4", "--num-speculative-tokens=15"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr + run.stdout


def test_without_requests_nothing_is_started():
    run = subprocess.run([sys.executable, SCRIPT, "--requests=0"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (2, "error: --requests 0 must be at least 1.\n")
