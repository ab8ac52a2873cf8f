"""The same engine on 4 devices and on one says the same, token for token in float32, however shapes divide by 4."""

import jax
import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from tests.pairs import DRAFT, TARGET, assert_empty, prompt, tokens_of, write_model

DEVICES = 4
WINDOW = 7
pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs 4 devices")

# kv heads, query heads, mlp width, vocabulary, width
SHAPES = {
    "all divide": (4, 8, 64, 64, 32),
    "two kv heads a device, mlp whole": (8, 8, 50, 64, 32),
    "one kv head": (1, 4, 64, 61, 32),
    "nothing divides": (6, 6, 50, 61, 32),
    "rows that a GPU's kernel can sum": (4, 8, 64, 64, 128),
}  # two kv heads: test_golden.py
PROMPTS = [prompt(*(7 * i % 59 for i in range(length))) for length in (16, 3)]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0)]


def raw_configs(kv_heads, heads, mlp, vocab_size, width):
    """A target of one layer and a drafter of a sliding one; test_golden.py has deeper ones."""
    sizes = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    draft = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW, "block_size": 4}
    taps = {"target_layer_ids": [0], "mask_token_id": vocab_size - 1}
    return TARGET | sizes, DRAFT | sizes | draft | {"dflash_config": taps, "num_target_layers": 1}


def engines(folder, shape):
    """The pair on 1 device and on 4."""
    target, draft = raw_configs(*shape)
    models = write_model(folder / "target", target, 0), write_model(folder / "draft", draft, 1)
    options = {"page_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64}  # few programs
    options |= {"num_speculative_tokens": 3, "kv_cache_memory_bytes": 1 << 20}
    return [LLM(*models, tensor_parallel_size=devices, **options) for devices in (1, DEVICES)]


def is_split(array):
    return any(shard.data.shape != array.shape for shard in array.addressable_shards)


OFTEN = ("all divide", "nothing divides")  # the others mix the two


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=name, marks=() if name in OFTEN else pytest.mark.long) for name, shape in SHAPES.items()],
)
def test_four_devices_say_what_one_says(tmp_path, shape):
    kv_heads, _, mlp, vocab_size, _ = shape
    one, four = engines(tmp_path, shape)
    outputs = [llm.generate(PROMPTS, PARAMS) for llm in (one, four)]
    assert tokens_of(outputs[1]) == tokens_of(outputs[0])
    lengths = [[output.metrics.acceptance_lengths for output in found] for found in outputs]
    assert lengths[1] == lengths[0]  # the drafts were the same, too
    assert_empty(four.engine)

    # Whatever can be split was: these are not four copies of one engine.
    target, draft = four.engine.runner.params
    for params in (target, draft):
        assert is_split(params["layers_0"]["mlp"]["down_proj"]) == (mlp % DEVICES == 0)
    assert is_split(target["lm_head"]) == (vocab_size % DEVICES == 0)
    caches = four.engine.runner.caches
    holders = 1 if kv_heads % DEVICES == 0 else DEVICES // kv_heads if DEVICES % kv_heads == 0 else DEVICES
    for pool in (*caches.target.keys, *caches.target.values, *caches.draft.keys, *caches.draft.values):
        kept = [np.asarray(shard.data) for shard in pool.addressable_shards]
        assert {pages.shape[1] for pages in kept} == {kv_heads * holders // DEVICES}
        assert all(pages.any() for pages in kept)  # every device wrote what it keeps
        assert all((pages == kept[i - i % holders]).all() for i, pages in enumerate(kept))
