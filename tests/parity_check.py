"""Run a checkpoint folder through our path, and compare with what transformers computed from it."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.target import TargetModel
from dflash_jax.spec import TargetConfig
from dflash_jax.weights.loader import load_params
from dflash_jax.weights.target import read_target_config
from tests.dense_kv import DenseKVCache

TOLERANCE = 1e-4


class Target:
    """A target loaded from a folder, run in float32 with a dense cache and every layer tapped."""

    def __init__(self, folder: Path):
        self.config = read_target_config(folder)
        self.params = load_params(folder, self.config, jnp.dtype(jnp.float32))

    def cache(self, batch: int, slots: int) -> DenseKVCache:
        shape = (batch, slots, self.config.num_key_value_heads, self.config.head_dim)
        return DenseKVCache.zeros(self.config.num_hidden_layers, shape, jnp.dtype(jnp.float32))

    def __call__(self, tokens, positions, cache):
        """Logits [B, T, V], hidden states [L, B, T, D] and the cache after the tokens."""
        return _run(self.params, jnp.asarray(tokens), jnp.asarray(positions), cache, config=self.config)

    def captured(self, reference):
        """Vectors whose hidden states are those of `output_hidden_states`: the last one comes after the final norm.

        The stored vectors have it before the norm, which is computed here in float64 without any code of ours.
        """
        last = reference["hidden_states"][-1].astype(np.float64)
        scale = np.sqrt(np.square(last).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps)
        normed = (last / scale * np.asarray(self.params["norm"], np.float64)).astype(np.float32)
        return reference | {"hidden_states": np.concatenate([reference["hidden_states"][:-1], normed[None]])}


@partial(jax.jit, static_argnames="config")
def _run(params, tokens, positions, cache, *, config: TargetConfig):
    model = TargetModel(config).bind({"params": params})
    hidden, features, cache = model(tokens, positions, cache, tuple(range(config.num_hidden_layers)))
    taps = jnp.stack(jnp.split(features, config.num_hidden_layers, axis=-1))
    return model.logits(hidden), taps, cache


def whole(target: Target, input_ids):
    """Logits and hidden states of all tokens in one call."""
    batch, length = input_ids.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), input_ids.shape)
    logits, hidden, _ = target(input_ids, positions, target.cache(batch, length + 3))
    return np.asarray(logits), np.asarray(hidden)


def chunked(target: Target, input_ids):
    """Logits and hidden states in two parts: a prefill of another length for each sequence, the rest token by token."""
    batch, length = input_ids.shape
    done = length // 2 - 3 * np.arange(batch)  # each sequence is behind the one before it
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), input_ids.shape)
    cache = target.cache(batch, length + 3)
    first = np.where(positions < done[:, None], positions, -1)
    logits, hidden, cache = target(input_ids, first, cache)
    logits, hidden = np.array(logits), np.array(hidden)
    rows = np.arange(batch)
    while (done < length).any():
        active = done < length
        at = np.where(active, done, length - 1)
        step = np.where(active, done, -1).astype(np.int32)
        one_logits, one_hidden, cache = target(input_ids[rows, at][:, None], step[:, None], cache)
        logits[rows[active], at[active]] = np.asarray(one_logits)[active, 0]
        hidden[:, rows[active], at[active]] = np.asarray(one_hidden)[:, active, 0]
        done = done + active
    return logits, hidden


def error(found, expected) -> float:
    """The larger of two relative errors: of the norm, and of the largest element."""
    difference = np.asarray(found, np.float64) - expected
    of_norm = np.linalg.norm(difference) / np.linalg.norm(expected)
    return float(max(of_norm, np.abs(difference).max() / np.abs(expected).max()))


def check(found, reference, what: str) -> float:
    """Assert that logits and every layer's hidden states agree; the worst error."""
    logits, hidden = found
    assert logits.shape == reference["logits"].shape
    assert hidden.shape == reference["hidden_states"].shape
    errors = {f"layer {i}": error(hidden[i], expected) for i, expected in enumerate(reference["hidden_states"])}
    errors["logits"] = error(logits, reference["logits"])
    wrong = {name: value for name, value in errors.items() if not value <= TOLERANCE}
    assert not wrong, f"{what}: relative errors above {TOLERANCE}: {wrong}"
    return max(errors.values())
