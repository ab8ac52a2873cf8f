"""Reasoning may be any text; the structured output behind it obeys its grammar."""

import re

import pytest

from dflash_jax import LLM, SamplingParams, StructuredOutputsParams
from dflash_jax.serve.api.openai.chat import reasoning_token_ids
from dflash_jax.text.tokenizer import Tokenizer
from tests.pairs import BYTE_VOCABULARY, DRAFT, EOS, MASK, TARGET, write_byte_tokenizer, write_model

THINK, END_THINK = BYTE_VOCABULARY, BYTE_VOCABULARY + 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker")
    sizes = {"vocab_size": BYTE_VOCABULARY + 2, "eos_token_id": EOS, "num_hidden_layers": 2, "num_target_layers": 2}
    raw = DRAFT | sizes | {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK}}
    target = write_byte_tokenizer(write_model(folder / "target", TARGET | sizes, 0))
    tokenizer = Tokenizer(target)
    tokenizer.hf.add_tokens(["<think>", "</think>"])
    tokenizer.hf.save_pretrained(target)
    return target, write_model(folder / "draft", raw, 1)


@pytest.mark.parametrize("starts_open", [True, False])
def test_a_grammar_waits_for_the_end_of_reasoning(folders, starts_open):
    llm = LLM(*folders, num_speculative_tokens=5, max_num_seqs=2)
    plain = LLM(folders[0], max_num_seqs=2)
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        n=4,
        max_tokens=200,
        logit_bias={END_THINK: 6.0, THINK: 6.0},
        structured_outputs=StructuredOutputsParams(choice=["abc", "bca"]),
        reasoning_token_ids=(None if starts_open else THINK, END_THINK),
        skip_special_tokens=False,
    )
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)
    (expected,) = plain.generate({"prompt_token_ids": [1, 2, 3]}, params)
    thoughts = set()
    for completion, alone in zip(output.outputs, expected.outputs, strict=True):
        assert completion.token_ids == alone.token_ids
        assert completion.finish_reason == "stop"
        tokens = completion.token_ids
        has_thought = starts_open or tokens[0] == THINK
        end = tokens.index(END_THINK) + 1 if has_thought else 0
        thoughts.add(tuple(tokens[:end]))
        assert re.fullmatch("abc|bca", bytes_of(llm.tokenizer, tokens[end:]))
    assert len(thoughts) > 1  # free, and not all the same


def bytes_of(tokenizer, tokens):
    return tokenizer.decode([token for token in tokens if token != EOS])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n", (THINK, END_THINK)),
        ("<|im_start|>assistant\n<think>\n", (None, END_THINK)),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
    ],
)
def test_what_the_template_has_opened(folders, prompt, expected):
    assert reasoning_token_ids(Tokenizer(folders[0]), prompt) == expected


def test_tags_that_are_no_tokens_cannot_be_waited_for(tmp_path):
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    assert reasoning_token_ids(tokenizer, "<|im_start|>assistant\n<think>\n") is None
