"""The benchmark of the host has a stub for every step of the engine that it measures."""

import json
import re
from types import SimpleNamespace

import bench_host
import numpy as np
import pytest

from dflash_jax.engine.device import steps


@pytest.mark.parametrize("case", ["fixed", "logprobs"])  # a round in one program, and in several
def test_rounds_run_without_a_model(monkeypatch, tmp_path, case):
    path = tmp_path / "host.json"
    options = {"--case": case, "--slots": 2, "--rounds": 3, "--json": path}
    monkeypatch.setattr("sys.argv", ["bench_host.py", *(str(part) for pair in options.items() for part in pair)])
    bench_host.main()
    assert json.loads(path.read_text())["cases"][case]["median_ms"] > 0


def test_a_prefill_gives_its_arrays_in_the_order_of_the_step():
    stubs = bench_host.Stubs(bench_host.Clock(), [1], 1, np.random.default_rng(0))
    stubs._dispatch = lambda arguments, state: state
    chunk = SimpleNamespace(tokens=np.zeros((2, 5), np.int32))
    *_, first, second = stubs.prefill(None, None, None, (None, None), chunk)
    widths = re.findall(r"B (\w) D", str(steps.prefill.__annotations__["return"]))  # the step that it replaces
    assert [array.shape[1] for array in (first, second)] == [{"1": 1, "T": 5}[width] for width in widths]
