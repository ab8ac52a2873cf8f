"""A training run: load, go on where it was left, step, measure, save, and write the best drafter."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_jax.base.errors import ConfigError
from dflash_jax.parallel.platform import enable_compilation_cache
from dflash_jax.progress import Phase, announce, phase
from dflash_jax.spec import DraftConfig, TargetConfig, check_draft_fits, draft_config, read_json, target_config
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.checkpoints import Checkpoints, claim
from dflash_jax.train.config import MASK_TOKENS, TrainConfig, draft_config_of
from dflash_jax.train.data.shards import Sample, read_jsonl, read_shards
from dflash_jax.train.dataset import Batches, Dataset
from dflash_jax.train.evaluation import Evaluator
from dflash_jax.train.features import FeatureCache
from dflash_jax.train.logs import Logs
from dflash_jax.train.objective import Batch, Measured
from dflash_jax.train.state import (
    TrainState,
    compile_step,
    init_state,
    learning_rate,
    make_mesh,
    make_optimizer,
    make_step,
    place,
    put_batch,
)
from dflash_jax.weights.export import draft_raw_config, save_model
from dflash_jax.weights.folder import resolve_folder
from dflash_jax.weights.loader import Params, load_params


@dataclass(frozen=True)
class Pair:
    """A target with its parameters, and the drafter to train for it."""

    folder: Path
    target: TargetConfig
    params: Params
    draft: DraftConfig
    draft_params: Params | None


def train(config: TrainConfig) -> Path:
    """Train a drafter, or go on with one; returns the folder it was written to.

    Raises:
        ConfigError: an option, the data or the drafter does not fit.
        CheckpointError: the target, or a checkpoint, cannot be loaded.
    """
    deadline = None if config.minutes is None else time.monotonic() + 60 * config.minutes
    with phase("starting the devices"):
        enable_compilation_cache()
        mesh, out = make_mesh(config), Path(config.out)
    pair = load_pair(config, mesh)
    with phase("reading samples") as now:
        samples = now.over(read_samples(config, Tokenizer.of(pair.folder)))
        dataset, held_out = Dataset.of(samples, config.max_length).split(config.eval_samples, config.seed)
    batches = Batches(
        dataset, config.max_length, config.batch_tokens, config.data_parallel_size, config.num_anchors, config.seed
    )
    steps = batches.per_epoch * config.epochs if deadline is None else None
    claim(out / "training", config.identity | {"steps": steps})
    checkpoints = Checkpoints(out / "training" / "checkpoints")
    first = checkpoints.latest or 0
    with contextlib.closing(checkpoints):
        optimizer = make_optimizer(config, pair.draft)
        with phase(f"restoring step {first}" if first else "making the drafter"):
            state = init_state(pair.draft, optimizer, mesh, config.seed, pair.draft_params)
            if first:
                state = checkpoints.restore(first, state)
        step_of = _compiled(config, pair, optimizer, batches, state, mesh)
        what = "training steps" if config.minutes is None else f"training steps in {config.minutes:g} minutes"
        with phase(what, steps, first=first) as now, Logs(out / "training", now) as logs:
            score_of = _scores(config, pair, held_out, logs, now)
            pace = make_pace(steps, deadline, float(state.progress))
            step, progress, coming = first, pace(first + 1), batches.after(first)
            while progress < 1 and step < (config.stop_at or math.inf):
                samples_of, batch = next(coming)
                state, measured = step_of(state, samples_of, batch, progress)
                step += 1
                logs.advance(int(batch.lengths.sum()))
                rate, progress = learning_rate(config, progress), pace(step + 1)
                last = progress >= 1 or step == config.stop_at
                if step % config.log_every == 0 or last:
                    logs.train(step, measured, float(rate))
                try:
                    score = score_of(step, state.params, progress >= 1)
                except Exception:  # what was learnt since the last checkpoint is worth more than its measure
                    checkpoints.save(step, state, None)
                    raise
                if score is not None or step % config.save_every == 0 or last:
                    checkpoints.save(step, state, score)
        with phase("writing the drafter"):
            best = checkpoints.wait().best
            if best is None:
                raise ConfigError(f"{out} holds no step to write; let the run make one.")
            write_draft(out, pair, checkpoints.restore(best, state).params)
    return out


def make_pace(steps: int | None, deadline: float | None, before: float) -> Callable[[int], float]:
    """The share of a run that is behind it when a step begins: of its steps, or of its time.

    Args:
        steps: of the whole run; None if time decides.
        deadline: when it ends, as `time.monotonic` counts; None if steps decide.
        before: the share that earlier starts had done; time counts from now on.
    """
    if steps is not None:
        return lambda step: (step - 1) / steps
    assert deadline is not None
    began, ends = time.monotonic(), deadline
    return lambda step: before + (1 - before) * (time.monotonic() - began) / max(ends - began, 1e-9)


def load_pair(config: TrainConfig, mesh: jax.sharding.Mesh) -> Pair:
    """The target in the dtype to compute in, split over `tp`, and the drafter to train.

    Raises:
        ConfigError: a configuration does not fit.
        CheckpointError: a folder, file or tensor is missing, damaged or surplus.
    """
    announce("finding the models")
    folder = resolve_folder(config.target)
    draft_folder = None if config.draft_model is None else resolve_folder(config.draft_model)
    with phase("loading the models"):
        return _load_pair(config, mesh, folder, draft_folder)


def _load_pair(config: TrainConfig, mesh: jax.sharding.Mesh, folder: Path, draft_folder: Path | None) -> Pair:
    path = folder / "config.json"
    target = target_config(read_json(path), str(path))

    def where(axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return place(mesh, axes, shape)

    draft_params = None
    if draft_folder is None:
        draft = draft_config_of(config, target, mask_token_of(config, target, folder))
    else:
        path = draft_folder / "config.json"
        draft = draft_config(read_json(path), str(path), num_target_layers=target.num_hidden_layers)
        draft_params = load_params(draft_folder, draft, jnp.float32, where)
    check_draft_fits(target, draft, str(path))
    if draft.draft_vocab_size is not None:
        raise ConfigError(
            f"{path}: draft_vocab_size={draft.draft_vocab_size}, and heads of drafters are not trained here; use a "
            "drafter that shares its target's head."
        )
    return Pair(folder, target, load_params(folder, target, jnp.dtype(config.dtype), where), draft, draft_params)


def mask_token_of(config: TrainConfig, target: TargetConfig, folder: Path) -> int:
    """The token whose embedding stands where nothing is drafted yet."""
    if config.mask_token_id is not None:
        return config.mask_token_id
    tokenizer = Tokenizer.of(folder)
    if tokenizer is not None:
        known = (tokenizer.token_id(name) for name in MASK_TOKENS)
        return next((token for token in known if token is not None), target.vocab_size - 1)
    return target.vocab_size - 1


def read_samples(config: TrainConfig, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    """Everything that `data` names."""
    return chain.from_iterable(
        read_shards(Path(path)) if Path(path).is_dir() else read_jsonl(Path(path), tokenizer) for path in config.data
    )


def write_draft(folder: Path, pair: Pair, params: Params) -> None:
    """Write a drafter as `LLM`, vLLM and the reference implementation load it: bfloat16, a row of names a tensor."""
    raw = draft_raw_config(
        pair.draft, pair.target.num_hidden_layers, max_position_embeddings=pair.target.max_position_embeddings
    )
    save_model(folder, raw, pair.draft, jax.device_get(params), "bfloat16")


def _compiled(
    config: TrainConfig,
    pair: Pair,
    optimizer: optax.GradientTransformation,
    batches: Batches,
    state: TrainState,
    mesh: jax.sharding.Mesh,
) -> Callable[[TrainState, np.ndarray, Batch, float], tuple[TrainState, Measured]]:
    """The step as a function of state, samples, their batch and the share of the run that is done."""
    features = None
    if config.feature_cache:
        folder = Path(config.feature_cache)
        features = FeatureCache.of(folder, pair.target, pair.params, pair.draft.target_layer_ids, batches)
    width = features.rows.shape[1] if features else None
    compiled = compile_step(
        make_step(config, pair.target, pair.draft, optimizer), batches.used_shapes, state, pair.params, mesh, width
    )

    def step(state: TrainState, samples: np.ndarray, batch: Batch, progress: float) -> tuple[TrainState, Measured]:
        known = features.features(samples, batch) if features else None
        run = compiled[batch.tokens.shape[1]]
        return run(state, put_batch(batch, mesh), pair.params, known, np.float32(progress))

    return step


def _scores(
    config: TrainConfig, pair: Pair, held_out: list[Sample], logs: Logs, now: Phase
) -> Callable[[int, Params, bool], float | None]:
    """Measures the acceptance length after those steps that ask for it; None after the others."""
    evaluator = Evaluator(config, pair.folder, held_out)
    folder = Path(config.out) / "training" / "evaluated"

    def score(step: int, params: Params, finished: bool) -> float | None:
        if not held_out or not (finished or (config.eval_every and step % config.eval_every == 0)):
            return None
        write_draft(folder, pair, params)  # measured is what will be served
        values = evaluator(folder, now)
        shutil.rmtree(folder)
        logs.eval(step, values)
        return values["acceptance_length"]

    return score
