"""The engine through compiled kernels, over pages of every dtype, against the same engine through reference kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.device import steps
from dflash_jax.engine.programs.store import programs
from dflash_jax.parallel.collectives import Devices
from dflash_jax.parallel.platform import compiler_options
from dflash_jax.state import paged_kv as paged
from dflash_jax.weights.formats import array
from pallas_kernels import paged_attention
from tests.pairs import DRAFT, TARGET, around_step, prompt, write_model

pytestmark = pytest.mark.gpu
TOKEN = 5  # a bias makes every engine choose it, so that rounding cannot lead them apart
WIDE = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256, "dtype": "bfloat16"}


def hidden_states(folders, kv_cache_dtype, monkeypatch, implementation):
    """Hidden states of every prefill and round, with a block that is right about its first three drafts."""
    found = []
    with monkeypatch.context() as patch:
        if implementation is not None:
            for module, name in (
                (paged, "paged_attention"),
                (paged, "write_attend"),
                (paged, "write_context"),
                (paged, "write_kv"),
                (array, "swiglu"),
            ):
                patch.setattr(module, name, partial(getattr(module, name), implementation=implementation))
            patch.setattr(Devices, "implementation", implementation)  # that of `add_norm`
        programs().clear()

        def spy(run, *arguments):
            out = run(*arguments)
            found.append(np.asarray(out[0] if len(out) == 2 else out[-1], np.float32))
            return out

        for name in ("verify", "prefill"):
            around_step(patch, name, spy)

        def draft(params, slots, cache, tables, *, spec):
            return jnp.full((len(tables.packed), spec.block), TOKEN, jnp.int32).at[:, 4].set(TOKEN + 1), cache

        patch.setattr(steps, "draft", draft)
        llm = LLM(*folders, kv_cache_dtype=kv_cache_dtype, max_num_seqs=2, max_num_batched_tokens=128)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={TOKEN: 100.0})
        prompts = [prompt(*[(i * i + k) % 60 for i in range(n)]) for k, n in enumerate((300, 300))]
        llm.engine.planner.lengths = None  # the whole block each round
        llm.compile(prompts, params)  # so that both engines run the same steps
        outputs = llm.generate(prompts, params)
    assert all(set(output.outputs[0].token_ids) == {TOKEN} for output in outputs)
    return found


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_compiled_kernels_give_the_reference_states(tmp_path, monkeypatch, kv_cache_dtype):
    raw = DRAFT | WIDE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    folders = write_model(tmp_path / "target", TARGET | WIDE, 0, 0.1), write_model(tmp_path / "draft", raw, 1, 0.1)
    compiled = hidden_states(folders, kv_cache_dtype, monkeypatch, None)
    reference = hidden_states(folders, kv_cache_dtype, monkeypatch, "reference")
    assert len(compiled) == len(reference) > 10
    for found, wanted in zip(compiled, reference, strict=True):
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < 0.03


def test_kernels_take_the_table_of_one_sequence_out_of_a_packed_array():
    """It lies 8 bytes behind the beginning of the array; XLA must copy it, since Mosaic needs 256."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 16, 32, 128)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.normal(size=(80, 8, 64, 128)), jnp.float8_e4m3fn) for _ in "kv")
    packed, length = rng.integers(0, 80, (1, 130), np.int32), np.array([3000], np.int32)

    def attend(implementation, packed):
        return paged_attention(q, k, v, packed[:, 2:66], length, implementation=implementation)

    found, wanted = (
        np.asarray(jax.jit(partial(attend, name), compiler_options=compiler_options("gpu"))(packed), np.float32)
        for name in ("mosaic", "reference")
    )
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.01
