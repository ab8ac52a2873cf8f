"""The host's benchmark still stands in for every step of the engine that it measures."""

import json

import bench_host
import pytest


@pytest.mark.parametrize("case", ["fixed", "logprobs"])  # a round as one program, and as several
def test_rounds_run_without_a_model(monkeypatch, tmp_path, case):
    path = tmp_path / "host.json"
    options = {"--case": case, "--slots": 2, "--rounds": 3, "--json": path}
    monkeypatch.setattr("sys.argv", ["bench_host.py", *(str(part) for pair in options.items() for part in pair)])
    bench_host.main()
    assert json.loads(path.read_text())["cases"][case]["median_ms"] > 0
