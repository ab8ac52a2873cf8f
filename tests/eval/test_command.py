"""The whole command once, with a pair that recites a text."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from dflash_jax.base.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dflash_jax.eval import plots, report
from dflash_jax.eval.__main__ import main
from dflash_jax.eval.acceptance import acceptance_of
from dflash_jax.eval.compare import Cell
from dflash_jax.eval.conversations import Answer, Run
from dflash_jax.eval.report import is_lossy
from tests.pairs import RECITER
from tests.phases import lines, phases

PAIR = ["--model", str(RECITER / "target"), "--draft-model", str(RECITER / "draft")]
RECITED = "You may reproduce and distribute copies of the"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Folder, standard output and standard error of a run."""
    folder = tmp_path_factory.mktemp("eval")
    prompts = [{"prompt": RECITED}, {"prompt": "7. Disclaimer of Warranty. Unless required by"}]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    options = ["--dataset", folder / "lines.jsonl", "--temperature", 0, 1, "--num-speculative-tokens", 15, "auto"]
    options += ["--max-tokens", 20, "--max-num-seqs", 1, "--max-model-len", 64, "--output", folder / "out" / "here"]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main(["acceptance", *PAIR, *map(str, options), "--no-compile-at-start"]) == 0
    return folder / "out" / "here", out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def folder(run_once):
    return run_once[0]


@pytest.fixture(scope="module")
def result(folder):
    return json.loads((folder / "results.json").read_text())


def test_the_result_says_how_it_came_about(result):
    assert result["command"].startswith("python -m dflash_jax.eval")
    assert set(result["versions"]) == {"dflash_jax", "jax", "python", "platform"}
    assert {"platform", "device", "num_devices", "cpu", "cpu_cores"} == set(result["hardware"])
    assert result["engine"]["dtype"] == "float32"
    assert (result["engine"]["max_num_seqs"], result["settings"]["seed"]) == (1, 0)
    assert result["model"] == str(RECITER / "target")


def test_progress_is_on_standard_error_and_results_are_on_standard_output(run_once):
    folder, out, err = run_once
    data = folder.parents[1] / "lines.jsonl"
    cells = {drafts: [f"{data} at temperature {t}, {drafts} drafts" for t in (0, 1)] for drafts in (15, "auto")}
    assert phases(err) == [
        *("importing modules", "finding the models", "loading the tokenizer", f"reading {data}"),
        *(
            what
            for drafts in (15, "auto")
            for what in (
                f"loading the models for {drafts} drafts",
                *(f"{does} {cell}" for cell in cells[drafts] for does in ("warming up for", "answering")),
            )
        ),
        "drawing plots",
    ]
    for cell in (*cells[15], *cells["auto"]):
        (last,) = (line for line in lines(err) if line.startswith(f"answering {cell}: 4 of 4"))
        assert ", with the drafter, in 0:00:" in last
    assert lines(out) == []
    assert out.lstrip().startswith("acceptance length")


def test_there_is_a_cell_for_each_combination(result):
    cells = [(cell["num_speculative_tokens"], cell["temperature"]) for cell in result["results"]]
    assert cells == [(15, 0), (15, 1), ("auto", 0), ("auto", 1)]


def test_figures_agree_with_the_requests(result):
    for cell in result["results"]:
        requests, acceptance, speed = cell["requests"], cell["acceptance"], cell["speed"]
        lengths = [length for request in requests for length in request["acceptance_lengths"]]
        assert acceptance["mean_acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert acceptance["num_tokens"] == speed["num_tokens"] == sum(r["completion_tokens"] for r in requests)
        assert sum(acceptance["rounds"]["histogram"]) == acceptance["rounds"]["num_drafts"] == len(lengths)
        assert speed["tokens_per_second"] == pytest.approx(speed["num_tokens"] / speed["seconds"])
        plain = cell["plain_speed"]["tokens_per_second"]
        assert cell["speedup"] == pytest.approx(speed["tokens_per_second"] / plain)
        assert all(request["text"] and request["finish_reason"] for request in requests)
    assert result["results"][0]["acceptance"]["mean_acceptance_length"] > 2  # the pair recites this text


def test_answers_are_those_without_the_drafter(result):
    assert [cell["lossless"] for cell in result["results"]] == [{"differing": 0, "compared": 2}] * 4
    assert result["is_lossless"]


def test_plots(folder):
    for name in ("acceptance_by_position.png", "acceptance_lengths.png", "speedup.png"):
        content = (folder / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 5000


def test_plots_of_several_data_sets_and_without_plain_decoding(result, tmp_path):
    cells = [{**cell, "dataset": name, "speedup": None} for name in "abcd" for cell in result["results"]]
    paths = plots.draw({"results": cells}, tmp_path)
    assert [path.name for path in paths] == ["acceptance_by_position.png", "acceptance_lengths.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_without_plots_matplotlib_is_not_asked_for(result, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "draw", None)
    assert report.finish(result, tmp_path, plots=False) == 0
    assert "results.json" in capsys.readouterr().out
    monkeypatch.setattr("dflash_jax.eval.command.find_spec", lambda _: None)
    absent = ["acceptance", "--dataset", "absent", "--output", str(tmp_path), *PAIR]
    assert main(absent) == 2
    assert "run pip install matplotlib, or add --no-plots." in capsys.readouterr().err
    assert main([*absent, "--no-plots"]) == 2
    assert "absent is neither" in capsys.readouterr().err


def run_that_says(token):
    completion = CompletionOutput(0, token_ids=[token], finish_reason="length")
    return Run([Answer("a", 0, RequestOutput("0", None, [1], [completion], True, RequestMetrics()))], 1.0, 0)


@pytest.mark.parametrize(
    ("temperature", "plain_token", "is_exact", "expected"),
    [(0, 5, True, False), (0, 6, True, True), (0, 6, False, False), (1, 6, True, False), (0, None, True, False)],
)
def test_only_greedy_float32_must_agree(temperature, plain_token, is_exact, expected):
    run = run_that_says(5)
    plain = None if plain_token is None else run_that_says(plain_token)
    cell = Cell("data", temperature, 15, run, plain, acceptance_of(run.outputs))
    assert is_lossy(cell, is_exact=is_exact) is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", str(RECITER / "target")], "give --draft-model"),
        ([*PAIR, "--num-prompts", "0"], "--num-prompts=0 must be at least 1"),
        ([*PAIR, "--max-tokens", "0"], "--max-tokens=0 must be at least 1"),
        ([*PAIR, "--seed", "-1"], "--seed=-1 must be at least 0"),
        ([*PAIR, "--temperature", "0", "0.0"], "--temperature names something twice"),
        ([*PAIR, "--output", __file__], "cannot be made"),
    ],
)
def test_bad_options_load_nothing(monkeypatch, capsys, tmp_path, options, message):
    monkeypatch.setattr("dflash_jax.loading.LLM", None)
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": RECITED}))
    common = ["--dataset", str(tmp_path / "lines.jsonl"), "--output", str(tmp_path / "out")]
    assert main(["acceptance", *common, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_block_length_is_a_number_or_auto(capsys):
    with pytest.raises(SystemExit):
        main(["acceptance", "--dataset", "humaneval", "--output", "x", "--num-speculative-tokens", "many"])
    assert "neither a number of drafts nor 'auto'" in capsys.readouterr().err
