"""The acceptance length of a drafter in training, measured by the engine that will serve it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.eval.acceptance import measure
from dflash_jax.llm import LLM
from dflash_jax.parallel.mesh import Mesh
from dflash_jax.progress import Phase
from dflash_jax.spec import TargetConfig
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data.shards import Sample
from dflash_jax.train.dataset import DEFAULT_EVAL_SAMPLES
from dflash_jax.train.pair import Pair
from dflash_jax.weights.formats.protocol import Weight
from dflash_jax.weights.loader import Params
from dflash_jax.weights.parameters import Parameter, build, parameters_of
from dflash_jax.weights.tables import checkpoint_table

KV_CACHE_BYTES = 2**30
BEGINNING = 64  # tokens of a text without a prompt that serve as its prompt
REHEARSED = 8  # prompts, of which the time of all is estimated
BRIEF = 16  # tokens generated for each while the engine compiles, before the clock runs


class Evaluator:
    """Completes the prompts of held-out samples with any drafter of one configuration.

    Args:
        config: options of the run.
        pair: the target, whose parameters the engine shares with training, and the configuration of the drafter.
        samples: held out of training.
    """

    def __init__(self, config: TrainConfig, pair: Pair, samples: Sequence[Sample]):
        self._config, self._pair = config, pair
        self._prompts = [prompt_of(sample) for sample in samples]
        self._sampling = SamplingParams(temperature=0.0, max_tokens=config.eval_max_tokens)
        self._llm: LLM | None = None  # loaded with the first drafter

    def __call__(self, draft: Path, now: Phase) -> dict[str, float]:
        """Measure a drafter.

        Args:
            draft: its folder.
            now: the phase that progress is shown in.

        Returns:
            Figures by name: `acceptance_length` in tokens a round, the target's own included; `repeated_ngrams`;
            `accepted/k`, the share of rounds that accept draft k.

        Raises:
            DFlashError: a completion failed.
        """
        llm = self._with(draft, now)
        with now.within("measuring with the engine", len(self._prompts)) as measuring:
            acceptance = measure(llm, self._prompts, self._sampling, use_tqdm=measuring.tqdm)
        shares = enumerate(acceptance.acceptance_per_position, start=1)
        return {
            "acceptance_length": acceptance.mean_acceptance_length or 1.0,
            "repeated_ngrams": acceptance.repeated_ngrams or 0.0,
            **{f"accepted/{k}": share for k, share in shares},
        }

    def rehearse(self, draft: Path, now: Phase) -> float:
        """Load the engine, have it compile for `REHEARSED` prompts, and estimate the seconds of a measurement.

        The estimate is an upper bound: rounds of an untrained drafter emit one token each, and the engine runs what is
        compiled, in parts of `REHEARSED` prompts, until it has compiled for all prompts side by side.
        """
        llm, part = self._with(draft, now), self._prompts[:REHEARSED]
        with now.within("rehearsing the measurement", 2 * len(part)) as rehearsing:
            brief = replace(self._sampling, max_tokens=min(BRIEF, self._config.eval_max_tokens))
            llm.generate(part, brief, use_tqdm=rehearsing.tqdm)
            began = time.perf_counter()
            llm.generate(part, self._sampling, use_tqdm=rehearsing.tqdm)
            return (time.perf_counter() - began) * len(self._prompts) / len(part)

    def _with(self, draft: Path, now: Phase) -> LLM:
        """The engine with the drafter of a folder."""
        with now.within("loading the drafter into the engine"):
            if self._llm is None:
                self._llm = self._load(draft)
            else:
                self._llm.replace_draft(draft)
        return self._llm

    def _load(self, draft: Path) -> LLM:
        config = self._config
        return LLM(
            self._pair.folder,
            draft,
            target_params=engine_params(self._pair.params, self._pair.target, config.tensor_parallel_size),
            dtype=config.dtype,
            max_num_seqs=min(DEFAULT_EVAL_SAMPLES, len(self._prompts)),
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            max_model_len=config.max_length + config.eval_max_tokens,
            tensor_parallel_size=config.tensor_parallel_size,
            enable_prefix_caching=False,
            num_speculative_tokens=config.block_size - 1,
            compile_at_start=False,
        )


def prompt_of(sample: Sample) -> Prompt:
    """The prompt of a sample; of a text that has none, its first `BEGINNING` tokens."""
    return {"prompt_token_ids": list(sample.prompt_token_ids or sample.token_ids[:BEGINNING])}


def engine_params(params: Params, target: TargetConfig, tensor_parallel_size: int) -> Params | None:
    """The parameters of training as the engine takes them; arrays that lie where it wants them are not copied.

    None on one CPU device: its engine holds projections transposed, which takes a copy in any case.
    """
    mesh = Mesh.of(tensor_parallel_size)
    if mesh.is_cpu:
        return None
    places = build(parameters_of(checkpoint_table(target), target), lambda p: _places(p, p.of(params), mesh))
    shared: Params = jax.device_put(params, places)
    return shared


def _places(parameter: Parameter, leaf: jax.Array | Weight, mesh: Mesh) -> Any:
    """The sharding of a parameter as the engine wants it; of a weight of several arrays, one for each."""
    place = mesh.place(parameter.axes, parameter.shape)
    if not isinstance(leaf, Weight):
        return place
    specs = next((leaf.shard(axis, name) for axis, name in enumerate(place.spec) if name is not None), None)
    if specs is None:
        return jax.tree.map(lambda _: mesh.whole, leaf)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh.devices, spec), specs, is_leaf=lambda value: isinstance(value, PartitionSpec)
    )
