"""Coding agents, unmodified and without a network: each reads a file, edits it and says that it is done."""

import json
import os
import re
import subprocess
from itertools import pairwise

import pytest

from tests.agents.agents import AFTER, AGENTS, BEFORE, Place
from tests.agents.director import directing
from tests.pairs import RECITER

DONE = "Everything is done here."
PAGE = 64  # tokens; a prompt is found in the prefix cache by whole pages
SECONDS = 180  # that an agent may take; it takes 3 to 20 where nothing else runs


def called(name: str, arguments: dict) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def cached_of(log: str, turn: str) -> tuple[int, int]:
    """Tokens of a turn's prompt, and how many the prefix cache had, by the server's log."""
    prompt, share = re.search(rf"_?{turn}[ :].*prompt (\d+) tokens, ([\d.]+)% cached", log).groups()
    return int(prompt), round(int(prompt) * float(share) / 100)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_reads_edits_and_ends(server, installed, tmp_path, name):
    agent, place = AGENTS[name], Place(tmp_path / "home", tmp_path / "work", installed / "node_modules", "")
    place.home.mkdir()
    place.work.mkdir()
    (place.work / "notes.txt").write_text(BEFORE)
    (place.work / "AGENTS.md").write_text("# Rules\n\n" + (RECITER.parents[1] / "LICENSE").read_text()[:4000])
    says = [*(called(*call) for call in agent.calls(place)), DONE]
    with directing(server.base, name, says) as (director, url):
        command, env = agent.start(place.at(url))
        path = f"{place.node.rpartition('/')[0]}:{os.environ['PATH']}"
        ended = subprocess.run(
            command,
            cwd=place.work,
            env={"PATH": path, "HOME": str(place.home), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert DONE in ended.stdout
    assert (place.work / "notes.txt").read_text() == AFTER
    assert [(turn.number, turn.status) for turn in director.turns] == [(0, 200), (1, 200), (2, 200)]
    assert {status for _, _, status in director.paths} == {200}, director.paths
    assert {path for method, path, _ in director.paths if method == "POST"} == {agent.api}
    log = server.log.read_text()
    turns = [cached_of(log, turn.id) for turn in director.turns]
    print(f"\n{name}: {', '.join(f'{prompt:,} tokens, {cached:,} cached' for prompt, cached in turns)}")
    for (before, _), (prompt, cached) in pairwise(turns):
        assert cached >= 0.95 * prompt
        assert cached > before - 2 * PAGE  # all of the last prompt but the page that it has not filled, and rounding
