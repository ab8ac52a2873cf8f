"""Make the reference vectors of `tests/test_layouts.py` with the packages that write such checkpoints.

    python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 auto-round==0.16.1 compressed-tensors==0.20.0
    oracle/bin/python scripts/make_packed_vectors.py       # writes tests/data/packed/vectors.safetensors

auto-round has the packing of GPTQ (zero points less 1, and as they are) and of AWQ; compressed-tensors has its own. For
each case the file holds the packed tensors under `<case>.<name>`, and under `<case>.expected` the matrix [O, I] that
the package makes of them again. Scales have six bits, so that the packages, which multiply in float16, round nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the packages are imported where they are used: --help works without them
    import torch

OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "packed" / "vectors.safetensors"
OUTPUTS, INPUTS = 32, 64
Tensors = dict[str, "torch.Tensor"]


def random(seed: int, group: int, *, symmetric: bool) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer that reaches beyond what 4 bits hold, scales [O, G] and zero points [O, G]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    groups = INPUTS // group
    scales = torch.randint(33, 64, (OUTPUTS, groups), generator=generator) / 2.0**12
    zeros = torch.randint(1, 16, (OUTPUTS, groups), generator=generator)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    numbers = torch.randint(
        -2, 18, (OUTPUTS, INPUTS), generator=generator
    )  # what is outside of 0 to 15 must be clamped
    spread = [array.repeat_interleave(group, 1) for array in (scales, zeros)]
    layer.weight.data = (numbers - spread[1]) * spread[0]
    return layer, scales, zeros


def gptq(module: object, seed: int, group: int, *, symmetric: bool) -> Tensors:
    """Packed by auto-round's layer of GPTQ's packing; its product with the identity is the expected matrix."""
    import torch

    layer, scales, zeros = random(seed, INPUTS if group == -1 else group, symmetric=symmetric)
    packed = module.QuantLinear(4, group, INPUTS, OUTPUTS, bias=False)
    packed.device = "cpu"  # the layer without an offset asks itself, and has none
    packed.pack_248_bits(layer, scales, zeros.float(), device="cpu")
    packed.scales = packed.scales.half()
    names = ("qweight", "qzeros", "scales")
    return {name: getattr(packed, name) for name in names} | {"expected": packed(torch.eye(INPUTS).half()).T.float()}


def awq(seed: int, group: int) -> Tensors:
    """Packed by auto-round's layer of AWQ's packing."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm

    layer, scales, zeros = random(seed, group, symmetric=False)
    packed = WQLinear_GEMM.from_linear(layer, 4, group, scales=scales.T, zeros=zeros.T, device="cpu")
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return tensors | {"expected": dequantize_gemm(*tensors.values(), 4, group).T.float()}


def compressed(seed: int, group: int, *, symmetric: bool) -> Tensors:
    """Packed by compressed-tensors, whose numbers and zero points are signed until they are packed."""
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    layer, scales, zeros = random(seed, group, symmetric=symmetric)
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight": layer.weight.data, "weight_scale": scales, "weight_zero_point": (zeros - 8).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    whole = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    return {name: tensor for name, tensor in packed.items() if name.startswith("weight_")} | {"expected": whole.float()}


def make() -> None:
    """Write the vectors."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
    from safetensors.torch import save_file

    cases = {
        "gptq_symmetric": gptq(qlinear_torch_zp, 0, 32, symmetric=True),
        "gptq_zeros": gptq(qlinear_torch_zp, 1, 32, symmetric=False),
        "gptq_whole": gptq(qlinear_torch_zp, 2, -1, symmetric=False),
        "auto_round": gptq(qlinear_torch, 3, 16, symmetric=False),
        "awq": awq(4, 32),
        "compressed_symmetric": compressed(5, 32, symmetric=True),
        "compressed_zeros": compressed(6, 16, symmetric=False),
    }
    tensors = {f"{case}.{name}": tensor.contiguous() for case, of in cases.items() for name, tensor in of.items()}
    save_file(tensors, OUTPUT)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 without one of the packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    try:
        make()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0].removesuffix("_extension")
        print(f"error: this needs {package}; run pip install {package.replace('_', '-')}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
