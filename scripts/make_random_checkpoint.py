"""Write folders of random weights with the names, shapes and dtypes of Qwen3.6-27B in int4 and of its drafter.

    python scripts/make_random_checkpoint.py build/rehearsal

writes `target`, as `Intel/Qwen3.6-27B-int4-AutoRound` holds the language model (16.6 GiB), and `draft`, as
`z-lab/Qwen3.6-27B-DFlash` (3.2 GiB), with which memory, loading and speed can be tried where no checkpoint can be
fetched. What it generates has no meaning. `--size tiny` writes a small pair of the same architecture, for CPUs.

AutoRound packs each linear layer of a decoder layer whose sizes are multiples of 32, in groups of 128 inputs, so that
the 48 rows of in_proj_a and in_proj_b stay at 16 bits, like embedding and head. Numbers are stretches of few random
blocks, whose lengths are primes, so that no two rows are equal.

Sources: auto-round 0.16's export_to_autoround; the published config.json of both.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.bench.round_models import PRESETS, QWEN3_5, drafter_of, qwen3_5
from dflash_jax.spec import DraftConfig, TargetConfig, draft_config, target_config
from dflash_jax.weights.export import save_json
from dflash_jax.weights.naming import Naming
from dflash_jax.weights.safetensors import DTYPES, INDEX_NAME
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table

GROUP, MULTIPLE = 128, 32  # inputs that share a scale; what sizes of a packed layer are multiples of
LINEAR = re.compile(r"\.layers\.\d+\..*\.(\w+_proj|in_proj_\w+)\.weight$")
BLOCK = 16_777_259  # numbers of a random block, a prime
SHARD_BYTES = 2 << 30  # of a file; files are written side by side
BF16 = np.dtype(ml_dtypes.bfloat16)

TINY = qwen3_5(128, 256, 4, (2, 1), 4, tied=False) | {
    "vocab_size": 512,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
}
SIZES: Mapping[str, dict[str, Any]] = {"27b": PRESETS["qwen3.6-27b"], "tiny": TINY}

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL_IDS = 33  # ids of special tokens, the last ones of the tokenizer
PADDING_ROWS = 243  # of the embedding, behind the tokenizer's last id
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its name, its shape, and the numbers that are repeated in it."""

    name: str
    shape: tuple[int, ...]
    numbers: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.numbers.itemsize


class Numbers:
    """Random blocks of the kinds of numbers that tensors hold."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self._rng = rng
        self.packed = np.frombuffer(rng.bytes(4 * BLOCK), np.int32)
        self.matrix = (0.02 * rng.standard_normal(BLOCK, np.float32)).astype(BF16)
        # Numbers from -8 to 7, spread evenly, have a deviation of 4.6: with these scales that of the weights is 0.02.
        self.scales = rng.uniform(0.5, 1.5, 1_000_003).astype(np.float16) * np.float16(0.02 / 4.6)
        self.seven = np.full(1_000_003, 0x77777777, np.int32)  # zero points of 8, stored less one

    def small(self, name: str, shape: tuple[int, ...], *, is_centered: bool) -> np.ndarray:
        """Numbers of a tensor that is no matrix: those of the gates give decays as a trained model has them."""
        size = math.prod(shape)
        if name.endswith("A_log"):
            return np.log(self._rng.uniform(1, 16, size)).astype(BF16)
        if name.endswith("dt_bias"):  # the inverse of softplus, of 0.001 to 0.1
            step = np.exp(self._rng.uniform(np.log(1e-3), np.log(0.1), size))
            return (step + np.log(-np.expm1(-step))).astype(BF16)
        if name.endswith("conv1d.weight"):
            return self._rng.uniform(-0.5, 0.5, size).astype(BF16)
        return (np.zeros(size) if is_centered and "linear_attn.norm" not in name else np.ones(size)).astype(BF16)


def tensors_of(config: TargetConfig | DraftConfig, numbers: Numbers, naming: Naming) -> Iterator[Tensor]:
    """The tensors of a model; those of a target are packed where AutoRound packs them."""
    for name, axes in checkpoint_table(config, naming).items():
        shape = checkpoint_shape(axes, config)
        is_packed = isinstance(config, TargetConfig) and LINEAR.search(name) and not any(n % MULTIPLE for n in shape)
        if is_packed:
            (outputs, inputs), base = shape, name.removesuffix(".weight")
            yield Tensor(f"{base}.qweight", (inputs // 8, outputs), numbers.packed)
            yield Tensor(f"{base}.qzeros", (inputs // GROUP, outputs // 8), numbers.seven)
            yield Tensor(f"{base}.scales", (inputs // GROUP, outputs), numbers.scales)
        elif len(shape) == 2:
            yield Tensor(name, shape, numbers.matrix)
        else:
            yield Tensor(name, shape, numbers.small(name, shape, is_centered=config.zero_centered_norms))


def write_shards(folder: Path, tensors: list[Tensor]) -> int:
    """Write tensors to files of about `SHARD_BYTES` with an index; returns their bytes."""
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(_write_shard, [folder / name for name in names], shards))
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    save_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def _write_shard(path: Path, tensors: list[Tensor]) -> None:
    """Write one file: each tensor begins elsewhere in the numbers that it repeats."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end := end + tensor.nbytes]
        header[tensor.name] = {
            "dtype": names[tensor.numbers.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = 0
        for tensor in tensors:
            left = math.prod(tensor.shape)
            start = 0 if left == tensor.numbers.size else start % tensor.numbers.size  # 0: numbers of its own
            while left:
                part = tensor.numbers[start : start + left]
                file.write(part.view(np.uint8).data)
                start, left = (start + part.size) % tensor.numbers.size, left - part.size


def write_tokenizer(folder: Path, vocab_size: int) -> list[int]:
    """Write a tokenizer of bytes whose other tokens are words that no text gives; returns the ids that end a text."""
    plain = vocab_size - PADDING_ROWS - SPECIAL_IDS if vocab_size > 1000 else 256
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"Ġw{i}": i for i in range(len(vocabulary), plain)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *(f"<|extra_{i}|>" for i in range(SPECIAL_IDS - len(SPECIAL)))])
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    save_json(folder / "tokenizer_config.json", options)
    return [plain + 2, plain]  # <|im_end|> and <|endoftext|>


def write_target(folder: Path, text: dict[str, Any], numbers: Numbers) -> int:
    """Write the target; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = write_tokenizer(folder, text["vocab_size"])
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            **{name: value for name, value in text.items() if name != "architectures"},
            "model_type": "qwen3_5_text",
            "eos_token_id": ends[1],
        },
        "tie_word_embeddings": False,
    }
    naming = Naming("model.language_model.")
    tensors = list(tensors_of(target_config(raw), numbers, naming))
    wide = [t.name.removesuffix(".weight") for t in tensors if LINEAR.search(t.name)]
    raw["quantization_config"] = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.language_model.layers",
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in wide},
    }
    save_json(folder / "config.json", raw)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
    save_json(folder / "generation_config.json", sampling | {"eos_token_id": ends, "pad_token_id": ends[1]})
    return write_shards(folder, tensors)


def write_draft(folder: Path, text: dict[str, Any], numbers: Numbers) -> int:
    """Write the drafter; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = drafter_of(text, QWEN3_5)
    save_json(folder / "config.json", raw)
    return write_shards(folder, list(tensors_of(draft_config(raw), numbers, Naming(""))))


def write_pair(out: Path, size: str, seed: int = 0) -> dict[str, int]:
    """Write both folders of a size; returns the bytes of each."""
    numbers = Numbers(seed)
    return {
        "target": write_target(out / "target", SIZES[size], numbers),
        "draft": write_draft(out / "draft", SIZES[size], numbers),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder in which both folders are made")
    parser.add_argument("--size", choices=SIZES, default="27b")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    for name, size in write_pair(args.out, args.size, args.seed).items():
        print(f"{args.out / name}: {size:,} bytes")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
