"""A training run: load, resume, step, measure, save, and write the best drafter."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax

from dflash_jax.base.errors import ConfigError
from dflash_jax.parallel.platform import enable_compilation_cache
from dflash_jax.progress import Phase, phase
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.checkpoints import Checkpoints, claim
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data.shards import Sample, read_jsonl, read_shards
from dflash_jax.train.dataset import Batches, Dataset
from dflash_jax.train.evaluation import Evaluator
from dflash_jax.train.features import FeatureCache
from dflash_jax.train.logs import Logs
from dflash_jax.train.objective import Batch, Measured
from dflash_jax.train.pace import deadline_of, make_pace, refuse_too_few_minutes
from dflash_jax.train.pair import Pair, load_pair, write_draft
from dflash_jax.train.state import (
    TrainState,
    compile_step,
    init_state,
    learning_rate,
    make_mesh,
    make_optimizer,
    make_step,
    put_batch,
)
from dflash_jax.weights.loader import Params

Stepper = Callable[[TrainState, np.ndarray, Batch, float], tuple[TrainState, Measured]]


def train(config: TrainConfig, *, began: float | None = None) -> Path:
    """Train a drafter, or resume the run that the folder holds; returns the folder it was written to.

    Args:
        config: options of the run.
        began: when the command began, as `time.monotonic` counts: `minutes` counts from then. None is now.

    Raises:
        ConfigError: an option, the data or the drafter does not fit.
        CheckpointError: the target, or a checkpoint, cannot be loaded.
    """
    deadline = deadline_of(config.minutes, began)
    with phase("starting the devices"):
        enable_compilation_cache()
        mesh, out = make_mesh(config), Path(config.out)
    pair = load_pair(config, mesh)
    dataset, held_out = read_data(config, pair)
    batches = Batches(
        dataset, config.max_length, config.batch_tokens, config.data_parallel_size, config.num_anchors, config.seed
    )
    steps = batches.per_epoch * config.epochs if deadline is None else None
    claim(out / "training", config.identity | {"steps": steps, "eval_samples": len(held_out)})
    checkpoints = Checkpoints(out / "training" / "checkpoints")
    first = checkpoints.latest or 0
    with contextlib.closing(checkpoints):
        optimizer = make_optimizer(config, pair.draft)
        with phase(f"restoring step {first}" if first else "making the drafter"):
            state = init_state(pair.draft, optimizer, mesh, config.seed, pair.draft_params)
            if first:
                state = checkpoints.restore(first, state)
        stepper = _compiled(config, pair, optimizer, batches, state, mesh)
        scorer = Scorer(config, pair, held_out)
        if config.minutes is not None and deadline is not None:
            deadline -= reserve_evaluation(config.minutes, deadline, scorer, state.params, resumed=first > 0)
        what = "training steps" if config.minutes is None else f"training steps in {config.minutes:g} minutes"
        with phase(what, steps, first=first) as now, Logs(out / "training", now) as logs:
            pace = make_pace(steps, deadline, float(state.progress))
            state = run_steps(config, stepper, scorer, batches, checkpoints, state, first, pace, logs, now)
        with phase("writing the drafter"):
            best = checkpoints.wait().best
            if best is None:
                raise ConfigError(f"{out} holds no step to write; let the run make one.")
            write_draft(out, pair, checkpoints.restore(best, state).params)
    return out


def reserve_evaluation(minutes: float, deadline: float, scorer: Scorer, params: Params, *, resumed: bool) -> float:
    """Seconds of a budget to keep for the evaluation at the end, found by a rehearsal.

    Raises:
        ConfigError: no time is left to train, and no earlier start has made a step.
    """
    if not resumed:
        refuse_too_few_minutes(minutes, deadline, 0.0)
    reserved = scorer.rehearse(params)
    if not resumed:
        refuse_too_few_minutes(minutes, deadline, reserved)
    return reserved


def read_data(config: TrainConfig, pair: Pair) -> tuple[Dataset, list[Sample]]:
    """The samples to train on, and those held out.

    Raises:
        ConfigError: a file cannot be read, or its samples do not fit the target or the options.
    """
    with phase("reading samples") as now:
        samples = now.over(read_samples(config, Tokenizer.of(pair.folder), pair.target.vocab_size))
        dataset, held_out = Dataset.of(samples, config.max_length).split(config.eval_samples, config.seed)
        if config.eval_samples is None:
            now.say(
                f"holding out {len(held_out)} of {len(dataset) + len(held_out)} samples to measure the drafter with"
            )
    return dataset, held_out


def read_samples(config: TrainConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[Sample]:
    """All samples of the folders and files that `data` names, one after another.

    Raises:
        ConfigError: a file cannot be read, or a token id lies outside of the target's vocabulary.
    """
    for name in config.data:
        path = Path(name)
        samples = read_shards(path) if path.is_dir() else read_jsonl(path, tokenizer)
        for number, sample in enumerate(samples, start=1):
            # JAX clamps an index that lies outside of an array: unchecked, another token would be trained on.
            ids = (*sample.prompt_token_ids, *sample.token_ids)
            for extreme in (max(ids, default=0), min(ids, default=0)):
                if not 0 <= extreme < vocab_size:
                    raise ConfigError(
                        f"{path}, sample {number} holds token id {extreme} and the target's vocabulary has "
                        f"{vocab_size} tokens; give data that was tokenised for this target."
                    )
            yield sample


def run_steps(
    config: TrainConfig,
    stepper: Stepper,
    scorer: Scorer,
    batches: Batches,
    checkpoints: Checkpoints,
    state: TrainState,
    step: int,
    pace: Callable[[int], float],
    logs: Logs,
    now: Phase,
) -> TrainState:
    """Run steps from number `step` until `pace` says that the run is done, or `stop_at`; log, measure and save.

    The host is at most one step ahead of the devices: enough to keep them busy, and the clock that `pace` reads then
    tells when steps ran, not when they were enqueued.
    """
    progress, coming, before = pace(step + 1), batches.after(step), None
    while progress < 1 and step < (config.stop_at or math.inf):
        samples, batch = next(coming)
        state, measured = stepper(state, samples, batch, progress)
        if before is not None:
            jax.block_until_ready(before.loss)
        before = measured
        step += 1
        logs.advance(int(batch.lengths.sum()))
        done, progress = progress, pace(step + 1)
        last = progress >= 1 or step == config.stop_at
        if step % config.log_every == 0 or last:
            logs.train(step, measured, float(learning_rate(config, done)))
        try:
            score = scorer(step, state.params, logs, now, finished=progress >= 1)
        except Exception:  # what was learnt since the last checkpoint is worth more than its measure
            checkpoints.save(step, state, None)
            raise
        if score is not None or step % config.save_every == 0 or last:
            checkpoints.save(step, state, score)
        if score is not None and not last:
            progress = pace(step + 1)  # a run by the clock may have ended while it was measured
    return state


class Scorer:
    """Measures the acceptance length after those steps that ask for it, as it will be served.

    Args:
        config: options of the run.
        pair: target and drafter.
        held_out: samples to measure with; none measures nothing.
    """

    def __init__(self, config: TrainConfig, pair: Pair, held_out: list[Sample]):
        self._config, self._pair, self._held_out = config, pair, held_out
        self._evaluator = Evaluator(config, pair, held_out)
        self._folder = Path(config.out) / "training" / "evaluated"

    def rehearse(self, params: Params) -> float:
        """Compile what a measurement needs; returns the seconds to keep for the one at the end of a run."""
        if not self._held_out:
            return 0.0
        with phase("rehearsing the evaluation") as now:
            began = time.perf_counter()
            write_draft(self._folder, self._pair, params)
            written = time.perf_counter() - began
            measured = self._evaluator.rehearse(self._folder, now)
            shutil.rmtree(self._folder)
        return measured + 2 * written  # the engine reads what was written

    def __call__(self, step: int, params: Params, logs: Logs, now: Phase, *, finished: bool) -> float | None:
        """The acceptance length after a step; None after steps that are not measured."""
        every = self._config.eval_every
        if not self._held_out or not (finished or (every and step % every == 0)):
            return None
        write_draft(self._folder, self._pair, params)
        values = self._evaluator(self._folder, now)
        shutil.rmtree(self._folder)
        logs.eval(step, values)
        return values["acceptance_length"]


def _compiled(
    config: TrainConfig,
    pair: Pair,
    optimizer: optax.GradientTransformation,
    batches: Batches,
    state: TrainState,
    mesh: jax.sharding.Mesh,
) -> Stepper:
    """The compiled step as a function of state, samples, their batch and the share of the run that is done."""
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
