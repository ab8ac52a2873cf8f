"""A run from flags to a folder that the engine loads: it learns, resumes bit for bit, and survives kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax import LLM, ConfigError, SamplingParams, frontend
from dflash_jax.train import loop, pace
from dflash_jax.train.checkpoints import Checkpoints
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data.shards import Sample
from dflash_jax.train.dataset import Batches, Dataset
from dflash_jax.train.evaluation import BEGINNING, engine_params, prompt_of
from dflash_jax.train.features import FeatureCache, checksum
from dflash_jax.train.logs import Logs
from dflash_jax.train.loop import train
from dflash_jax.train.pace import make_pace
from dflash_jax.train.pair import load_pair, write_draft
from dflash_jax.train.state import init_state, learning_rate, make_mesh, make_optimizer
from tests.phases import phases

TARGET = Path(__file__).parents[1] / "pair" / "target"
PROMPTS = ("7. Disclaimer of Warranty. Unless required by", "You may reproduce and distribute copies of the")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The target's answers to two prompts, as a JSONL file."""
    llm = LLM(TARGET)
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=48))
    pairs = zip(PROMPTS, outputs, strict=True)
    lines = [json.dumps({"prompt": prompt, "response": output.outputs[0].text}) for prompt, output in pairs]
    path.write_text("\n".join(lines * 6))
    return path


def config_of(data, out, **options) -> TrainConfig:
    defaults = {
        "num_hidden_layers": 2,
        "sliding_window": 32,
        "block_size": 8,
        "target_layer_ids": (1, 2),
        "num_anchors": 16,
        "max_length": 64,
        "batch_tokens": 256,
        "epochs": 2,
        "learning_rate": 3e-3,
        "dtype": "float32",
        "eval_samples": 0,
        "log_every": 1,
    }
    return TrainConfig(target=str(TARGET), data=(str(data),), out=str(out), **(defaults | options))


def code_of(config: TrainConfig) -> str:
    """The code of a program that trains."""
    return f"from dflash_jax.train.loop import TrainConfig, train; train({config!r})"


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in log_of(folder) if line["kind"] == "train"]


def newest(config: TrainConfig):
    """The newest checkpoint, as a list of host arrays."""
    mesh = make_mesh(config)
    checkpoints = Checkpoints(Path(config.out) / "training" / "checkpoints")
    draft = load_pair(config, mesh).draft
    like = init_state(draft, make_optimizer(config, draft), mesh, 1)
    state = checkpoints.restore(checkpoints.latest, like)
    checkpoints.close()
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_it_learns_its_data_by_heart(data, tmp_path):
    config = config_of(data, tmp_path / "draft", epochs=30, eval_samples=1, eval_max_tokens=32, eval_every=0)
    folder = train(config)
    lines = log_of(folder)
    assert lines[-2]["step"] >= 90
    llm = LLM(TARGET, folder, num_speculative_tokens=7, max_num_seqs=1)
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=41))
    lengths = [length for output in outputs for length in output.metrics.acceptance_lengths]
    assert np.mean(lengths) >= 0.9 * 8
    assert lines[-1]["kind"] == "eval"
    assert lines[-1]["acceptance_length"] == pytest.approx(np.mean(lengths), rel=0.2)
    assert list((folder / "training").glob("events.*"))


def test_sequences_may_be_shorter_than_the_anchors_asked_for(data, tmp_path):
    config = config_of(data, tmp_path / "draft", num_anchors=512, epochs=1)  # sequences have at most 64 tokens
    assert weights(train(config))


def test_samples_held_out_by_default_are_a_tenth_of_a_small_data_set(data, tmp_path, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(loop, "Evaluator", lambda config, folder, samples: measured.append(samples) or zero_length)
    train(config_of(data, tmp_path / "draft", eval_samples=None))  # the file has 12 samples
    assert [len(samples) for samples in measured] == [1]
    assert "holding out 1 of 12 samples" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match="eval_samples=12 leaves nothing of 12 samples to train on; give less than 12"
    ):
        train(config_of(data, tmp_path / "other", eval_samples=12))


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("token", [256, -1, 2**70])
def test_token_ids_outside_of_the_vocabulary_are_refused(tmp_path, monkeypatch, kind, token):
    if kind == "file" and token >= 0:
        (tmp_path / "data").write_text(json.dumps({"prompt_token_ids": [255], "token_ids": [0, token]}))
    else:
        (tmp_path / "data").mkdir()
        monkeypatch.setattr(loop, "read_shards", lambda path: iter([Sample((255,), (0, token))]))
    samples = loop.read_samples(config_of(tmp_path / "data", "out"), None, vocab_size=256)
    with pytest.raises(ConfigError, match=f"data, sample 1 holds token id {token} and .* vocabulary has 256 tokens"):
        list(samples)


@pytest.mark.parametrize(("samples", "held_out"), [(1, 0), (9, 0), (10, 1), (639, 63), (640, 64), (5000, 64)])
def test_at_most_64_samples_are_held_out_by_default(samples, held_out):
    dataset, out = Dataset.of([Sample((), (1, 2))] * samples, 8).split(None, seed=0)
    assert (len(dataset), len(out)) == (samples - held_out, held_out)


def zero_length(folder, now):
    return {"acceptance_length": 1.0}


def test_a_text_without_a_prompt_is_completed_from_its_beginning():
    assert prompt_of(Sample((1, 2), (3,))) == {"prompt_token_ids": [1, 2]}
    assert prompt_of(Sample((), tuple(range(99)))) == {"prompt_token_ids": list(range(BEGINNING))}


def test_a_run_that_goes_on_is_the_same_bit_for_bit(data, tmp_path):
    uninterrupted, parts = config_of(data, tmp_path / "whole"), config_of(data, tmp_path / "parts")
    train(uninterrupted)
    train(config_of(data, tmp_path / "parts", stop_at=3))
    halfway = weights(tmp_path / "parts")
    train(parts)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts") != halfway
    for mine, true in zip(newest(parts), newest(uninterrupted), strict=True):
        np.testing.assert_array_equal(mine, true)
    with pytest.raises(ConfigError, match=r"learning_rate=0\.003, not 0\.1"):
        train(config_of(data, tmp_path / "parts", learning_rate=0.1))
    with pytest.raises(ConfigError, match="eval_samples=0, not 1"):  # a sample that was trained on would be held out
        train(config_of(data, tmp_path / "parts", eval_samples=1))


def test_a_run_may_end_by_the_clock(data, tmp_path, monkeypatch):
    """The clock advances a second each time it is read; the learning rate falls with it."""
    ticks = count()
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    config = config_of(data, tmp_path / "draft", minutes=0.2, warmup_ratio=0.0)
    train(config)
    log = log_of(tmp_path / "draft")
    began, ended = 3, 12  # the first look makes the deadline, the fourth begins the pace
    shares = [n / (ended - began) for n in range(1, ended - began)]
    assert len(log) == len(shares)
    expected = [float(learning_rate(config, share)) for share in shares]
    assert [line["learning_rate"] for line in log] == pytest.approx(expected)
    written = weights(tmp_path / "draft")
    train(config_of(data, tmp_path / "draft", minutes=1e-3, warmup_ratio=0.0))  # a resumed run may have other minutes
    assert weights(tmp_path / "draft") == written


class TimedEvaluator:
    """An evaluator that only advances the clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def rehearse(self, folder, now):
        return self.seconds

    def __call__(self, folder, now):
        self.clock[0] += self.seconds
        self.calls += 1
        return {"acceptance_length": 1.0}


@pytest.mark.parametrize("eval_every", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_minutes_cover_the_evaluation_at_the_end(data, tmp_path, monkeypatch, eval_every):
    """In a run of 60 seconds a step takes two and an evaluation seven."""
    clock = [0.0]
    evaluator = TimedEvaluator(clock, 7.0)
    monkeypatch.setattr(loop, "Evaluator", lambda *args: evaluator)
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    advance = Logs.advance

    def step_takes_time(logs, tokens):
        clock[0] += 2.0
        advance(logs, tokens)

    monkeypatch.setattr(Logs, "advance", step_takes_time)
    train(config_of(data, tmp_path / "draft", minutes=1, eval_samples=1, eval_every=eval_every))
    assert evaluator.calls >= 1
    assert 60 - 7 - 2 < clock[0] <= 60 + 2  # the step that was running when time was up is finished


def test_too_few_minutes_are_refused_before_the_first_step(data, tmp_path):
    with pytest.raises(ConfigError, match=r"minutes=0.001 leaves no time to train: loading and compilation took 0\.\d"):
        train(config_of(data, tmp_path / "draft", minutes=1e-3))
    with pytest.raises(ConfigError, match=r"minutes=5 leaves no time to train: loading and compilation took [5-9]"):
        train(config_of(data, tmp_path / "draft", minutes=5), began=time.monotonic() - 301)  # imports count


def test_time_goes_on_where_an_earlier_start_ended(monkeypatch):
    clock = iter([5.0, 5.0, 6.0, 9.0])
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    done = make_pace(None, 9.0, 0.6)
    assert [done(step) for step in (8, 9, 10)] == pytest.approx([0.6, 0.7, 1.0])
    assert [make_pace(4, None, 0.0)(step) for step in (1, 3, 5)] == [0, 0.5, 1]


def test_the_learning_rate_rises_falls_and_ends():
    config = config_of("data", "out", learning_rate=2.0, warmup_ratio=0.25, min_learning_rate=0.1)
    rates = [float(learning_rate(config, share)) for share in (0, 0.125, 0.25, 0.625, 1)]
    assert rates == pytest.approx([0, 1, 2, 0.1 * 2 + 0.9, 0.2])


def test_kill_in_the_middle_of_a_save_loses_nothing(data, tmp_path):
    out = tmp_path / "draft"
    flags = config_of(data, out, epochs=200, save_every=1, log_every=1000)
    folder = out / "training" / "checkpoints"
    with subprocess.Popen([sys.executable, "-c", code_of(flags)], env=os.environ | {"JAX_PLATFORMS": "cpu"}) as process:
        saved: set[int] = set()
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            names = [path.name for path in folder.glob("*")] if folder.exists() else []
            saved = {int(name) for name in names if name.isdigit()}
            if len(saved) >= 2 and any("tmp" in name for name in names):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait() == -signal.SIGKILL
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest is not None
    assert checkpoints.latest >= max(saved)
    checkpoints.close()
    assert all(np.isfinite(array).all() for array in newest(flags))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2)], ids=["dp4", "dp2-tp2"])
def test_several_devices_learn_the_same_and_measure_it(data, tmp_path, sizes, capsys):
    options = {"stop_at": 2, "eval_samples": 1, "eval_max_tokens": 16, "eval_every": 1}
    alone = config_of(data, tmp_path / "one", **options)
    split = config_of(data, tmp_path / "many", **options, data_parallel_size=sizes[0], tensor_parallel_size=sizes[1])
    train(alone)
    assert phases(capsys.readouterr().err) == [
        *("starting the devices", "finding the models", "loading the models", "reading samples"),
        *("making the drafter", "compiling the step", "training steps", "loading the drafter into the engine"),
        *("measuring with the engine", "step 1", "step 2", "writing the drafter"),
    ]
    train(split)
    shown = capsys.readouterr()
    assert "training steps: 2 of " in shown.err
    assert shown.out == ""
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "many"), rtol=1e-5)
    assert [line["kind"] for line in log_of(tmp_path / "many")] == ["train", "eval"] * 2


def test_a_measure_that_fails_costs_nothing_that_was_learnt(data, tmp_path, monkeypatch):
    def fail(folder, now):
        raise RuntimeError("no memory for an engine")

    monkeypatch.setattr(loop, "Evaluator", lambda *args: fail)
    with pytest.raises(RuntimeError, match="no memory"):
        train(config_of(data, tmp_path / "draft", eval_samples=1))
    log = log_of(tmp_path / "draft")
    with contextlib.closing(Checkpoints(tmp_path / "draft" / "training" / "checkpoints")) as checkpoints:
        assert checkpoints.latest == log[-1]["step"] > 2
    monkeypatch.setattr(loop, "Evaluator", lambda *args: lambda folder, now: {"acceptance_length": 1.0})
    for name in ("draft", "whole"):
        train(config_of(data, tmp_path / name, eval_samples=1))
    assert weights(tmp_path / "draft") == weights(tmp_path / "whole")


def test_the_measuring_engine_shares_the_target_with_training(tmp_path):
    config = config_of("data", tmp_path, tensor_parallel_size=2)
    pair = load_pair(config, make_mesh(config))
    shared = engine_params(pair.params, pair.target, 2)
    assert jax.tree.map(addresses, shared) == jax.tree.map(addresses, pair.params)
    write_draft(tmp_path / "draft", pair, init_state(pair.draft, optax.identity(), make_mesh(config), 0).params)
    options = {"dtype": "float32", "tensor_parallel_size": 2, "max_model_len": 64, "max_num_seqs": 2}
    outputs = [
        LLM(TARGET, tmp_path / "draft", target_params=params, **options).generate(
            PROMPTS[0], SamplingParams(temperature=0, max_tokens=16)
        )
        for params in (shared, None)
    ]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids
    config = config_of("data", tmp_path)
    assert engine_params(pair.params, pair.target, 1) is None  # the engine of a CPU transposes its projections


def addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.long
def test_an_evaluation_reads_the_target_from_no_file(data, tmp_path, monkeypatch):
    folders, read = [], frontend.load_params
    monkeypatch.setattr(frontend, "load_params", lambda *args, **kw: folders.append(args[0]) or read(*args, **kw))
    train(config_of(data, tmp_path / "draft", tensor_parallel_size=2, stop_at=1, eval_every=1, eval_samples=1))
    assert folders == [tmp_path / "draft" / "training" / "evaluated"]


def test_kept_features_of_another_target_are_computed_again(tmp_path):
    """A weight of one layer differs; fine-tuning often leaves the embedding unchanged."""
    config = config_of("data", tmp_path)
    pair = load_pair(config, make_mesh(config))
    batches = Batches(Dataset.of([Sample((1, 2), (3, 4, 5))], 64), 64, 256, 1, 16, 0)
    changed = jax.tree.map(lambda array: array, pair.params)
    layer = changed["layers_1"]["mlp"]
    layer["down_proj"] = layer["down_proj"].at[-1, -1].add(2**-6)
    kept = [FeatureCache.of(tmp_path, pair.target, params, (2,), batches).rows for params in (pair.params, changed)]
    assert len(list(tmp_path.glob("*.bin"))) == 2
    assert not np.array_equal(*kept)
    again = FeatureCache.of(tmp_path, pair.target, changed, (2,), batches).rows
    np.testing.assert_array_equal(again, kept[1])
    assert len(list(tmp_path.glob("*.bin"))) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checksum_sees_every_bit_and_the_order(dtype):
    array = jax.random.normal(jax.random.key(0), (3, 5, 7)).astype(dtype)
    seen = {tuple(checksum(array).tolist())}
    for index in np.ndindex(array.shape):
        seen.add(tuple(checksum(array.at[index].multiply(1 + 2**-7)).tolist()))
    for axis in range(3):
        seen.add(tuple(checksum(jnp.flip(array, axis)).tolist()))
    assert len(seen) == 1 + array.size + 3
    mesh = jax.make_mesh((3,), ("tp",), devices=jax.devices()[:3])
    split = jax.device_put(array, jax.NamedSharding(mesh, jax.P("tp")))
    assert checksum(split).tolist() == checksum(array).tolist()


@pytest.mark.long
def test_kept_features_are_as_good_as_computed_ones(data, tmp_path):
    """Bit for bit, with the XLA flags of users: with those of the tests each program rounds differently."""
    kept = {"feature_cache": str(tmp_path / "features")}
    ways = {"computed": {}, "kept": kept, "kept again": kept}
    code = "\n".join(code_of(config_of(data, tmp_path / name, **options)) for name, options in ways.items())
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"XLA_FLAGS": ""}, check=True)
    assert weights(tmp_path / "computed") == weights(tmp_path / "kept") == weights(tmp_path / "kept again")
    assert len(list((tmp_path / "features").glob("*.bin"))) == 1
