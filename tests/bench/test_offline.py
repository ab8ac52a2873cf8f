"""The whole command once; its result has the form of that of `bench serve`."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from dflash_jax.bench.__main__ import main
from tests.bench.test_serve import KEYS
from tests.pairs import RECITER
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


def test_bad_options(capsys):
    assert main(["offline", "--model", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err
