"""The number formats that options name."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KV_CACHE_DTYPES = {
    **DTYPES,
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int4_had": ml_dtypes.int4,  # with scales, and keys rotated: `pallas_kernels.lib.int4_kv`
}
DRAFT_QUANTIZATIONS = ("fp8", "int4")  # from the widest to the narrowest
