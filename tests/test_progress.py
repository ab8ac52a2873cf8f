"""Progress on standard error: before anything heavy is imported, in order, and never where results go."""

import io
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from dflash_jax import progress
from dflash_jax.progress import announce, importing, phase
from tests.phases import lines, phases

ROOT = Path(__file__).parent.parent
COMMANDS = ["bench offline", "bench round", "bench serve", "eval acceptance", "train", "train.data"]
# Runs a command until it first writes to standard error; tells what it wrote, and whether JAX was imported by then.
FIRST_WRITE = """
import io, os, runpy, sys

class Stream(io.StringIO):
    def write(self, text):
        os.write(1, f"{text.strip()}|{'jax' in sys.modules}".encode())
        os._exit(0)

sys.stderr = Stream()
runpy.run_module(f"dflash_jax.{sys.argv[1]}", run_name="__main__", alter_sys=True)
"""


class Tty(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, to be standard error."""
    monkeypatch.setenv("TERM", "xterm-256color")
    return Tty()


def shown(terminal):
    """All that has been drawn, line after line."""
    return terminal.getvalue().replace("\r", "\n").split("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_that_it_has_started_before_it_imports_jax(command):
    run = subprocess.run(
        [sys.executable, "-c", FIRST_WRITE, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert run.stdout == "[0:00:00] importing modules|False", run.stderr


@pytest.mark.parametrize("word", ["-h", "--help", "--he"])
def test_help_is_left_alone(word, capsys):
    with importing(["serve", word]):
        pass
    assert capsys.readouterr() == ("", "")
    with importing(["serve", "--seed"]):
        pass
    assert phases(capsys.readouterr().err) == ["importing modules"]


def test_help_of_a_command_is_all_that_it_writes():
    run = subprocess.run([sys.executable, "-m", "dflash_jax.train", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: python -m dflash_jax.train ")


def test_in_a_log_a_phase_is_a_line_when_it_begins_and_one_with_its_count_when_it_ends(capsys):
    with phase("loading"):
        pass
    with phase("answering", 4, first=1) as now:
        now.advance()
        now.note = "1 failed"
        assert list(now.over("ab")) == ["a", "b"]
    announce("finding")
    out, err = capsys.readouterr()
    assert lines(err) == ["loading", "answering: 1 of 4", "answering: 4 of 4, 1 failed, in 0:00:00", "finding"]
    assert out == ""


def test_in_a_log_a_long_phase_goes_on_telling(capsys, monkeypatch):
    monkeypatch.setattr(progress, "TOLD_EVERY", 0.01)
    before = threading.active_count()
    with phase("reading") as now:
        now.advance(1234)
        time.sleep(0.2)
    assert lines(capsys.readouterr().err).count("reading: 1,234") > 2
    assert threading.active_count() == before


def test_how_fast_and_how_long_still():
    now = progress.Phase(progress.Display(), "answering", 30, 10)
    now.began -= 20
    now.advance(5, tokens=4000)
    assert now.sentence() == "answering: 15 of 30, 200 tokens/s, 0:01:00 left"
    assert now.sentence(is_over=True) == "answering: 15 of 30, 200 tokens/s, in 0:00:20"


def test_a_phase_within_another_is_shown_in_its_place(capsys):
    with phase("training", 2) as now:
        with now.within("measuring", 1) as measuring, measuring.tqdm(total=1, desc="any") as bar:
            bar.update()
        now.say("step 1 is good")
    told = lines(capsys.readouterr().err)
    assert told[:4] == ["training: 0 of 2", "measuring: 0 of 1", "measuring: 1 of 1, in 0:00:00", "step 1 is good"]


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
def test_nobody_reads_and_the_command_goes_on(monkeypatch, error):
    class Closed(io.StringIO):
        def write(self, text):
            raise error

    monkeypatch.setattr(sys, "stderr", Closed())
    with phase("answering", 1) as now:
        now.advance()
    assert now.done == 1


def test_without_standard_error_nothing_is_written_to_standard_output(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    with importing([]), phase("loading") as now:
        now.say("loaded")
    announce("finding")
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_one_line_that_goes_away(terminal, capsys):
    with redirect_stderr(terminal):
        with phase("loading"):
            assert any(line.endswith(" 0:00:00 loading") for line in shown(terminal))
            print("a result")
            print("a warning", file=sys.stderr)
            time.sleep(1.2 / progress.DRAWS_PER_SECOND)
        print("the end", file=sys.stderr)
    assert sum(line.endswith(" loading") for line in shown(terminal)) > 2
    assert terminal.getvalue().endswith("\x1b[2K\x1b[?25h\rthe end\n")  # where the line was
    assert any(line.endswith("a warning") for line in shown(terminal))
    assert capsys.readouterr() == ("a result\n", "")


def test_a_terminal_keeps_the_counts(terminal):
    with redirect_stderr(terminal), phase("answering", 3) as now:
        now.advance(2)
        with now.within("measuring"):
            assert shown(terminal)[-1].endswith(" 0:00:00 measuring")
        assert shown(terminal)[-1].endswith(" 0:00:00 answering: 2 of 3, 0:00:00 left")
    assert any(line.endswith("\x1b[2Kanswering: 2 of 3, in 0:00:00") for line in shown(terminal))


def test_a_failure_leaves_the_terminal_as_it_was(terminal):
    with redirect_stderr(terminal):
        with pytest.raises(RuntimeError, match="no memory"), phase("loading"):
            raise RuntimeError("no memory")
        assert sys.stderr is terminal
    assert terminal.getvalue().startswith("\x1b[?25l")  # no cursor
    assert "\x1b[?25h" in terminal.getvalue()
