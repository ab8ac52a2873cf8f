"""Pages in 4 bits (``lib.int4_kv``) inside the Mosaic kernel: converters make float16 of numbers, scales and middles.

Both keys and values are converted, into slots that wgmma reads. A number is exact in float16; its product with the
scale, and the sum with the middle, are rounded to float16 once, far below the 4 bits' own error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels import _compat
from pallas_kernels.lib.int4_kv import CENTRE
from pallas_kernels.paged_attention.mosaic_layouts import copy_layout

# Of four bytes, two become 16-bit halves at once: an integer in the last bits of 1024 is 1024 more than itself. High
# numbers stay four bits to the left, and are divided by 16 as 1024 is subtracted.
_LOW = 0x000F000F, 0x3C003C00, 0xE400E400  # mask, factor 1, offset -1024
_HIGH = 0x00F000F0, 0x2C002C00, 0xD400D400  # mask, factor 1 / 16, offset -64


def widened(numbers: Any, affine: Any) -> tuple[jax.Array, jax.Array]:
    """The first and the second half of a page's heads in float16, [S, H / 2] each.

    Args:
        numbers: of the page, [S, H / 2] in shared memory, two a byte.
        affine: scale and middle of each token, [2, S] in shared memory.
    """
    S, half = numbers.shape
    layout = copy_layout(half)
    scale, middle = (_compat.smem_load(affine.at[i], layout.reduce(1), optimized=False) for i in range(2))
    bias = middle.astype(jnp.float32) - CENTRE * scale.astype(jnp.float32)
    factor, offset = (
        plgpu.layout_cast(lax.broadcast_in_dim(x.astype(jnp.float16), (S, half), [0]), layout) for x in (scale, bias)
    )
    low, high = _unpacked(_compat.smem_load(numbers, layout), layout)
    return low * factor + offset, high * factor + offset


def _unpacked(numbers: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
    """The low and the high numbers of bytes, in float16."""
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.float16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=(result, result))
    def unpack(ctx: Any, numbers: FragmentedArray) -> tuple[FragmentedArray, FragmentedArray]:
        del ctx
        low, high = (
            FragmentedArray(_registers=_numbers_of(numbers.registers, *place), _layout=numbers.layout, _is_signed=None)
            for place in (_LOW, _HIGH)
        )
        return low, high

    arrays: tuple[jax.Array, jax.Array] = unpack(numbers)
    return arrays


def _numbers_of(registers: np.ndarray, mask: int, factor: int, offset: int) -> np.ndarray:
    """Registers of 16-bit numbers for registers of as many bytes."""
    i32, f16 = ir.IntegerType.get_signless(32), ir.F16Type.get()
    unpacked = np.empty_like(registers)
    for index, register in np.ndenumerate(registers):
        (count,) = ir.VectorType(register.type).shape
        words = vector.bitcast(ir.VectorType.get((count // 4,), i32), register)
        pairs: list[Any] = []
        for word in range(count // 4):
            bits = vector.extract(words, dynamic_position=[], static_position=[word])
            for selector in ("0x4140", "0x4342"):  # bytes 0 and 1, bytes 2 and 3
                text = (
                    "{ .reg .b32 x, times, plus;\n"
                    f"mov.b32 times, {factor:#010x};\nmov.b32 plus, {offset:#010x};\n"
                    f"prmt.b32 x, $1, 0, {selector};\n"
                    f"lop3.b32 x, x, {mask:#010x}, 0x64006400, 0xea;\n"  # (a & b) | c
                    "fma.rn.f16x2 $0, x, times, plus; }"
                )
                pairs.append(llvm.inline_asm(i32, [bits], text, "=r,r"))
        packed = vector.from_elements(ir.VectorType.get((len(pairs),), i32), pairs)
        unpacked[index] = vector.bitcast(ir.VectorType.get((count,), f16), packed)
    return unpacked
