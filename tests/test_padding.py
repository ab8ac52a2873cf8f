"""Rows of the vocabulary behind the tokenizer's last token are read, and never emitted, drafted or reported.

Trained models hardly ever give them the largest logit; here they have it almost everywhere.
"""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, RequestError, SamplingParams
from tests.pairs import (
    BYTE_VOCABULARY,
    DRAFT,
    EOS,
    TARGET,
    around_step,
    greedy,
    prompt,
    write_byte_tokenizer,
    write_model,
)

ROWS = 344  # of 4 devices the last has nothing but padding
MASK = BYTE_VOCABULARY  # as in the drafters of Qwen3.5-122B: the first row of padding
SIZES = {
    "vocab_size": ROWS,
    "num_hidden_layers": 1,
    "num_target_layers": 1,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": EOS,
}
PROMPT = prompt(7, MASK, 9, ROWS - 1)  # rows of padding can be read
PARAMS = [
    greedy(12),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=2, top_k=5, max_tokens=12, ignore_eos=True),
    greedy(12, logprobs=20, prompt_logprobs=1, presence_penalty=1.0),
    greedy(6, logit_bias={ROWS - 2: 100.0}),
]


def loud(folder, name):
    """Make the rows of padding the largest of a matrix, some with either sign."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = np.concatenate([tensors[name][:BYTE_VOCABULARY], 30 * tensors[name][BYTE_VOCABULARY:]])
    save_file(tensors, file)
    return folder


def pair(folder, **changes):
    """A pair over bytes whose target would give padding the largest logit."""
    raw = DRAFT | SIZES | {"dflash_config": {"target_layer_ids": [0], "mask_token_id": MASK}, "block_size": 4}
    target = write_byte_tokenizer(write_model(folder / "target", TARGET | SIZES | changes, 0))
    file = target / "model.safetensors"
    tensors = load_file(file)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    head[BYTE_VOCABULARY:] *= 30
    save_file(tensors, file)
    return target, write_model(folder / "draft", raw, 1)


@pytest.mark.parametrize(
    ("devices", "tied"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(
            4, False, marks=[pytest.mark.long, pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")]
        ),
    ],
)
def test_padding_is_never_emitted_drafted_or_reported(tmp_path, monkeypatch, devices, tied):
    drafted = []

    def spy(draft, *arguments):
        block, *rest = draft(*arguments)
        drafted.append(np.asarray(block))
        return block, *rest

    around_step(monkeypatch, "draft", spy)
    models = pair(tmp_path, tie_word_embeddings=tied)
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_speculative_tokens": 3}
    llm = LLM(*models, tensor_parallel_size=devices, **options)
    for output in llm.generate([PROMPT] * len(PARAMS), PARAMS):
        (completion,) = output.outputs
        assert max(completion.token_ids) < BYTE_VOCABULARY
        for entries in completion.logprobs or ():
            assert max(entries) < BYTE_VOCABULARY
            assert 0.05 < np.exp([entry.logprob for entry in entries.values()]).sum() <= 1.0001  # padding has no share
        for entries, token in zip(output.prompt_logprobs or (), PROMPT["prompt_token_ids"], strict=False):
            assert entries is None or np.isneginf(entries[token].logprob) == (token >= BYTE_VOCABULARY)
    assert len(drafted) > 10
    assert max(block[:, 1:].max() for block in drafted) < BYTE_VOCABULARY
    with pytest.raises(RequestError, match="padding of the vocabulary alone: tokens are 0 to 257"):
        llm.generate(PROMPT, greedy(1, allowed_token_ids=[MASK]))


def test_what_ends_texts_is_a_token_whatever_the_tokenizer_says(tmp_path):
    """Or a text would never end. Without a tokenizer every row is a token."""
    folder = write_model(tmp_path / "target", TARGET | SIZES | {"eos_token_id": MASK + 2}, 0)
    assert LLM(folder, max_num_seqs=1).engine.target.config.num_tokens is None
    assert LLM(write_byte_tokenizer(folder), max_num_seqs=1).engine.target.config.num_tokens == MASK + 3
