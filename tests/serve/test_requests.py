"""The way of a request before it is sent to the engine."""

import asyncio
import threading

import pytest

from dflash_jax.base.outputs import EngineStats
from dflash_jax.options.serve_args import ServeArgs
from dflash_jax.serve.answers.metrics import Metrics
from dflash_jax.serve.answers.requests import encode
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.engine_link.client import EngineClient
from dflash_jax.serve.engine_link.link_messages import Ready, Start
from dflash_jax.serve.protocol import APIError
from dflash_jax.text.renderer import Renderer
from tests.pairs import RECITER

MAX_MODEL_LEN = 64


@pytest.fixture
def state():
    client = EngineClient(Start("", None, {}, "info"), restarts=False)
    client.ready = Ready(MAX_MODEL_LEN, vocab_size=1024, num_speculative_tokens=3, kv_tokens=100, max_num_seqs=2)
    return ServerState(
        ServeArgs(), Renderer(RECITER / "target"), client, Metrics(EngineStats, prefix="", model="m"), {}
    )


def test_a_text_that_cannot_fit_is_refused_without_tokenising_it(state, monkeypatch):
    tokenizer = state.renderer.tokenizer
    limit = MAX_MODEL_LEN * max(map(len, tokenizer.hf.get_vocab()))
    tokenised = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: tokenised.append(len(text)) or [])
    with pytest.raises(APIError, match=r"length is 64 tokens. However, the prompt has at least 64") as error:
        encode(state, "a" * limit, "a text prompt")
    assert (error.value.status, error.value.param, tokenised) == (400, "prompt", [])
    encode(state, "a" * limit, "a text prompt", is_truncated=True)  # its end is wanted
    encode(state, "a" * (limit // 2), "a text prompt")  # it may fit
    assert tokenised == [limit, limit // 2]


def test_nothing_is_tokenised_for_an_engine_that_is_not_there(state, monkeypatch):
    state.client.ready = None
    monkeypatch.delattr(type(state.renderer.tokenizer), "encode")
    with pytest.raises(APIError) as error:
        encode(state, "a", "a text prompt")
    assert error.value.status == 503


def test_a_long_text_does_not_hold_up_others(state):
    """Two calls that wait for each other, which one thread could never run."""
    barrier = threading.Barrier(2, timeout=20)

    async def both():
        return await asyncio.gather(state.render(barrier.wait), state.render(barrier.wait))

    assert sorted(asyncio.run(both())) == [0, 1]


def test_threads_that_tokenise_at_once_get_what_one_gets(state):
    tokenizer = state.renderer.tokenizer
    texts = [f"You may reproduce and distribute {i} copies. " * (1 + 200 * (i % 3)) for i in range(24)]
    expected = [tokenizer.encode(text) for text in texts]

    async def together():
        return await asyncio.gather(*[state.render(lambda text=text: tokenizer.encode(text)) for text in texts])

    assert asyncio.run(together()) == expected
