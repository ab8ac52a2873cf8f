"""vLLM's router and the Shepherd model gateway (SMG) in front of two servers, where they are installed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.replicas.cluster import LICENCE, SECONDS
from tests.serve.live import NAME, free_port, serving

FLAGS = (f"--served-model-name={NAME}", "--max-num-seqs=4", "--num-speculative-tokens=15")
ROUTERS = {"vllm-router": (), "smg": ("launch",)}  # commands, and what comes before their flags
CONVERSATIONS = 6


def command(name: str) -> str | None:
    """Where a router's command is: beside Python or on the PATH."""
    return shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)


pytestmark = pytest.mark.skipif(not any(map(command, ROUTERS)), reason="needs vllm-router or smg: make test-ray")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers."""
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
        yield [
            stack.enter_context(serving(folder, *FLAGS, "--enable-prompt-tokens-details", "--enable-log-requests"))
            for folder in folders
        ]


@contextmanager
def routing(name: str, log: Path, urls: list[str], policy: str):
    """A router in front of these servers; its URL."""
    port = free_port()
    flags = [*ROUTERS[name], "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_port()}"]
    flags += ["--health-check-interval-secs=1", "--health-failure-threshold=1", f"--policy={policy}"]
    with log.open("w") as file:
        process = subprocess.Popen([command(name), *flags, "--worker-urls", *urls], stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + SECONDS
        while not knows_the_model(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=ROUTERS)
def name(request):
    """The name of a router that is installed."""
    if command(request.param) is None:
        pytest.skip(f"needs {request.param}")
    return request.param


@pytest.fixture
def router(name, servers, tmp_path):
    """The URL of a router that looks for prefixes."""
    with routing(name, tmp_path / "log", [server.base for server in servers], "cache_aware") as url:
        yield url


def knows_the_model(url: str) -> bool:
    """Whether a router has found its servers, which SMG does some time after it says that it is well."""
    try:
        return NAME in httpx.get(f"{url}/v1/models").text
    except httpx.TransportError:
        return False


def ask(router: str, messages: list[dict], **body) -> dict:
    body = {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0} | body
    answer = httpx.post(f"{router}/v1/chat/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_turns_of_a_chat_meet_again(router):
    for number in range(CONVERSATIONS):
        chat = [{"role": "user", "content": f"{router} {number} {LICENCE} " * 12}]
        first = ask(router, chat)
        chat += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
        second = ask(router, [*chat, {"role": "user", "content": "Go on"}])
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64, number


def test_both_servers_work(name, servers, tmp_path):
    before = [server.metric("prompt_tokens_total") for server in servers]
    with routing(name, tmp_path / "log", [server.base for server in servers], "round_robin") as router:
        for _ in range(4):
            ask(router, [{"role": "user", "content": LICENCE}])
    gains = [server.metric("prompt_tokens_total") - count for server, count in zip(servers, before, strict=True)]
    assert gains[0] == gains[1] > 0


def test_a_stream_comes_whole(router):
    body = {"model": NAME, "messages": [{"role": "user", "content": LICENCE}], "max_tokens": 200, "temperature": 0}
    whole = ask(router, body["messages"], max_tokens=200)["choices"][0]["message"]["content"]
    with httpx.stream("POST", f"{router}/v1/chat/completions", json=body | {"stream": True}, timeout=SECONDS) as answer:
        *chunks, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert done == "[DONE]"
    assert len(chunks) > 5
    assert "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole


def test_a_server_that_dies_is_left_out(servers, tmp_path):
    urls = [server.base for server in servers]
    with ExitStack() as stack:
        routers = [
            stack.enter_context(routing(name, tmp_path / name, urls, "round_robin"))
            for name in filter(command, ROUTERS)
        ]
        for pid in (servers[1].engine_pid, servers[1].process.pid):
            os.kill(pid, signal.SIGKILL)
        servers[1].process.wait()
        time.sleep(3)  # a health check and its timeout; until then vllm-router hands refused connections to clients
        for router in routers:
            for _ in range(6):
                ask(router, [{"role": "user", "content": LICENCE}])
