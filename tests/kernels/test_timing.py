"""How the benchmarks of kernels measure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lib import timing
from pallas_kernels.quantized_product import bench_layer


def test_each_kernel_has_a_time():
    """Names that differ in a number at the end are one kernel."""

    @jax.jit
    def run(x, y):
        return x @ x, jnp.cumsum(jnp.sin(y))[::-1].cumsum()

    x = jnp.ones((512, 512))
    times = timing.kernel_times(run, (x, x[0, :8]))
    assert len(times) >= 3
    assert not any(name[-1].isdigit() for name in times)
    assert all(time >= 0 for time in times.values())


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_layer_of_few_bits_is_timed(monkeypatch, kind):
    monkeypatch.setattr(bench_layer, "SHAPES", dict.fromkeys(("in_proj", "out", "down", "gate_up"), (256, 256)))
    monkeypatch.setattr(bench_layer, "BYTES", 1)
    rows = [bench_layer.measure(kind, name, 3) for name in bench_layer.CASES]
    assert [row["case"] for row in rows] == list(bench_layer.CASES)
    assert all(row["kernels"] for row in rows)
