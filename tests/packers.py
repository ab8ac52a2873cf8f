"""Packs numbers of 4 and 8 bits as checkpoints do, a number at a time: independent of `dflash_jax.weights.packing`."""

import numpy as np

from dflash_jax.spec import target_config
from tests.pairs import HYBRID

AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "sym": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
LAYOUTS = {
    "gptq": GPTQ,
    "gptq_v2": GPTQ_V2,
    "auto_round": AUTO_ROUND | {"packing_format": "auto_round"},
    "awq": AWQ,
    "compressed": COMPRESSED,
}


def config_of(quantization):
    return target_config(HYBRID | {"quantization_config": quantization}).quantization


def words(numbers, bits=4):
    """int32 of numbers [R, C] of so many bits, the first of a row in the lowest ones; missing ones are 0."""
    rows, columns = numbers.shape
    places = 32 // bits
    packed = np.zeros((rows, -(-columns // places)), np.uint32)
    for column in range(columns):
        packed[:, column // places] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * (column % places))
    return packed.view(np.int32)


def awq_words(numbers):
    order = np.argsort([0, 4, 1, 5, 2, 6, 3, 7])
    return words(numbers.reshape(len(numbers), -1, 8)[..., order].reshape(numbers.shape))


def packed(layout, numbers, scales, zeros, index=None, bits=4):
    """The tensors of a matrix: numbers [O, I] of so many bits, scales and zeros [O, G], and the group of each input."""
    if layout == "compressed":
        tensors = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_zero_point": np.ascontiguousarray(words(zeros.T, bits).T),
            "weight_shape": np.int64(numbers.shape),
        }
        return tensors | ({} if index is None else {"weight_g_idx": index})
    if layout == "awq":
        return {"qweight": awq_words(numbers.T), "qzeros": awq_words(zeros.T), "scales": scales.T.copy()}
    less = 1 if layout == "gptq" else 0
    qweight, qzeros = words(numbers, bits).T.copy(), words((zeros - less).T, bits)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.copy()}
    return tensors | ({} if index is None else {"g_idx": index})
