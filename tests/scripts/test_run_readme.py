"""Commands of the documents: which are found, which are left out and why, and the report of a run."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import readme_plan
import run_readme
from readme_plan import Command, Rule, chosen, commands_of, plan, shell_commands, substituted

ROOT = Path(__file__).parents[2]
DOCUMENT = """# Title

Run `make lint`, then `python -m tool
--fast`; `make` alone and `word` are none.

```console
make serve    # it's at http://127.0.0.1:8000
FLAG=1 python -m tool \\
    --name 'a # b' --other "it's"
```

```python
import tool

tool.run()  # on Qwen
```

```text
not a command
```

    pip install tool    # once
    for b in 1 2; do python -m tool $b \\
        --more; done

Done.
    Not code: it goes on with a paragraph.
"""
SERVER = """
import http.server, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass

signal.signal(signal.SIGTERM, {handler})
{before}
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
EXIT = "lambda *_: sys.exit(0)"


def texts(markdown):
    return [command.text for command in commands_of("a.md", markdown)]


def steps_of(markdown, downloads=False, rules=()):
    return plan(list(commands_of("a.md", markdown)), downloads, rules)


def test_commands_are_found_where_they_stand():
    results = [(command.line, command.text, command.is_python) for command in commands_of("a.md", DOCUMENT)]
    assert results == [
        (3, "make lint", False),
        (3, "python -m tool --fast", False),
        (7, "make serve", False),
        (8, "FLAG=1 python -m tool --name 'a # b' --other \"it's\"", False),
        (13, "import tool\n\ntool.run()  # on Qwen\n", True),
        (22, "pip install tool", False),
        (23, "for b in 1 2; do python -m tool $b --more; done", False),
    ]


@pytest.mark.parametrize("language", ["console", "bash", "sh"])
def test_languages_of_the_shell(language):
    assert texts(f"```{language}\n$ ls\n```\n") == ["ls"]


def test_quotes_span_lines_and_keep_them():
    text = """curl -d '{
  "a": 1}'   # done
# a comment
echo it#is\n"""
    assert list(shell_commands(text)) == [(0, "curl -d '{\n  \"a\": 1}'"), (3, "echo it#is")]


@pytest.mark.parametrize("text", ["echo 'open", 'echo "open', "echo \\"])
def test_a_command_without_an_end_is_refused(text):
    with pytest.raises(SystemExit, match="does not end"):
        list(shell_commands(text))


def test_the_first_rule_that_matches_says_why():
    rules = [Rule("gpu", "fast", "wants a GPU"), Rule("long", "tool", "takes hours"), Rule("gpu", "Qwen", "is large")]
    steps = steps_of(DOCUMENT, rules=rules)
    whys = {step.command.line: step.skipped for step in steps if step.command.line != 3}
    assert whys == {7: "", 8: "long: takes hours", 13: "long: takes hours", 22: "long: takes hours", 23: whys[22]}
    assert [step.skipped for step in steps if step.command.line == 3] == ["", "gpu: wants a GPU"]


def test_comments_match_no_rule():
    assert [s.skipped for s in steps_of("```python\nrun()  # Qwen\n```\n", rules=[Rule("gpu", "Qwen", "x")])] == [""]
    assert [s.skipped for s in steps_of("```sh\nrun # Qwen\n```\n", rules=[Rule("gpu", "Qwen", "x")])] == [""]


def test_downloads_lift_their_kind_only():
    rules = [Rule("download", "get", "fetches"), Rule("gpu", "big", "wants a GPU")]
    markdown = "```sh\nget\nbig\n```\n"
    assert [s.skipped for s in steps_of(markdown, rules=rules)] == ["download: fetches", "gpu: wants a GPU"]
    assert [s.skipped for s in steps_of(markdown, downloads=True, rules=rules)] == ["", "gpu: wants a GPU"]


def test_rules_of_programs_hold_where_these_are_missing():
    rules = [Rule("program", "one", "missing", "no_such_module"), Rule("program", "two", "missing", "json")]
    assert [s.skipped for s in steps_of("```sh\none\ntwo\n```\n", rules=rules)] == ["program: missing", ""]


def test_a_command_runs_once():
    assert len(steps_of("`make demo` and `make demo`\n\n```sh\nmake demo # again\n```\n")) == 1


def test_clients_talk_to_the_last_server_before_them_that_runs():
    markdown = """```sh
make serve
curl $SERVER/one
python -m dflash_jax.serve Qwen
curl http://127.0.0.1:8000/two
python -m dflash_jax.serve --help
python -m dflash_jax.serve mine
python -m dflash_jax.bench serve
ls
```"""
    steps = steps_of(markdown, rules=[Rule("gpu", "Qwen", "x")])
    servers = [step.server.command.text if step.server else None for step in steps]
    assert servers == [None, "make serve", None, "make serve", None, None, "python -m dflash_jax.serve mine", None]
    assert [step.is_server for step in steps] == [True, False, True, False, False, True, False, False]


def test_a_client_without_a_server_is_refused():
    other = Command("b.md", 1, "curl $SERVER")
    with pytest.raises(SystemExit, match=r"b\.md:1.*\n.*let a command before it"):
        plan([Command("a.md", 1, "make serve"), other], False, ())


@pytest.mark.parametrize(
    ("rules", "patterns", "stale"),
    [
        ([Rule("gpu", "nothing", "x")], [], "'nothing'"),
        ([Rule("gpu", "make", "x"), Rule("gpu", "make lint", "behind it")], [], "'make lint'"),
        ([], ["TARGET"], "'TARGET'"),
    ],
)
def test_what_no_command_needs_is_refused(rules, patterns, stale):
    with pytest.raises(SystemExit, match=re.escape(f"no command matches {stale} any more")):
        readme_plan.check_tables([Command("a.md", 1, "make lint")], rules, patterns)
    readme_plan.check_tables([Command("a.md", 1, "make lint")], [Rule("gpu", "lint", "x")], ["make"])


def test_the_choice_brings_the_server_along():
    steps = steps_of("```sh\nmake serve\ncurl $SERVER/one\ncurl $SERVER/two\nls\n```\n")
    assert [step.command.text for step in chosen(steps, "one")] == ["make serve", "curl $SERVER/one"]
    with pytest.raises(SystemExit, match="matches none of 4"):
        chosen(steps, "three")


def test_some_may_take_longer():
    commands = [
        Command("a.md", 1, "python -m dflash_jax.eval acceptance --model TARGET"),
        Command("a.md", 2, "make demo"),
    ]
    assert [readme_plan.limit_of(command, 10) for command in commands] == [20, 10]


def test_substitutes():
    assert substituted("make serve", 7).endswith(f"PYTHON={sys.executable} serve FLAGS='--port 7'")
    assert substituted("python -m dflash_jax.serve x", 7) == "python -m dflash_jax.serve --port 7 x"
    assert substituted("python -m dflash_jax.serve --help", 7) == "python -m dflash_jax.serve --help"
    assert substituted("curl http://127.0.0.1:8000/v1", 7) == "curl http://127.0.0.1:7/v1"
    assert substituted("x --model TARGET --y MY_TARGET", 7) == "x --model tests/pair/target --y MY_TARGET"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_tables_fit_the_documents():
    commands = readme_plan.read_documents(ROOT)
    readme_plan.check_tables(commands)
    steps = plan(commands, downloads=False)
    assert {"make demo", "python -m dflash_jax.bench offline"} <= {s.command.text for s in steps if not s.skipped}


@pytest.fixture
def runner(tmp_path):
    clone = tmp_path / "clone"
    (clone / "dflash_jax").mkdir(parents=True)
    (clone / "dflash_jax/__init__.py").touch()  # or another dflash_jax in PYTHONPATH comes before it
    (clone / "LICENSE").write_text("x" * 50)
    (clone / "Makefile").write_text("serve:\n\t$(PYTHON) -m dflash_jax.serve $(FLAGS)\n")
    (clone / "dflash_jax/serve.py").write_text(SERVER.format(handler=EXIT, before=""))
    return run_readme.Runner(clone, tmp_path / "logs", 20, 9)


def outcomes(runner, markdown, **options):
    results = list(runner.run(steps_of(markdown, **options)))
    return {result.step.command.text: (result.outcome, result.note) for result in results}


def test_commands_end_well_or_not(runner, capsys):
    markdown = "```sh\npython -c 'import os; os.stat(\"LICENSE\")'\necho why && exit 3\nfalse | true\nskip\n```\n"
    results = outcomes(runner, markdown, rules=[Rule("gpu", "skip", "wants a GPU")])
    outcome, (third, note), pipe, skipped = results.values()
    assert outcome == ("ok", "")
    assert (third, pipe[0], skipped) == ("failed", "failed", ("skipped", "gpu: wants a GPU"))
    assert note.startswith("status 3; see ")
    assert "| why\n" in capsys.readouterr().out


def test_scripts_of_python_run_in_the_clone(runner):
    (runner.clone / "mine.py").write_text("NAME = 'made'\n")  # not beside the script
    script = "import mine\nopen('LICENSE'), open(mine.NAME, 'w')\n"
    assert [outcome for outcome, _ in outcomes(runner, f"```python\n{script}```\n").values()] == ["ok"]
    assert (runner.clone / "made").exists()


def test_packages_of_the_caller_are_found_behind_the_clone(runner, monkeypatch):
    """`fetch` leaves out data that this process can import, so commands must find them, too."""
    monkeypatch.setenv("PYTHONPATH", "/data")
    paths = runner.environment(0)["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(runner.clone), str(runner.packages), "/data"]
    monkeypatch.delenv("PYTHONPATH")
    assert runner.environment(0)["PYTHONPATH"].split(os.pathsep) == paths[:2]


def test_what_takes_too_long_is_killed_with_its_children(runner):
    runner.limit = 0.5
    command = "(sleep 2; touch late) & sleep 30; true"
    began = time.monotonic()
    assert outcomes(runner, f"```sh\n{command}\n```\n")[command][1].startswith("killed after 0.5 s")
    assert time.monotonic() - began < 5
    time.sleep(2)
    assert not (runner.clone / "late").exists()


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
@pytest.mark.parametrize("server", ["python -m dflash_jax.serve", "make serve"])
def test_servers_serve_and_are_stopped(runner, server):
    results = outcomes(runner, f"```sh\n{server}\ncurl -s http://127.0.0.1:8000/health\ncurl -s $SERVER/other\n```\n")
    assert results[server] == ("ok", results[server][1])
    assert results[server][1].startswith("healthy after ")
    assert results["curl -s http://127.0.0.1:8000/health"][0] == "ok"
    assert results["curl -s $SERVER/other"][0] == "failed"  # the server answers 404


@pytest.mark.parametrize(
    ("handler", "before", "note"),
    [
        ("lambda *_: sys.exit(4)", "", "status 4 after SIGTERM"),
        ("signal.SIG_IGN", "", "still runs 1 s after SIGTERM"),
        (EXIT, "sys.exit(0)", "not healthy: it has ended with status 0"),
        (EXIT, "import time; time.sleep(60)", "not healthy after 2 s"),
    ],
)
def test_servers_that_do_not_behave(runner, monkeypatch, handler, before, note):
    monkeypatch.setattr(run_readme, "STOP_SECONDS", 1)
    runner.limit = 2
    (runner.clone / "dflash_jax/serve.py").write_text(SERVER.format(handler=handler, before=before))
    results = outcomes(runner, "```sh\npython -m dflash_jax.serve\necho $SERVER\n```\n")
    outcome, said = results["python -m dflash_jax.serve"]
    assert (outcome, said.partition(";")[0]) == ("failed", note)
    started = not note.startswith("not healthy")
    assert results["echo $SERVER"] == (("ok", "") if started else ("failed", "its server did not start"))


@pytest.mark.parametrize("status", [0, 1])
def test_data_are_fetched_or_the_command_is_skipped(runner, monkeypatch, status):
    asked = []
    monkeypatch.setattr(run_readme, "DATA", [("data", "no_such_module", "no-such"), ("data", "json", "json")])
    monkeypatch.setattr(
        run_readme.subprocess,
        "run",
        lambda argv, **_: asked.append(argv[-1]) or subprocess.CompletedProcess(argv, status),
    )
    (results,) = outcomes(runner, "```sh\necho data\n```\n").values()
    assert asked == ["no-such"]
    assert results == (("skipped", "download: pip cannot fetch no-such") if status else ("ok", ""))


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("false", 1)])
def test_the_command(tmp_path, monkeypatch, capsys, command, status):
    (tmp_path / "LICENSE").write_text("x\n")
    (tmp_path / "README.md").write_text(f"```sh\n{command}\npip install x\n```\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "x"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("```sh\nexit 5\n```\n")  # not committed
    monkeypatch.setattr(run_readme, "ROOT", tmp_path)
    monkeypatch.setattr(run_readme, "check_tables", lambda commands: None)
    logs = ["--logs", str(tmp_path / "logs")]
    assert run_readme.main([*logs, "--list"]) == 0
    assert not (tmp_path / "logs").exists()
    assert "1 would run, 1 not" in capsys.readouterr().out
    assert run_readme.main(logs) == status
    said = capsys.readouterr().out
    assert "warning: 1 uncommitted changes are left out" in said
    assert f"{1 - status} ok, {status} failed, 1 skipped" in said
    assert "install: changes the environment" in said
