"""Targets against vectors that transformers made (`scripts/make_parity_vectors.py`); needs no torch."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

from dflash_jax.spec import read_json, target_config
from tests.conftest import DATA
from tests.hybrid_replay import EVENTS, Replay
from tests.parity_check import Target, check, chunked, whole

REPLAY_SEED = 12  # of a replay in which all of `EVENTS` happen
CASES = sorted(path.parent for path in (DATA / "parity").glob("*/cases.safetensors"))


def test_the_vectors_are_there():
    assert len(CASES) >= 19
    assert sum(folder.name.startswith("qwen35") for folder in CASES) >= 3


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_target_equals_transformers(folder):
    reference = load_file(folder / "cases.safetensors")
    target = Target(folder / "target")
    reference = target.captured(reference)
    windows = [target.config.layers[i].window or 0 for i in target.config.attention_layers]
    assert all(window < reference["input_ids"].shape[1] for window in windows)
    assert 1 < np.abs(reference["logits"]).max() < 50
    check(whole(target, reference["input_ids"]), reference, "in one call")
    if not target.config.recurrent_layers:
        check(chunked(target, reference["input_ids"]), reference, "through the cache")
        return
    replay = Replay(target, reference["input_ids"], REPLAY_SEED)
    check(replay.run(), reference, "through the caches of the engine")
    assert all(replay.events[name] > 1 for name in EVENTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 9},
        {"sliding_window": 9, "max_window_layers": 1},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_windows_of_a_terse_config_are_those_of_transformers(changes):
    raw = read_json(DATA / "parity" / "qwen3_gqa_wide_heads" / "target" / "config.json") | changes
    theirs = AutoConfig.for_model(**raw)
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.window for layer in target_config(raw).layers] == windows
