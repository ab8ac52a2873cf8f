"""Make the reference vectors of `tests/test_parity_vectors.py` with Hugging Face transformers.

    pip install -e .[test,parity]
    python scripts/make_parity_vectors.py            # writes tests/data/parity/<case>/

Each case is a small random model in `target/`, with a `config.json` as a publisher would write it, and in
`cases.safetensors` what transformers computes from that folder in float32 with eager attention: `input_ids`
[B, T], `logits` [B, T, V], `hidden_states` [L, B, T, D] (the residual output of every decoder layer, before the
last norm). Everything is seeded: a second run on the same machine writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_cases import CASES, FLOAT32_CASES, HYBRID_CASES, HYBRID_LENGTH, SHARDED_CASES
from safetensors.torch import save_file
from torch.nn import Module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "parity"
BATCH, LENGTH = 2, 20  # tokens; longer than every window below


def auto_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """What makes the model that the `architectures` of a config name."""
    return AutoModelForCausalLM if config.architectures[0].endswith("ForCausalLM") else AutoModelForImageTextToText


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether the model is a Qwen3.5 or Qwen3-Next."""
    return str(config.model_type).startswith(("qwen3_5", "qwen3_next"))


def language_model(model: PreTrainedModel) -> Module:
    """The decoder of a model, without its head."""
    decoder: Module = model.model
    return getattr(decoder, "language_model", decoder)


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """A model that computes what its config says: transformers never reads `output_gate_type`.

    Experts are multiplied one by one: grouped products want widths of whole 16 bytes.
    """
    if hasattr(model.config.get_text_config(), "num_experts"):
        model.set_experts_implementation("eager")
    kind = getattr(model.config.get_text_config(), "output_gate_type", None)
    if kind == "sigmoid":
        for layer in language_model(model).layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.norm.activation = kind
    return model.eval()


def random_weights(config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights with which every tensor matters: logits of order 1 to 10, no norm at one, no bias at zero."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    center = float(is_hybrid(config))  # norms of hybrids hold w and multiply by 1 + w, but for that of gated outputs
    rng = np.random.default_rng(seed)
    weights = {}
    for name, tensor in sorted(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape = tuple(tensor.shape)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            values = rng.uniform(0.7, 1.9, shape) - center
        elif name.endswith("linear_attn.norm.weight"):
            values = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("norm.weight"):
            values = rng.uniform(0.5, 1.5, shape) - center
        elif name.endswith(".bias"):
            values = 0.3 * rng.standard_normal(shape)
        elif name.endswith("A_log"):  # with dt_bias: states keep a token for 1 to 1,000 others
            values = np.log(rng.uniform(0.05, 2, shape))
        elif name.endswith("dt_bias"):
            values = rng.uniform(-4, 0.5, shape)
        elif name.endswith("linear_attn.out_proj.weight"):  # small, since the norm before it magnifies the last bits
            values = 0.6 * rng.standard_normal(shape) / shape[-1] ** 0.5
        elif name.endswith("embed_tokens.weight"):
            values = rng.standard_normal(shape) * (0.3 if config.tie_word_embeddings else 1.0)
        else:
            values = 1.5 * rng.standard_normal(shape) / shape[-1] ** 0.5
        weights[name] = torch.from_numpy(values.astype(np.float32)).to(dtype)
    return weights


def write_weights(folder: Path, weights: dict[str, torch.Tensor], *, sharded: bool = False) -> None:
    """Write the weights to one file, or to two with an index."""
    if not sharded:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    files = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model(
    folder: Path, raw: dict[str, Any], seed: int, *, dtype: torch.dtype = torch.bfloat16, sharded: bool = False
) -> None:
    """Write a checkpoint folder with exactly this `config.json` and random weights."""
    write_json(folder / "config.json", raw)
    write_weights(folder, random_weights(AutoConfig.from_pretrained(folder), seed, dtype), sharded=sharded)


def load_model(folder: Path) -> PreTrainedModel:
    """Load a folder with transformers, in float32 with eager attention; every tensor must be used."""
    model, info = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    if problems:
        raise RuntimeError(f"{folder}: transformers did not load this checkpoint cleanly: {problems}")
    return ready(model)


@torch.no_grad()
def outputs(model: PreTrainedModel, input_ids: np.ndarray) -> dict[str, np.ndarray]:
    """`logits` [B, T, V] and `hidden_states` [L, B, T, D] of a float32 model.

    The hidden states come from hooks: transformers replaces the last of its own by the normed one.
    """
    layers: list[np.ndarray] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: layers.append(output.numpy().copy()))
        for layer in language_model(model).layers
    ]
    try:
        logits = model(input_ids=torch.from_numpy(input_ids).long(), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return {"logits": logits.numpy(), "hidden_states": np.stack(layers)}


def random_ids(vocab_size: int, seed: int, shape: tuple[int, int] = (BATCH, LENGTH)) -> np.ndarray:
    return np.random.default_rng(seed + 1).integers(0, vocab_size, shape, dtype=np.int32)


def shape_of(name: str) -> tuple[int, int]:
    """Sequences and tokens of a case."""
    return (1, HYBRID_LENGTH) if name in HYBRID_CASES else (BATCH, LENGTH)


def make_case(folder: Path, name: str) -> None:
    """Write one case in place of the old one."""
    raw, seed = CASES[name], zlib.crc32(name.encode())
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "target"
    target.mkdir(parents=True)
    dtype = torch.float32 if name in FLOAT32_CASES else torch.bfloat16
    write_model(target, raw, seed, dtype=dtype, sharded=name in SHARDED_CASES)
    input_ids = random_ids(raw.get("text_config", raw)["vocab_size"], seed, shape_of(name))
    vectors = outputs(load_model(target), input_ids)
    tensors = {"input_ids": input_ids, **vectors}
    save_file({key: torch.from_numpy(value) for key, value in tensors.items()}, folder / "cases.safetensors")
    size = sum(path.stat().st_size for path in folder.rglob("*.*"))
    print(f"{name}: largest logit {np.abs(vectors['logits']).max():.1f}, {size / 1024:.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the cases")
    parser.add_argument("names", nargs="*", help=f"cases to make (default: all of {', '.join(CASES)})")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; the cases are {', '.join(CASES)}.")
    disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums, and with it the last bits, must not depend on the number of cores
    for name in arguments.names or CASES:
        make_case(arguments.output / name, name)


if __name__ == "__main__":
    main()
