"""The tests' own pair recites the licence of this repository, so that text and acceptance are known beforehand."""

from pathlib import Path

import pytest

from dflash_jax import LLM, SamplingParams
from tests.pairs import RECITER, reciter

LICENSE = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
TITLE = LICENSE[:130]
PROMPTS = [
    TITLE,
    "   TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION\n",
    "7. Disclaimer of Warranty. Unless required by",
    "You may reproduce and distribute copies of the",
]


@pytest.fixture(scope="module")
def llm():
    return reciter(max_num_seqs=2)


@pytest.fixture(scope="module")
def recited(llm):
    return llm.generate(PROMPTS, GREEDY)


def test_recites_the_licence(recited):
    for prompt, result in zip(PROMPTS, recited, strict=True):
        text = result.outputs[0].text
        assert len(text) > 200
        assert LICENSE[LICENSE.index(prompt) + len(prompt) :].startswith(text)


def test_most_drafts_are_accepted(recited):
    for prompt, result in zip(PROMPTS, recited, strict=True):
        assert result.metrics.mean_acceptance_length >= 8, prompt


def test_same_tokens_without_the_drafter(recited):
    alone = LLM(RECITER / "target", max_num_seqs=2).generate(PROMPTS, GREEDY)
    assert [r.outputs[0].token_ids for r in alone] == [r.outputs[0].token_ids for r in recited]
    assert {length for r in alone for length in r.metrics.acceptance_lengths} == {1}


def test_the_whole_licence_then_the_end(llm):
    result = llm.generate(TITLE, SamplingParams(temperature=0.0, max_tokens=3000))[0]
    assert TITLE + result.outputs[0].text == LICENSE
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].token_ids[-1] == llm.tokenizer.eos_token_id
    assert result.metrics.mean_acceptance_length >= 14


def test_chat_continues_what_the_user_says(llm, recited):
    (result,) = llm.chat([{"role": "user", "content": PROMPTS[1]}], GREEDY)
    assert result.outputs[0].token_ids == recited[1].outputs[0].token_ids


def test_is_greedy_by_default(llm, recited):
    params = llm.get_default_sampling_params()
    assert params.temperature == 0
    (result,) = llm.generate(PROMPTS[0])
    assert recited[0].outputs[0].text.startswith(result.outputs[0].text)
