"""Rounds of a tiny model through the whole command, and its parts: forced drafts, bytes, parts of a trace."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.base.errors import DFlashError
from dflash_jax.bench import round as command
from dflash_jax.bench import round_report
from dflash_jax.bench.__main__ import main
from dflash_jax.bench.round_engine import RoundEngine, decode, finish, keep_exactly, random_sequences
from dflash_jax.bench.round_models import configs_of, random_params
from dflash_jax.engine.device import budget
from dflash_jax.engine.device.model import Model
from dflash_jax.engine.engine import Engine
from dflash_jax.options import EngineArgs, EngineConfig
from dflash_jax.parallel.mesh import Mesh
from tests.bench.test_round_models import num_parameters
from tests.phases import lines, phases

BASELINE = [
    {"draft": "d", "kv": "float32", "batch": 4, "ctx": 24, "tp": 1, "decode_step_ms_median": 9.0, "ttft_max_s": 1.0},
    {"draft": "d", "kv": "float32", "batch": 1, "ctx": 24, "tp": 1, "decode_step_ms_median": 8.0, "ttft_max_s": 0.5},
    {"draft": None, "kv": "float32", "batch": 4, "ctx": 24, "tp": 1, "decode_step_ms_median": 7.0, "ttft_max_s": 1.0},
]
SMALL = {"--model": "tiny", "--page-size": 16, "--max-num-batched-tokens": 64}


def flags(options):
    return [str(part) for option in options.items() for part in option]


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Result, standard output and standard error of rounds of 3 drafts of which 2 are kept.

    Compiled without most XLA flags of the tests: with those emitters, traces name fewer operations.
    """
    folder = tmp_path_factory.mktemp("round")
    (folder / "baseline.json").write_text(json.dumps({"rows": BASELINE}))
    options = SMALL | {"--context": 24, "--output-len": 24, "--num-accepted-tokens": 2, "--trace-rounds": 2}
    options |= {"--baseline": folder / "baseline.json", "--output": folder / "out.json", "--draft-sliding-window": 8}
    options |= {"--kv-cache-memory-bytes": 1 << 20}
    arguments = ["round", *flags(options), "--batch-size", "1", "4", "--prefill"]
    command = [sys.executable, "-m", "dflash_jax.bench", *arguments]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads((folder / "out.json").read_text()), run.stdout, run.stderr


@pytest.fixture(scope="module")
def drafted(run_once):
    return run_once[0]


@pytest.mark.parametrize(("command", "needed"), [("round", False), ("offline", False), ("serve", True)])
def test_only_the_benchmark_of_a_server_needs_the_packages_of_its_client(command, needed):
    code = "import sys; sys.modules.update(dict.fromkeys(('httptools', 'uvloop')))  # as if they were not installed\n"
    code += f"from dflash_jax.bench.__main__ import parse_args; parse_args([{command!r}, '--help'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode != 0) == needed, run.stderr
    assert (f"usage: python -m dflash_jax.bench {command} " in run.stdout) != needed


def test_progress_is_on_standard_error_and_results_are_on_standard_output(run_once):
    _, out, err = run_once
    assert phases(err) == [
        *("importing modules", "starting the devices", "making random weights", "making the engine"),
        *("measuring 1 of 3, decode of 1 x 24", "measuring 2 of 3, decode of 4 x 24"),
        "measuring 3 of 3, prefill of 1 x 24",
    ]
    assert lines(out) == []
    assert out.startswith("DFlash x1 ctx 24 float32 tp1: ")


def test_every_round_emits_what_it_is_told(drafted):
    one, four, prefill = drafted["rows"]
    assert [(r["kind"], r["batch_size"]) for r in (one, four, prefill)] == [
        ("decode", 1),
        ("decode", 4),
        ("prefill", 1),
    ]
    for row in (one, four):
        assert row["tokens_per_round"] == [3]
        assert row["rounds"] == 24 / 3 - 3  # without the warm-up
        assert (row["compiles"], row["preemptions"]) == (0, 0)
        times = row["step_ms"]
        assert 0 < times["p10"] <= times["median"] <= times["p90"]
    assert set(prefill["prefill_ms"]) == {"median", "p10", "p90"}


def test_baseline_stands_beside_its_cell(drafted):
    assert [row["baseline"]["decode_step_ms_median"] for row in drafted["rows"]] == [8.0, 9.0, 8.0]


def test_trace_accounts_for_the_parts(drafted):
    for row in drafted["rows"][:2]:
        parts = row["trace"]["parts_ms"]
        assert {"draft", "draft_context", "verify_gemm", "verify_attention", "head", "sampling"} <= set(parts)
        assert not {"prefill", "other"} & set(parts)
        assert sum(parts.values()) > 0.999 * row["trace"]["busy_ms"] > 0
        assert {kernel["calls"] % 0.5 for kernel in row["trace"]["kernels"]} == {0}  # in two complete rounds


def test_bytes_that_a_round_reads(drafted):
    target, draft = configs_of("tiny", None)
    head = 4 * target.vocab_size * target.hidden_size
    drafter = 4 * num_parameters(draft)
    read = {name: round(1e9 * size) for name, size in drafted["rows"][1]["read_gb"].items()}
    assert read["target"] == 4 * num_parameters(target) - head  # a round reads a few rows of the embedding
    assert (read["draft"], read["draft_head"]) == (drafter, head)
    # 24 tokens, the first one behind them, 3 rounds of warm-up and one in flight; then 5 rounds
    context = 24 + 1 + 3 * 3 + 5 * 3 / 2
    of_layer = 4 * 2 * target.num_key_value_heads * target.head_dim
    assert read["kv"] == 4 * of_layer * (4 * context + context + 8)  # one drafter layer sees 8 tokens, the other all
    assert read["total"] == sum(read[name] for name in ("target", "draft", "draft_head", "kv"))
    page_bytes = 5 * of_layer  # of a token, beside the sliding layer's
    assert 0.8 < drafted["rows"][0]["kv_tokens"] * page_bytes / (1 << 20) < 1


def test_a_drafter_in_fp8_reads_fewer_bytes(tmp_path, capsys):
    options = SMALL | {"--context": 24, "--output-len": 6, "--num-accepted-tokens": 2, "--warmup-rounds": 1}
    options |= {"--output": tmp_path / "out.json", "--kv-cache-memory-bytes": 1 << 20, "--draft-quantization": "fp8"}
    options["--target-quantization"] = "int4"
    assert main(["round", *flags(options), "--no-trace"]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["draft_quantization"], row["target_quantization"]) == ("fp8", "int4")
    assert "DFlash x1 ctx 24 float32 tp1, int4 target, fp8 drafter: " in capsys.readouterr().out
    target, draft = configs_of("tiny", None)
    read = {name: round(1e9 * size) for name, size in row["read_gb"].items()}
    matrices = target.num_hidden_layers * 64 * (64 + 2 * 32 + 64 + 3 * 128)  # 64 rows of queries, 32 of keys and values
    scales = target.num_hidden_layers * (64 + 2 * 32 + 64 + 2 * 128 + 64)  # one of 2 bytes a row
    widened = 4 * (num_parameters(target) - target.vocab_size * target.hidden_size)  # the embedding is not read
    assert read["target"] == widened - 4 * matrices + matrices // 2 + 2 * scales
    assert read["draft_head"] == target.vocab_size * (target.hidden_size + 4)  # a byte a weight, a scale a row
    # In two layers, five projections are stored in fewer bytes: their rows have scales, and norms are what they were.
    heads, layers = draft.head_dim * (draft.num_attention_heads + 2 * draft.num_key_value_heads), 2
    rows = layers * (heads + 2 * draft.hidden_size + 2 * draft.intermediate_size) + draft.hidden_size
    norms = 2 * draft.hidden_size + layers * 2 * (draft.hidden_size + draft.head_dim)
    assert read["draft"] == num_parameters(draft) - norms + 4 * (rows + norms)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_plain_decoding_sharded_and_a_cell_that_does_not_fit(tmp_path, capsys):
    options = SMALL | {"--output-len": 8, "--output": tmp_path / "out.json", "--kv-cache-dtype": "fp8"}
    options |= {"--tensor-parallel-size": 4, "--kv-cache-memory-bytes": 150_000}
    cells = ["--batch-size", "2", "--context", "16", "200", "--plain", "--no-trace"]
    assert main(["round", *flags(options), *cells]) == 1
    fits, too_long = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (fits["tokens_per_round"], fits["compiles"], fits["trace"]) == ([1], 0, None)
    assert (fits["speculation"], fits["kv_cache_dtype"], fits["tensor_parallel_size"]) == (False, "float8_e4m3fn", 4)
    assert set(fits["read_gb"]) == {"target", "kv", "total"}
    quarter = 4 * (num_parameters(configs_of("tiny", None)[0]) - 512 * 64) / 4
    assert quarter < 1e9 * fits["read_gb"]["target"] < 1.2 * quarter  # two kv heads are four on four devices
    assert "1 of 2 sequences found no pages" in too_long["failed"]
    assert "not measured: 1 of 2 sequences" in capsys.readouterr().out


def engine_of(kind, number, **options):
    target, draft = configs_of("tiny", None)
    args = EngineArgs(max_num_seqs=number, max_model_len=128, page_size=16, num_speculative_tokens=3, **options)
    config, mesh = EngineConfig.of(args, target, draft), Mesh.of(1)
    models = [Model(model, random_params(model, config.dtype, mesh, seed=1), None) for model in (target, draft)]
    return kind(*models, mesh=mesh, config=config)


@pytest.mark.long
def test_keeping_no_draft_is_greedy_decoding():
    """Shows that the forced state is right: anchors, lengths, and what the host reads."""
    forced, free = engine_of(RoundEngine, 2), engine_of(Engine, 2)
    forced.keep(0)
    outputs = []
    for engine in (forced, free):
        sequences = random_sequences(2, 20, 12, 512)
        for _ in engine.run(sequences):
            pass
        outputs.append([s.output.token_ids for s in sequences])
        if engine is forced:
            assert {n for s in sequences for n in s.acceptance_lengths} == {1}
    assert outputs[0] == outputs[1]


def test_rounds_begin_together_and_keep_their_place():
    engine = engine_of(RoundEngine, 3, max_num_batched_tokens=16)  # prompts of several chunks, one after another
    engine.keep(2)
    sequences = random_sequences(3, 40, 64, 512)
    rounds = decode(engine, sequences, warmup=1, rounds=4)
    assert (rounds.kept, rounds.num_tokens, rounds.compiles) == ((3,), 3 * 4 * 3, 0)
    assert {len(s.output.token_ids) for s in sequences} == {1 + 5 * 3}
    ahead = 3  # one round is in flight
    assert engine.runner.slots.length.tolist() == [40 + 5 * 3 + ahead] * 3
    finish(engine, sequences)
    engine.scheduler.check_integrity()


def test_a_failed_step_is_told_as_such():
    engine = engine_of(RoundEngine, 2)
    sequences = random_sequences(2, 20, 12, 512)
    engine._commit = None  # makes the step fail
    with pytest.raises(DFlashError, match="a step failed"):
        decode(engine, sequences, warmup=1, rounds=1)


def test_sampled_cells(tmp_path, capsys, monkeypatch):
    measured = []

    def decode_and_keep(engine, sequences, **counts):
        rounds = decode(engine, sequences, **counts)
        measured.append([s.output.token_ids for s in sequences])
        return rounds

    monkeypatch.setattr(command, "decode", decode_and_keep)
    options = SMALL | {"--context": 24, "--output-len": 12, "--num-accepted-tokens": 2, "--warmup-rounds": 1}
    options |= {"--output": tmp_path / "out.json", "--kv-cache-memory-bytes": 1 << 20}
    assert main(["round", *flags(options), "--temperature", "0", "1", "0", "--no-trace"]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["temperature"] for row in rows] == [0, 1, 0]
    assert "DFlash x1 ctx 24 float32 tp1, temperature 1: " in capsys.readouterr().out
    greedy, sampled, again = measured
    assert greedy == again != sampled
    assert round_report.beside(rows[1], BASELINE[1:2]) is None  # whose figures are of greedy rounds


def test_keep_exactly():
    tokens, drafts = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]]), jnp.array([[1, 2, 3], [0, 0, 0]])
    assert keep_exactly(tokens, drafts, count=2).tolist() == [2, 2]
    assert keep_exactly(tokens, drafts[:, :1], count=2).tolist() == [1, 1]
    assert keep_exactly(tokens, drafts[:, :0], count=2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model qwen3-9b", ["qwen3-9b", "qwen3-8b"]),
        ("--model tiny --num-accepted-tokens 4", ["--num-accepted-tokens 4", "from 0 to 3"]),
        ("--model tiny --num-speculative-tokens 2 --num-accepted-tokens 3", ["from 0 to 2"]),
        ("--model tiny --num-speculative-tokens 5 --num-accepted-tokens 1", ["num_speculative_tokens=5", "1 to 3"]),
        ("--model tiny --num-accepted-tokens 2 --output-len 9", ["--output-len 9", "3 rounds"]),
        ("--model tiny --plain --num-speculative-tokens 2", ["--plain"]),
        ("--model tiny --num-accepted-tokens 1 --batch-size 0", ["--batch-size", "at least 1"]),
        ("--model tiny --num-accepted-tokens 1 --tensor-parallel-size 64", ["tensor_parallel_size=64"]),
        ("--model tiny --draft-model x --draft-sliding-window 4", ["--draft-sliding-window 4", "--draft-model"]),
        ("--model tiny --baseline /no/file", ["--baseline /no/file"]),
        ("--model tiny --output /no/folder/x", ["--output /no/folder/x"]),
    ],
)
def test_bad_options(capsys, arguments, words):
    assert main(["round", *arguments.split()]) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert len(before) == len(lines("\n".join(before)))  # only lines of progress
    assert error.startswith("error: ")
    assert all(word in error for word in words), error


def test_weights_that_the_machine_cannot_hold_are_not_made(monkeypatch, capsys):
    monkeypatch.setattr(command, "random_params", None)
    monkeypatch.setattr(budget, "machine_bytes", lambda: 24_700_000_000)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert main(["round", "--model", "qwen3-8b", "--plain", "--dtype", "float32"]) == 2
    assert capsys.readouterr().err.endswith(
        "error: the parameters of qwen3-8b take 32.8 GB in float32 and this machine has 24.7 GB of memory; give "
        "--dtype bfloat16, a smaller model or a GPU.\n"
    )
    assert main(["round", "--model", "qwen3-14b"]) == 2
    assert " and its drafter take " in (error := capsys.readouterr().err)
    assert error.endswith("; give a smaller model or a GPU.\n")


def test_baseline_without_its_fields(tmp_path):
    (tmp_path / "b.json").write_text('{"rows": [{"kv": "bf16"}]}')
    with pytest.raises(command.ConfigError, match="batch, ctx, decode_step_ms_median"):
        round_report.load_baseline(tmp_path / "b.json")


def test_what_does_not_follow_the_protocol_is_a_problem():
    args = SimpleNamespace(num_accepted_tokens=5)
    row = {"kind": "decode", "speculation": True, "tokens_per_round": [6], "compiles": 0, "preemptions": 0}
    assert command._problems(row, args) == []
    assert "[2, 6]" in command._problems(row | {"tokens_per_round": [2, 6]}, args)[0]
    assert "1 programs compiled" in command._problems(row | {"compiles": 1}, args)[0]
    assert command._problems(row | {"speculation": False, "tokens_per_round": [1]}, args) == []
