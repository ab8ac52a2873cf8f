"""Kernels of the serving engine: one folder for each operation, with its public functions; it imports no engine.

`registry` chooses the implementation of each call; its modules are imported when they are chosen. Kernels are jitted by
themselves, so that a model of many layers traces and lowers each of them once.
"""

from pallas_kernels.add_norm import add_norm
from pallas_kernels.all_reduce import Peers, all_reduce, all_reduce_add_norm
from pallas_kernels.experts import experts
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.largest_product import (
    Screen,
    approximate_largest,
    largest,
    largest_product,
    screen_of,
    screened_largest,
)
from pallas_kernels.lib.masks import visible
from pallas_kernels.lib.rotary import Rotary
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.product import product, product_beside, split_product
from pallas_kernels.quantize import quantize_gated, quantize_rows
from pallas_kernels.quantized_product import (
    quantized_product,
    quantized_product_beside,
    quantized_swiglu,
    split_quantized_product,
)
from pallas_kernels.route import route
from pallas_kernels.swiglu import fp8_swiglu, gated, swiglu
from pallas_kernels.write_attend import write_attend
from pallas_kernels.write_kv import write_context, write_kv

__all__ = [
    "Peers",
    "Rotary",
    "Screen",
    "add_norm",
    "all_reduce",
    "all_reduce_add_norm",
    "approximate_largest",
    "experts",
    "fp8_swiglu",
    "gated",
    "gated_norm",
    "largest",
    "largest_product",
    "paged_attention",
    "product",
    "product_beside",
    "quantize_gated",
    "quantize_rows",
    "quantized_product",
    "quantized_product_beside",
    "quantized_swiglu",
    "route",
    "screen_of",
    "screened_largest",
    "split_product",
    "split_quantized_product",
    "swiglu",
    "visible",
    "write_attend",
    "write_context",
    "write_kv",
]
