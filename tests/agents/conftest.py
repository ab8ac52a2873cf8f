"""A real server whose model has room for agents' prompts. `make test-agents` installs what these tests need."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.agents.agents import CONTEXT
from tests.pairs import RECITER
from tests.serve.live import serving

INSTALLED = os.environ.get("DFLASH_TEST_AGENTS", "")  # where tests.agents.install has put agents and SDKs
if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def installed():
    """The folder of agents and SDKs."""
    return Path(INSTALLED)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server of the pair that recites, which sees 32 tokens back and so takes prompts of any length."""
    folder = tmp_path_factory.mktemp("agents")
    for part in ("target", "draft"):
        shutil.copytree(RECITER / part, folder / part)
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": CONTEXT}))
    model = (f"--model={folder / 'target'}", f"--draft-model={folder / 'draft'}")
    flags = (
        "--served-model-name=m",
        "--max-num-seqs=4",
        f"--chat-template={Path(__file__).parent / 'chatml.jinja'}",
    )
    with serving(folder, *flags, model=model) as live:
        yield live
