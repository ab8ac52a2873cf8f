"""The acceptance length of a drafter in training, measured by the engine that will serve it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_jax.base.values import Prompt, SamplingParams
from dflash_jax.eval.acceptance import measure
from dflash_jax.llm import LLM
from dflash_jax.progress import Phase
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data.shards import Sample

KV_CACHE_BYTES = 2**30
BEGINNING = 64  # tokens of a text without a prompt that serve as one


class Evaluator:
    """Completes the prompts of samples that were held out, with whatever drafter it is given."""

    def __init__(self, config: TrainConfig, target: Path, samples: Sequence[Sample]):
        self._config, self._target = config, target
        self._prompts = [prompt_of(sample) for sample in samples]
        self._sampling = SamplingParams(temperature=0.0, max_tokens=config.eval_max_tokens)
        self._llm: LLM | None = None  # made for the first drafter

    def __call__(self, draft: Path, now: Phase) -> dict[str, float]:
        """Figures of the drafter in a folder, by name; lengths in tokens a round, the target's own included."""
        with now.within("loading the drafter into the engine"):
            if self._llm is None:
                self._llm = self._load(draft)
            else:
                self._llm.replace_draft(draft)
        with now.within("measuring with the engine", len(self._prompts)) as measuring:
            found = measure(self._llm, self._prompts, self._sampling, use_tqdm=measuring.tqdm)
        positions = {f"accepted/{k}": share for k, share in enumerate(found.acceptance_per_position, start=1)}
        return {
            "acceptance_length": found.mean_acceptance_length or 1.0,
            "repeated_ngrams": found.repeated_ngrams or 0.0,
            **positions,
        }

    def _load(self, draft: Path) -> LLM:
        config = self._config
        return LLM(
            self._target,
            draft,
            dtype=config.dtype,
            max_num_seqs=min(64, len(self._prompts)),
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            max_model_len=config.max_length + config.eval_max_tokens,
            tensor_parallel_size=config.tensor_parallel_size,
            enable_prefix_caching=False,
            num_speculative_tokens=config.block_size - 1,
            compile_at_start=False,
        )


def prompt_of(sample: Sample) -> Prompt:
    """What the target is to go on from: the prompt, or the beginning of a text that has none."""
    return {"prompt_token_ids": list(sample.prompt_token_ids or sample.token_ids[:BEGINNING])}
