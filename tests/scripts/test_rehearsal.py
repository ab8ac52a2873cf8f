"""The random checkpoints are what the loader takes for the published ones, and the rehearsal fails when it should."""

import json

import jax.numpy as jnp
import make_random_checkpoint as maker
import numpy as np
import pytest
import rehearse_24gib as rehearsal

from dflash_jax.spec import read_json, target_config
from dflash_jax.weights.drafter import read_draft_config
from dflash_jax.weights.export import dense_params
from dflash_jax.weights.formats.grouped import Grouped
from dflash_jax.weights.layouts import rounded_int4
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.naming import Naming
from dflash_jax.weights.parameters import checkpoint_tensors
from dflash_jax.weights.safetensors import list_tensors

GIB = 1 << 30


@pytest.fixture(scope="module")
def numbers():
    return maker.Numbers(0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    maker.write_pair(folder, "tiny")
    return folder


def test_tensors_of_27b_are_those_of_the_published_folder(numbers):
    config = target_config(maker.SIZES["27b"])
    tensors = {t.name: t for t in maker.tensors_of(config, numbers, Naming("model.language_model."))}
    layer = "model.language_model.layers.0"
    shapes = {name: tensors[f"{layer}.{name}"].shape for name in ("mlp.down_proj.qweight", "mlp.down_proj.qzeros")}
    assert shapes == {"mlp.down_proj.qweight": (2176, 5120), "mlp.down_proj.qzeros": (136, 640)}
    assert tensors[f"{layer}.linear_attn.in_proj_qkv.scales"].shape == (40, 10240)
    assert tensors[f"{layer}.linear_attn.in_proj_a.weight"].shape == (48, 5120)  # which 32 does not divide
    packed = {name.rpartition(".")[0].rpartition(".")[2] for name in tensors if name.endswith("qweight")}
    assert packed == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "out_proj"),
    }
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(16.55 * GIB, rel=0.01)
    assert {t.numbers.dtype.name for name, t in tensors.items() if name.endswith("scales")} == {"float16"}


def test_a_loaded_pair_has_sane_numbers(pair):
    target = target_config(read_json(pair / "target" / "config.json"))
    params = load_params(pair / "target", target, jnp.float32)
    delta = params["layers_0"]["linear_attn"]
    assert isinstance(delta["in_proj"], Grouped)
    assert delta["in_proj"].zeros is None
    assert not isinstance(delta["in_proj_ba"], Grouped)
    tensors = checkpoint_tensors(target, dense_params(target, params))
    for name, tensor in tensors.items():
        assert np.isfinite(tensor).all(), name
        if tensor.ndim == 2:
            assert 0.01 < tensor.std() < 0.04, name
            assert len(np.unique(tensor, axis=0)) == len(tensor), name
    assert (np.exp(tensors["model.layers.0.linear_attn.A_log"]) > 0).all()
    draft = read_draft_config(pair / "draft", target)
    narrow = load_params(pair / "draft", draft, jnp.float32, quantize=rounded_int4)
    assert isinstance(narrow["fc"], Grouped)
    assert {info.dtype.name for info in list_tensors(pair / "draft").values()} == {"bfloat16"}


class Fake(rehearsal.Server):
    """A server that answers at once."""

    def __init__(self, lines, reason):
        super().__init__(None, 0, lines)
        self.reason = reason

    def wait(self):
        """It is healthy."""

    def stop(self):
        """It says what it took."""

    def complete(self, prompt, max_tokens):
        assert max(prompt) < 512
        return {"tokens": max_tokens, "reason": self.reason, "first_s": 0.0, "s": 0.0}


@pytest.mark.parametrize(
    ("tokens", "peak", "reason", "failed"),
    [
        ("2,000", 20 * GIB, "length", []),
        ("999", 20 * GIB, "length", ["kv_tokens"]),
        ("2,000", 24 * GIB, "length", ["allocator"]),
        ("2,000", 20 * GIB, "error", ["answers"]),
    ],
)
def test_the_rehearsal_says_what_failed(monkeypatch, capsys, pair, tmp_path, tokens, peak, reason, failed):
    lines = [
        f"INFO: KV cache size: {tokens} tokens",
        "INFO: compiled prefill in 1.0 s; its temporaries take 28 MiB",
        f"INFO: Memory of a device at its peak: {peak} of {25 * GIB} bytes that JAX's allocator has",
    ]
    monkeypatch.setattr(rehearsal.Server, "start", lambda *args: Fake(lines, reason))
    path = tmp_path / "figures.json"
    options = ["--size", "tiny", "--only", "fp8_e5m2", "--json", str(path)]
    status = rehearsal.main(["--folder", str(pair), *options])
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads(path.read_text())
    assert (figures["starts"][0]["failed"], status) == (failed, bool(failed))
    assert figures["starts"][0]["most_temporaries_mib"] == 28


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("1", "error: --memory: '1' must be more than the 17.5GiB of target and CUDA; give more."),
        ("23GiBB", "error: --memory: '23GiBB' must be a size such as 23.0GiB, "),
    ],
)
def test_nothing_is_written_for_a_bound_that_holds_nothing(monkeypatch, capsys, tmp_path, memory, message):
    monkeypatch.setattr(rehearsal, "write_pair", None)
    assert rehearsal.main(["--folder", str(tmp_path), "--memory", memory]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.long
def test_the_rehearsal_of_a_tiny_pair(pair):
    assert rehearsal.main(["--folder", str(pair), "--size", "tiny"]) == 0
