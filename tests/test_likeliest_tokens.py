"""The head is asked for the first halves of blocks, then for the others where that can matter: nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.engine.device import acceptance
from dflash_jax.engine.programs.store import programs
from tests.pairs import golden_cases, golden_llm, greedy, in_parts, prompt
from tests.test_golden import assert_matches_reference

B, T, V = 5, 8, 32


class Asked:
    """A target whose hidden states are its logits; of rows that are not wanted it tells lies."""

    def __init__(self):
        self.rows = []

    def likeliest(self, hidden, length=None):
        self.rows.append((hidden.shape[0] * hidden.shape[1], length))
        places = jnp.arange(hidden.shape[0] * hidden.shape[1]).reshape(hidden.shape[:2])
        is_wanted = places < (hidden.size if length is None else length)
        return jnp.where(is_wanted, hidden.argmax(-1), -7), jnp.where(is_wanted, hidden.max(-1), jnp.nan)


@pytest.mark.parametrize("counts", [(0, 7, 3, 4, 5), (7,) * B, (2,) * B, (3, 4, 3, 4, 3)], ids=str)
def test_halves_give_all_that_is_emitted(monkeypatch, counts):
    monkeypatch.setattr(acceptance, "HALVED_ROWS", B * T)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, V), np.float32))
    wanted = hidden.argmax(-1)
    agrees = jnp.arange(T - 1) < jnp.array(counts)[:, None]
    drafts = jnp.where(agrees, wanted[:, :-1], (wanted[:, :-1] + 1) % V)
    target = Asked()
    tokens, scores = acceptance.likeliest_tokens(target.likeliest, hidden, drafts, acceptance.accepted)
    assert acceptance.accepted(tokens, drafts).tolist() == list(counts)
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(tokens[b, : count + 1], wanted[b, : count + 1])
        np.testing.assert_array_equal(scores[b, : count + 1], hidden.max(-1)[b, : count + 1])
    assert not jnp.isnan(scores).any()
    half = T // 2
    assert target.rows == [(B * half, None), (B * half, half * sum(count >= half for count in counts))]


def test_few_rows_are_asked_for_at_once():
    target = Asked()
    hidden = jnp.zeros((2, T, V))
    acceptance.likeliest_tokens(target.likeliest, hidden, jnp.zeros((2, T - 1), jnp.int32), acceptance.accepted)
    assert target.rows == [(2 * T, None)]


@pytest.fixture
def always_halved(monkeypatch):
    """Compiled steps do not notice that the code behind them was patched."""
    monkeypatch.setattr(acceptance, "HALVED_ROWS", 0)
    programs().clear()
    yield
    programs().clear()


@pytest.mark.usefixtures("always_halved")
@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.long)])
def test_outputs_and_acceptance_stay_those_of_the_reference(devices):
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    cases = golden_cases("qwen3_swa_tied")
    llm = golden_llm("qwen3_swa_tied", tensor_parallel_size=devices)
    outputs = in_parts(llm, [prompt(*case["input_ids"]) for case in cases], greedy(80), most=1)
    assert_matches_reference(outputs, cases)
    lengths = [n for output in outputs for n in output.metrics.acceptance_lengths]
    assert min(lengths) <= 8 < max(lengths)  # first halves alone, and both
