"""`python -m dflash_jax.generate` as a process: what it prints, and how it refuses."""

import subprocess
import sys

import pytest

from dflash_jax import generate
from tests.pairs import GOLDEN, golden_cases
from tests.phases import phases


def run_command(*arguments):
    command = [sys.executable, "-m", "dflash_jax.generate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_prints_tokens_and_statistics():
    pair, case = GOLDEN / "qwen3_swa_tied", golden_cases("qwen3_swa_tied")[0]
    ids = ",".join(map(str, case["input_ids"]))
    done = run_command(
        *(
            "--model",
            pair / "target",
            "--draft-model",
            pair / "draft",
            "--dtype",
            "float32",
            "--num-speculative-tokens",
            15,
        ),
        *("--prompt-token-ids", ids, "--max-tokens", 80, "--ignore-eos"),
    )
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == case["output_ids"]
    assert "mean acceptance length 15.80 tokens over 5 rounds" in done.stderr
    assert [line.split()[-1] for line in done.stderr.splitlines()[-16:]] == ["0"] * 14 + ["1", "4"]
    assert done.stderr.splitlines()[-1].split() == ["16", "#" * 40, "4"]


def test_command_has_nothing_to_compare_a_target_alone_with():
    done = run_command("--compare", "--model", GOLDEN / "qwen3_swa_tied" / "target", "--prompt-token-ids", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--draft-model" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--prompt-token-ids", "1,a"], "'1,a' is not a list"), (["--prompt-token-ids", "1", "--chat"], "--chat")],
)
def test_command_refuses_bad_arguments(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        generate.main(arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "2"], "top_p=2.0"),
    ],
)
def test_sampling_parameters_are_checked_before_models_are_loaded(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(generate, "load", None)
    assert generate.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_command_reports_errors_in_one_line(tmp_path):
    done = run_command("--model", tmp_path)
    assert done.returncode == 2
    *_, error = done.stderr.splitlines()
    assert phases(done.stderr.removesuffix(f"{error}\n")) == ["finding the models", "loading the models"]
    assert error.startswith("error: ")
