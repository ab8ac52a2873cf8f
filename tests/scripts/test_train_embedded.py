"""The embedded target in small: its tokenizer is lossless, it learns, and its folder can be served."""

import json
import lzma
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_embedded
from embedded_architectures import DENSE
from transformers import AutoTokenizer

from dflash_jax import LLM, SamplingParams
from dflash_jax.models.target import TargetModel
from dflash_jax.spec import GatedDelta, read_json, target_config
from dflash_jax.train.cache import SequenceCache
from dflash_jax.weights.export import save_model
from dflash_jax.weights.loader import load_params

LINES = """
class Box:
    def __init__(self, width, height):
        self.width, self.height = width, height

    def area(self):
        if self.width > 0:
            for row in range(12):
                while True:
                    return self.width * self.height
        return None
"""
FILES = [LINES.replace("Box", name) for name in ("Box", "Crate", "Chest")] * 3
HARD = "\tx = 12\r\n\n   \n  # Grüße, 世界 🎉\nif x:\n\n\n        y  =  __z__[345]   # end\n      "


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    corpus, out = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("target")
    for split, texts in (("train", FILES * 20), ("heldout", FILES)):
        with lzma.open(corpus / f"{split}.jsonl.xz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return corpus, out


@pytest.fixture(scope="module")
def tokenizer(folders):
    corpus, out = folders
    train_embedded.main(["tokenizer", "--corpus", str(corpus), "--out", str(out)])
    return AutoTokenizer.from_pretrained(out)


@pytest.fixture(scope="module")
def trained(folders, tokenizer):
    corpus, out = folders
    sizes = ["--layers", "1", "--rows", "4", "--length", "32", "--steps", "40"]
    train_embedded.main(["target", "--corpus", str(corpus), "--out", str(out), *sizes])
    train_embedded.main(["target", "--corpus", str(corpus), "--out", str(out), *sizes, "--grow"])
    return out


@pytest.mark.parametrize("text", [HARD, *FILES[:1], "", "x", "    x", "\n"])
def test_round_trip_with_offsets(tokenizer, text):
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"]) == text
    covered = set()
    for start, end in encoded["offset_mapping"]:
        covered |= set(range(start, end))
    assert covered == set(range(len(text)))


def test_layout(tokenizer):
    for spaces in (4, 8, 12, 16):
        text = f"if x:\n{' ' * spaces}self"
        assert tokenizer.tokenize(text)[-3:] == ["Ċ", "Ġ" * spaces, "self"]
        # The tokens of a prompt that ends with a line are a prefix of those of the text.
        assert tokenizer.encode(text)[:-2] == tokenizer.encode("if x:\n")
    assert tokenizer.tokenize("12") == ["1", "2"]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|mask|>"]) == [0, 1]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    chat = [{"role": "user", "content": "def "}, {"role": "assistant", "content": "area"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "def area"


def test_files_are_joined_by_the_end_of_text(tokenizer):
    backend = tokenizer.backend_tokenizer
    ids = train_embedded.encode(["x = 1", "", "y"], backend, files=2)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [*tokenizer.encode("x = 1"), 0, 0, *tokenizer.encode("y"), 0]


def test_another_tokenizer_makes_other_tokens(folders, tokenizer):
    corpus, out = folders
    np.save(corpus / "train.npy", np.zeros(3, np.uint16))
    train_embedded.main(["tokenizer", "--corpus", str(corpus), "--out", str(out)])
    assert len(train_embedded.tokens_of(corpus, "train", tokenizer.backend_tokenizer)) > 3


def small_config(layers=1):
    return target_config(DENSE | {"num_hidden_layers": layers, "vocab_size": 64})


def test_the_loss_is_that_of_the_model_in_float32_but_for_rounding():
    config = small_config()
    tokens = jax.random.randint(jax.random.key(1), (3, 17), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(16), (3, 16))
    model = TargetModel(config)
    params = model.init(jax.random.key(0), tokens[:, :-1], positions, SequenceCache())["params"]
    params = jax.tree.map(lambda p: p * 4 if p.ndim > 1 else p, params)  # makes the logits far from uniform
    bound = model.bind({"params": params})
    hidden, _, _ = bound(tokens[:, :-1], positions, SequenceCache())
    chosen = jnp.take_along_axis(jax.nn.log_softmax(bound.logits(hidden)), tokens[:, 1:, None], axis=-1)
    computed, gradients = jax.jit(jax.value_and_grad(train_embedded.loss_of), static_argnums=2)(params, tokens, config)
    assert float(computed) == pytest.approx(-float(chosen.mean()), rel=5e-3)
    assert {gradient.dtype for gradient in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_a_grown_model_computes_the_same():
    config, deeper = small_config(2), small_config(4)
    tokens, positions = jnp.arange(12).reshape(1, 12), jnp.arange(12).reshape(1, 12)

    def initial(config, seed):
        return TargetModel(config).init(jax.random.key(seed), tokens, positions, SequenceCache())["params"]

    def hidden(config, params):
        return TargetModel(config).apply({"params": params}, tokens, positions, SequenceCache())[0]

    params = initial(config, 0)
    computed = train_embedded.grown(params, initial(deeper, 1))
    assert jnp.array_equal(hidden(deeper, computed), hidden(config, params))
    assert not jnp.array_equal(computed["layers_1"]["mlp"]["gate_up_proj"], computed["layers_0"]["mlp"]["gate_up_proj"])


def test_weights_are_computed_with_as_the_file_holds_them(tmp_path):
    raw = DENSE | {"num_hidden_layers": 1, "vocab_size": 64}
    config = target_config(raw)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = TargetModel(config).init(jax.random.key(0), tokens, tokens, SequenceCache())["params"]
    save_model(tmp_path, raw, config, params, "fp8_e4m3")
    read = load_params(tmp_path, config, jnp.float32, keep_quantized=False)
    computed = train_embedded.as_stored(params, config)
    computed = {**computed, "embed_tokens": computed["embed_tokens"].astype(jnp.bfloat16)}
    for one, other in zip(jax.tree.leaves(computed), jax.tree.leaves(read), strict=True):
        assert jnp.mean(one != other.astype(jnp.bfloat16)) < 1e-3  # XLA and NumPy divide by a constant differently
    assert not jnp.array_equal(read["layers_0"]["mlp"]["gate_up_proj"], params["layers_0"]["mlp"]["gate_up_proj"])


def test_only_matrices_decay():
    params = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    optimizer = train_embedded.make_optimizer(weight_decay=0.5)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert updates["matrix"].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert updates["norm"].tolist() == [0, 0]


def test_the_learning_rate_rises_and_falls():
    rates = [train_embedded.learning_rate(progress, 1.0) for progress in (0.0, 0.01, 0.02, 0.51, 1.0, 1.1)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0, 0])


def test_rows():
    rows = train_embedded.rows_at(jnp.arange(100, dtype=jnp.uint16), jnp.array([3, 90]), 9)
    assert rows.tolist() == [list(range(3, 13)), list(range(90, 100))]
    assert rows.dtype == jnp.int32


@pytest.mark.long
def test_the_target_has_learnt_and_is_served(trained):
    llm = LLM(trained, max_num_seqs=1, max_model_len=256)
    config = llm.engine.target.config
    assert (config.max_position_embeddings, config.num_hidden_layers) == (2048, 2)
    params = SamplingParams(temperature=0, max_tokens=24)
    (result,) = llm.generate("    def area(self):\n        if self.width > 0:\n", params)
    assert "for row in range(12):" in result.outputs[0].text
    assert (trained / "generation_config.json").exists()


@pytest.mark.long
def test_a_hybrid_learns_and_its_numbers_are_those_of_the_file(folders, tokenizer, tmp_path):
    corpus, out = folders
    for file in out.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    sizes = ["--layers", "2", "--rows", "4", "--length", "32", "--steps", "10"]
    train_embedded.main(["target", "--architecture", "hybrid", "--corpus", str(corpus), "--out", str(tmp_path), *sizes])
    config = target_config(read_json(tmp_path / "config.json"))
    assert [isinstance(layer.mixer, GatedDelta) for layer in config.layers] == [True, True]
    read = load_params(tmp_path, config, jnp.float32, keep_quantized=False)
    computed = train_embedded.as_stored(read, config)
    for one, other in zip(jax.tree.leaves(computed), jax.tree.leaves(read), strict=True):
        assert jnp.mean(one.astype(jnp.bfloat16) != other.astype(jnp.bfloat16)) < 1e-3
    assert computed["layers_0"]["linear_attn"]["A_log"].dtype == jnp.float32


def test_rows_repeat_after_their_period():
    rows = train_embedded.rows_at(jnp.arange(100, dtype=jnp.uint16), jnp.array([3, 50]), 9, jnp.array([4, 20]))
    assert rows.tolist() == [[3, 4, 5, 6] * 2 + [3, 4], list(range(50, 60))]
    periods = train_embedded.random_periods(jax.random.key(0), 4096, 2048)
    repeated = periods[periods <= 2048]
    assert 0.04 < len(repeated) / 4096 < 0.09
    assert train_embedded.SHORTEST_REPEAT <= repeated.min() < repeated.max() <= 1024


def test_only_a_dense_model_grows():
    with pytest.raises(SystemExit):
        train_embedded.main(["target", "--architecture", "hybrid", "--grow"])
