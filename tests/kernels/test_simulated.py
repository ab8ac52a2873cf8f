"""What Mosaic kernels wait for, copy and multiply, without a GPU (``tests.kernels.simulated``)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from tests.kernels.conftest import ON_GPU

CASES = [  # of `simulated.CASES`, whose module is not imported here, since it changes JAX's interpreter
    "weight_first_swiglu",
    "screened_11",
    *(
        pytest.param(case, marks=pytest.mark.long)  # 10 to 30 s each
        for case in (
            "weight_first",
            "weight_first_fp8",
            "swiglu_of_pieces",
            "experts_int4",
            "experts_zeros",
            "experts_fp8",
            "few_bits_zeros",
            "few_bits_fp8",
            "screened_64",
        )
    ),
    *(
        pytest.param(f"attention_{dtype}_{name}", marks=pytest.mark.long)
        for dtype, name in itertools.product(("bfloat16", "float8_e4m3fn", "int4"), ("in_turn", "shared", "shared_256"))
    ),
]
THREADS = "16"  # of XLA: warpgroups that wait for a barrier keep one each


@pytest.mark.skipif(ON_GPU, reason="GPUs run these kernels themselves")
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_what_it_should(case):
    command = [sys.executable, "-m", "tests.kernels.simulated", case]
    environment = os.environ | {"NPROC": THREADS, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) < 5e-3
