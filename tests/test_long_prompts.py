"""A long prompt of a hybrid with experts: how it is cut into chunks changes nothing, and no step takes longer than its
tokens and its context explain.
"""

import os
import time

import jax
import numpy as np
import pytest

from dflash_jax import LLM
from tests.pairs import greedy, prompt, write_model
from tests.test_experts import HYBRID_MOE
from tests.test_hybrid import states_of

TOKENS = 200_000 if "DFLASH_TEST_LONG" in os.environ else 2000
CHUNKS = (256, 200)  # tokens; of the second some end inside of what the chunked recurrence solves at once
TOLERANCE = 1e-4  # of the largest number
SMALL = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": TOKENS + 64,
}


def processed(llm, text):
    """Keys, values and states of a prompt, the tokens that follow, and seconds and tokens of each step."""
    engine, request = llm.engine, llm.frontend.request(prompt(*text), greedy(6))
    engine.add(request.sequences)
    seconds, done = [], [0]
    while not (engine.scheduler.running and engine.scheduler.running[0].is_prefilled):
        began = time.perf_counter()
        engine.step()
        jax.block_until_ready(engine.runner.caches)
        seconds.append(time.perf_counter() - began)
        done.append(engine.scheduler.running[0].prefilled)
    (running,), kept = engine.scheduler.running, []
    caches = engine.runner.caches.target
    for place in filter(None, caches.places):
        pages = place.first_page + np.array(running.units[place.group].ids)
        for pools in (caches.keys, caches.values):
            heads = np.asarray(pools[place.pool])[pages].swapaxes(1, 2)
            kept.append(heads.reshape(-1, *heads.shape[2:])[: len(text)])
    states = states_of(llm, running.slot)
    while not engine.is_idle:
        engine.step()
    return kept, states, request.sequences[0].output.token_ids, np.array(seconds), np.diff(done)


def assert_explained(seconds, tokens):
    """Whether steps late in the prompt take what those early in it and their context predict."""
    of_whole = seconds[tokens == np.bincount(tokens).argmax()]
    early, middle, late = (np.median(part) for part in np.array_split(of_whole, 12)[::5])
    assert late <= 1.5 * max(middle + (middle - early), middle)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    raw = HYBRID_MOE | {"text_config": HYBRID_MOE["text_config"] | SMALL}
    return write_model(tmp_path_factory.mktemp("long") / "target", raw, 0)


def test_how_a_long_prompt_is_cut_changes_nothing(folder):
    text = np.random.default_rng(0).integers(2, 60, TOKENS).tolist()
    results = []
    for chunk in CHUNKS:
        llm = LLM(folder, max_num_seqs=1, max_num_batched_tokens=chunk, enable_prefix_caching=chunk == CHUNKS[0])
        llm.compile([prompt(*text)], greedy(6))
        *result, seconds, tokens = processed(llm, text)
        results.append(result)
        assert tokens.max() == chunk
        if TOKENS >= 100_000:  # short ones are at the mercy of what else the machine does
            assert_explained(seconds, tokens)
    (kept, states, answer), others = results[0], results[1]
    assert answer == others[2]
    for name, pairs in (
        ("keys and values", zip(kept, others[0], strict=True)),
        ("states", zip(states, others[1], strict=True)),
    ):
        for one, other in pairs:
            assert np.abs(one).max() > 0.1, name
            np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * np.abs(one).max(), err_msg=name)
