"""Drafters that ship for models with a name of their own: small, stored in fp8, and found without being named."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.spec import check_draft_fits, draft_config, read_json, target_config
from dflash_jax.weights import folder as folders
from dflash_jax.weights.encodings import Fp8Rows
from dflash_jax.weights.folder import ALIASES, DRAFTERS, alias_drafter
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.safetensors import list_tensors
from scripts import quantize
from tests.pairs import DRAFT, TARGET, greedy, tokens_of, write_model

SMOLLM2 = TARGET | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 30,
}
TARGETS = {"smollm2": SMOLLM2}


def widened(folder):
    config = draft_config(read_json(folder / "config.json"))
    return jax.tree.leaves(load_params(folder, config, jnp.float32))


def test_quantized_drafters_are_close_and_half_as_large(tmp_path, capsys):
    source = write_model(tmp_path / "source", DRAFT, 1, scale=4.0)
    quantize.main([str(source), str(tmp_path / "out"), "--format", "fp8-channel"])
    assert f"bytes in {tmp_path / 'out'}" in capsys.readouterr().out
    stored = {info.dtype for info in list_tensors(tmp_path / "out").values()}
    assert np.dtype(ml_dtypes.float8_e4m3fn) in stored
    for mine, true in zip(widened(tmp_path / "out"), widened(source), strict=True):
        np.testing.assert_allclose(mine, true, rtol=0, atol=2**-4 * np.abs(true).max())
    raw = read_json(tmp_path / "out" / "config.json")
    assert {name: value for name, value in raw.items() if name != "quantization_config"} == DRAFT


def test_a_name_brings_its_quantized_drafter(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "DRAFTERS", tmp_path / "drafters")
    target = write_model(tmp_path / "cache" / ALIASES["smollm2"], TARGET, 0)
    source = quantize.Source.of(write_model(tmp_path / "draft", DRAFT, 1))
    quantize.quantize(source, tmp_path / "drafters" / ALIASES["smollm2"], Fp8Rows())
    llm, plain = LLM("smollm2", max_num_seqs=1, num_speculative_tokens=5), LLM(target, max_num_seqs=1)
    assert llm.engine.draft is not None
    assert plain.engine.draft is None
    prompt = [{"prompt_token_ids": [5, 6, 7]}]
    assert tokens_of(llm.generate(prompt, greedy(12))) == tokens_of(plain.generate(prompt, greedy(12)))


@pytest.mark.parametrize("alias", ALIASES)
def test_shipped_drafters_are_small_and_fit(alias):
    folder = alias_drafter(alias)
    assert folder is not None
    raw = read_json(folder / "config.json")
    config = draft_config(raw)
    check_draft_fits(target_config(TARGETS[alias]), config, str(folder))
    assert all(np.isfinite(array).all() and np.any(array) for array in widened(folder))
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= 16 * 2**20
    assert {"sliding_attention", "full_attention"} <= set(raw["layer_types"])
    assert config.block_size == 16


def test_shipped_drafters_are_described():
    text = (DRAFTERS / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}/`" in text for name in ALIASES.values())
