"""Sequences side by side, a token a step, get the tokens that the likeliest of whole sequences are."""

import json

import batch_responses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedded_architectures import HYBRID

from dflash_jax.models.target import TargetModel
from dflash_jax.spec import target_config
from dflash_jax.train.cache import SequenceCache
from dflash_jax.weights.export import save_json
from tests.pairs import write_byte_tokenizer


@pytest.mark.long
def test_responses_are_the_likeliest_tokens():
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": 64, "hidden_size": 32}
    config = target_config(HYBRID | sizes)
    zeros, length = jnp.zeros((1, 2), jnp.int32), 24
    params = TargetModel(config).init(jax.random.key(0), zeros, zeros, SequenceCache())["params"]
    params = jax.tree.map(lambda p: p * 4 if p.ndim > 1 else p, params)  # makes the tokens differ
    prompts, lengths = jax.random.randint(jax.random.key(1), (3, 9), 1, 64), jnp.array([2, 5, 9])
    tokens = batch_responses.complete(params, prompts, lengths, config=config, length=length)
    model = TargetModel(config).bind({"params": params})
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    hidden, _, _ = model(tokens, positions, SequenceCache())
    likeliest = jnp.argmax(model.logits(hidden), axis=-1)
    for row, n in enumerate(lengths.tolist()):
        assert jnp.array_equal(tokens[row, :n], prompts[row, :n])
        assert jnp.array_equal(tokens[row, n:], likeliest[row, n - 1 : -1])
        assert len(set(tokens[row, n:].tolist())) > 4


def test_prompts_stay_within_a_file():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 64, 6000).astype(np.uint16)
    tokens[::500] = batch_responses.EOS
    is_newline = np.arange(64) == 7
    prompts, lengths = batch_responses.cut_prompts(tokens, is_newline, 50, seed=1)
    text = tokens.tobytes()
    for prompt, n in zip(prompts, lengths, strict=True):
        start = text.index(prompt[:n].tobytes()) // 2
        assert tokens[start - 1] in (batch_responses.EOS, 7)
        assert batch_responses.EOS not in prompt[:n]
    assert batch_responses.LENGTHS[0] <= lengths.min() < lengths.max() <= batch_responses.LENGTHS[1]


def test_prompts_are_cut_by_the_tokenizer_that_made_the_tokens(tmp_path):
    folder, rng = write_byte_tokenizer(tmp_path / "target"), np.random.default_rng(0)
    newline = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["Ċ"]
    tokens = rng.integers(20, 60, 6000).astype(np.uint16)
    tokens[::50], tokens[::500] = newline, batch_responses.EOS
    np.save(tmp_path / "train.npy", tokens)
    np.save(tmp_path / "heldout.npy", tokens[::-1])
    out = tmp_path / "new" / "prompts.npz"
    flags = ["--corpus", str(tmp_path), "--tokenizer", str(folder), "--out", str(out), "--count", "20"]
    batch_responses.main(["prompts", *flags])
    loaded, text = np.load(out), tokens.tobytes()
    assert len(loaded["prompts"]) == 20
    starts = [text.index(p[:n].tobytes()) // 2 for p, n in zip(loaded["prompts"], loaded["lengths"], strict=True)]
    assert {int(tokens[start - 1]) for start in starts} == {newline, batch_responses.EOS}


def test_a_response_ends_with_its_first_end_of_text(tmp_path, monkeypatch):
    lengths = np.array([2, 4, 3, 3, 2], np.uint16)
    prompts = np.arange(20, dtype=np.uint16).reshape(5, 4) + 7

    def completed(params, prompts, lengths, *, config, length):
        rows = np.full((len(prompts), length), 5)
        rows[:, :4] = prompts
        for row, n in zip(rows, lengths, strict=True):
            row[n:] = 5
        rows[0, 4] = rows[0, 6] = batch_responses.EOS
        return rows

    monkeypatch.setattr(batch_responses, "complete", completed)
    monkeypatch.setattr(batch_responses, "load_params", lambda *args, **options: {})
    save_json(tmp_path / "config.json", HYBRID)
    np.savez(tmp_path / "prompts.npz", prompts=prompts, lengths=lengths)
    out = tmp_path / "responses.jsonl"
    flags = ["--target", str(tmp_path), "--prompts", str(tmp_path / "prompts.npz"), "--rows", "2", "--length", "8"]
    batch_responses.main(["responses", *flags, "--out", str(out)])
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    assert [sample["prompt_token_ids"] for sample in samples] == [[7, 8], [11, 12, 13, 14], [15, 16, 17], [19, 20, 21]]
    assert [sample["token_ids"] for sample in samples] == [[5, 5, 0], [5] * 4, [5, 0], [5] * 5]
