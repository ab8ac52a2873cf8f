"""The whole command once; its result has the form of that of `bench serve`."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import jax.numpy as jnp
import pytest

from dflash_jax import LLM
from dflash_jax.bench.__main__ import main
from tests.bench.test_serve import KEYS
from tests.pairs import DRAFT, HYBRID, RECITER, greedy, prompt, tokens_of, write_model
from tests.phases import lines, phases


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Result, standard output and standard error of a run."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = [
        {"prompt": "You may reproduce and distribute copies of the", "output_tokens": 24},
        {
            "messages": [{"role": "user", "content": "7. Disclaimer of Warranty. Unless required by"}],
            "output_tokens": 9,
        },
        {"prompt": [70, 80, 90], "output_tokens": 1},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    path, output = folder / "prompts.jsonl", folder / "result.json"
    engine = {"--max-num-seqs": 2, "--max-model-len": 128, "--num-speculative-tokens": 15, "--num-warmups": 1}
    model = {"--model": RECITER / "target", "--draft-model": RECITER / "draft"}
    options = model | engine | {"--dataset-name": "jsonl", "--dataset-path": path, "--output": output}
    flags = ["--no-compile-at-start", "--ignore-eos", "--save-detailed"]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main(["offline", *flags, *(str(part) for pair in options.items() for part in pair)]) == 0
    return json.loads((folder / "result.json").read_text()), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def result(run_once):
    return run_once[0]


def test_progress_is_on_standard_error_and_results_are_on_standard_output(run_once):
    _, out, err = run_once
    loading = ["importing modules", "making the workload", "finding the models", "loading the models"]
    assert phases(err) == [*loading, "warming up", "measuring"]
    assert "measuring: 3 of 3, in 0:00:" in "\n".join(lines(err))
    assert lines(out) == []
    assert out.lstrip().startswith("bench offline")


def test_the_shape_is_that_of_serve(result):
    assert set(result) == KEYS | {"requests"}
    assert (result["command"], result["server"], result["generator"]) == ("offline", None, None)
    assert result["settings"]["max_num_seqs"] == 2


def test_tokens_are_exact(result):
    assert (result["completed"], result["failed"], result["num_ended_early"]) == (3, 0, 0)
    assert [r["completion_tokens"] for r in result["requests"]] == [24, 9, 1]  # in the order of the file
    assert [sum(tokens for _, tokens in r["arrivals"]) for r in result["requests"]] == [24, 9, 1]
    assert result["total_output_tokens"] == 34


def test_acceptance_accounts_for_every_token(result):
    acceptance = result["acceptance"]
    assert acceptance["source"] == "engine"
    # the first token of each answer belongs to no round
    assert acceptance["num_drafts"] + acceptance["num_accepted_tokens"] == 34 - 3
    assert sum(acceptance["histogram"]) == acceptance["num_drafts"]
    assert acceptance["num_accepted_tokens"] <= acceptance["num_draft_tokens"]
    assert acceptance["mean_acceptance_length"] > 2  # the pair recites the licence


@pytest.mark.long
def test_a_hybrid_with_fp8_keys_of_256(tmp_path, capsys):
    """As the heads of Qwen3.5 are; its answers over fp8 do not depend on the drafter."""
    small = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 256}
    layers = {"head_dim": 256, "layer_types": ["linear_attention", "full_attention"]}
    target = write_model(tmp_path / "target", HYBRID | {"text_config": HYBRID["text_config"] | small | layers}, 0)
    taps = {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 60}, "num_target_layers": 2}
    models = target, write_model(tmp_path / "draft", DRAFT | small | taps | {"num_hidden_layers": 1}, 1)
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}
    drafting, plain = LLM(*models, num_speculative_tokens=5, **options), LLM(target, **options)
    keys = drafting.engine.runner.caches.target.keys
    assert [(pool.dtype, pool.shape[-1]) for pool in keys] == [(jnp.float8_e4m3fn, 256)]
    texts = [prompt(*(7 * i % 59 for i in range(length))) for length in (40, 5)]
    answers = tokens_of(drafting.generate(texts, greedy(20)))
    assert answers == tokens_of(plain.generate(texts, greedy(20)))
    assert tokens_of(drafting.generate(texts, greedy(20))) == answers  # the first prompt's snapshot restored

    requests = [{"prompt": text["prompt_token_ids"], "output_tokens": 20} for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, requests)))
    flags = {"--model": models[0], "--draft-model": models[1], "--num-speculative-tokens": 5, "--num-warmups": 0}
    flags |= {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    flags |= {
        "--dataset-name": "jsonl",
        "--dataset-path": tmp_path / "prompts.jsonl",
        "--output": tmp_path / "out.json",
    }
    words = [str(part) for pair in flags.items() for part in pair]
    assert main(["offline", "--no-compile-at-start", "--ignore-eos", *words]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (2, 40)
    assert result["settings"]["kv_cache_dtype"] == "fp8_e4m3"
    capsys.readouterr()


def test_bad_options(capsys):
    assert main(["offline", "--model", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err
