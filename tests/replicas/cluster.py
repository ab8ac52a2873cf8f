"""A Ray cluster of one machine, as operators start it, with replicas of the pair that recites."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from tests.serve.live import MODEL, NAME, free_port

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text())  # the one that users get
FLAGS = [*MODEL, f"--served-model-name={NAME}", "--max-num-seqs=4", "--num-speculative-tokens=15"]
FLAGS += ["--enable-prompt-tokens-details"]
SECONDS = 180  # for what takes a few on an idle machine
LICENCE = "You may reproduce and distribute copies of the"


@dataclass
class Cluster:
    """A cluster with Ray's dashboard at `dashboard`; `base` is where requests go."""

    base: str
    dashboard: str
    config: dict = field(default_factory=lambda: copy.deepcopy(CONFIG))

    @property
    def app(self) -> dict:
        """The application in the configuration."""
        return self.config["applications"][0]

    @property
    def server(self) -> dict:
        """The deployment in the configuration."""
        return self.app["deployments"][0]

    def deploy(self) -> None:
        """Send the configuration, as `serve deploy` does."""
        self._call("PUT", json.dumps(self.config).encode())

    def status(self) -> dict:
        """What Ray says of the application."""
        return self._call("GET")["applications"].get(self.app["name"], {"status": "NONE", "deployments": {}})

    def _call(self, method: str, body: bytes | None = None) -> dict:
        url = f"{self.dashboard}/api/serve/applications/"
        request = urllib.request.Request(url, body, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")

    def replicas(self) -> dict[str, int]:
        """The processes of the replicas that run, by their ids."""
        listed = self.status()["deployments"].get("Server", {"replicas": []})["replicas"]
        return {replica["replica_id"]: replica["pid"] for replica in listed if replica["state"] == "RUNNING"}

    def is_up(self, count: int) -> bool:
        """Whether the last configuration is in force with so many replicas, and no others are left."""
        status = self.status()
        assert status["status"] != "DEPLOY_FAILED", status["message"]
        listed = status["deployments"].get("Server", {"replicas": []})["replicas"]
        return status["status"] == "RUNNING" and len(self.replicas()) == len(listed) == count

    def wait_until(self, holds, seconds: float = SECONDS) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds} s: {json.dumps(self.status(), indent=1)[:4000]}"
            time.sleep(0.1)

    def metric(self, name: str, session: str) -> float:
        """A metric of the replica to which a session belongs."""
        lines = httpx.get(f"{self.base}/metrics", headers={"x-session-id": session}).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"dflash_jax:{name}{{"))

    def complete(self, session: str | None = None, **body) -> dict:
        """The answer to a completion request, of a session if one is given."""
        headers = {} if session is None else {"x-session-id": session}
        body = {"prompt": LICENCE, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | body
        answer = httpx.post(f"{self.base}/v1/completions", json=body, headers=headers, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, session: str | None = None, began=lambda: None, **body) -> str:
        """The text of a completion that is streamed to its end; `began` is called at its first chunk."""
        headers = {} if session is None else {"x-session-id": session}
        body = {"prompt": LICENCE, "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True} | body
        text, is_done = "", False
        with httpx.stream("POST", f"{self.base}/v1/completions", json=body, headers=headers, timeout=SECONDS) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                is_done |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    text += chunk["choices"][0]["text"]
                    began()
        assert is_done
        return text


@contextmanager
def running(environment: dict[str, str]):
    """A cluster without applications. Ray is started with these variables beside the usual ones."""
    port, dashboard, http, clients, agents = (free_port() for _ in range(5))
    folder = tempfile.mkdtemp(prefix="ray")  # paths of sockets must be short
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={clients}"]
    command += [f"--dashboard-agent-listen-port={agents}", f"--temp-dir={folder}", "--num-cpus=8"]
    command += ["--object-store-memory=100000000"]
    names = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"} | environment
    with (Path(folder) / "start.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | names, cwd=ROOT)
    cluster = Cluster(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{dashboard}")
    cluster.config["http_options"] |= {"host": "127.0.0.1", "port": http}
    cluster.app["args"] = {"flags": list(FLAGS), "gpus": 0}
    cluster.server["graceful_shutdown_timeout_s"] = SECONDS
    try:
        cluster.wait_until(lambda: process.poll() is not None or answers(cluster))
        assert process.poll() is None, (Path(folder) / "start.log").read_text()
        yield cluster
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def answers(cluster: Cluster) -> bool:
    """Whether the dashboard answers, which is the last part of Ray to start."""
    try:
        cluster.status()
    except OSError:
        return False
    return True
