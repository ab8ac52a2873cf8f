"""Processes die, cannot start, or are told to stop: every client gets an answer, and no process is left."""

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from tests.pairs import RECITER
from tests.serve.live import MODEL, START_SECONDS, Live, free_port, is_running, serving, start

ENDLESS = {"prompt": ["a"] * 64, "max_tokens": 3000, "ignore_eos": True, "speculation": False, "temperature": 0}
SHORT = {"prompt": "You may reproduce and distribute copies of the", "max_tokens": 48, "temperature": 0}
# So that 64 prompts take their time, and programs of few lengths are compiled.
SLOWLY = ("--max-num-seqs=1", "--num-speculative-tokens=15")


class Client(threading.Thread):
    """A client in a thread; `answer` is status and body, None if the connection broke."""

    def __init__(self, live: Live, body):
        super().__init__()
        self.live, self.body, self.answer = live, body, None
        self.has_begun = threading.Event()
        self.start()

    def run(self):
        connection = http.client.HTTPConnection(self.live.base.removeprefix("http://"), timeout=START_SECONDS)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body), {"content-type": "application/json"})
            response = connection.getresponse()
            first = response.read1(1)
            self.has_begun.set()
            self.answer = response.status, (first + response.read()).decode()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()

    def ended(self):
        self.join(START_SECONDS)
        assert not self.is_alive()
        return self.answer


def events(body: str) -> list[str]:
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]


def stop(live: Live) -> int:
    live.process.terminate()
    return live.process.wait(START_SECONDS)


def kill_engine(live: Live) -> int:
    pid = live.engine_pid
    os.kill(pid, signal.SIGKILL)
    return pid


def busy(live: Live) -> tuple[Client, Client]:
    """A client that streams, and one that waits for the complete answer; both requests run."""
    streams = Client(live, ENDLESS | {"stream": True})
    assert streams.has_begun.wait(START_SECONDS)
    waits = Client(live, ENDLESS)
    live.wait_until(lambda: json.loads(live.get("/load")[1])["server_load"] >= 65)
    return streams, waits


def assert_told(streams: Client, waits: Client, cause: str) -> None:
    """Both clients have got the cause that ended their requests, as an event and as a status."""
    status, body = streams.ended()
    *_, error, done = events(body)
    assert (status, done) == (200, "[DONE]")
    assert json.loads(error)["error"]["code"] == 503
    assert cause in error
    status, body = waits.ended()
    assert (status, json.loads(body)["error"]["type"]) == (503, "ServiceUnavailableError")
    assert cause in body


def assert_out_of_service(live: Live) -> None:
    assert live.get("/health")[0] == 503
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": messages}),
        ("/generate", {"text": "a"}),
    ):
        status, answer = live.post(path, body)
        assert (status, "died" in answer["error"]["message"]) == (503, True)
    assert live.post("/v1/completions", SHORT | {"stream": True})[0] == 503
    assert live.ask("POST", "/flush_cache", b"")[0] == 503
    for path in ("/v1/models", "/metrics", "/version", "/"):
        assert live.get(path)[0] == 200
    assert json.loads(live.get("/load")[1]) == {"server_load": 0}


def test_an_engine_that_is_killed(tmp_path):
    with serving(tmp_path, *SLOWLY) as live:
        clients = busy(live)
        pid = kill_engine(live)
        assert_told(*clients, "the engine process has died")
        assert_out_of_service(live)
        assert stop(live) == 0
        assert not is_running(pid)
        assert "Traceback" not in live.log.read_text()


def test_an_engine_that_is_killed_and_started_again(tmp_path):
    with serving(tmp_path, *SLOWLY, "--restart-engine") as live:
        expected = live.post("/v1/completions", SHORT)[1]["choices"][0]["text"]
        counted = ("prompt_tokens_total", "generation_tokens_total", "spec_decode_num_drafts_total")
        clients = busy(live)
        before = [live.metric(name) for name in counted]
        pids = [kill_engine(live)]
        assert_told(*clients, "the engine process has died")
        assert live.get("/health")[0] == 503
        assert live.metric("num_requests_running") == live.metric("num_requests_waiting") == 0
        live.wait_until(lambda: live.process.poll() is None and live.has_engine())
        pids.append(kill_engine(live))  # while it starts
        live.wait_until(live.is_healthy)
        assert live.post("/v1/completions", SHORT)[1]["choices"][0]["text"] == expected

        def has_counted_on():  # drafts come when the programs are there that draft
            live.post("/v1/completions", SHORT)
            return all(live.metric(name) > past for name, past in zip(counted, before, strict=True))

        live.wait_until(has_counted_on)
        live.wait_until(live.is_idle)
        assert not any(map(is_running, pids))
        pid = live.engine_pid
        live.process.kill()
        live.wait_until(lambda: not is_running(pid))


def test_a_server_that_is_killed_while_its_engine_starts(tmp_path):
    with serving(tmp_path, "--compile-at-start", wait=False) as live:
        live.wait_until(live.has_engine)
        pid = live.engine_pid
        live.wait_until(lambda: "jaxlib" in Path(f"/proc/{pid}/maps").read_text())  # it has got as far as that
        live.process.kill()
        live.wait_until(lambda: not is_running(pid))


def test_a_server_that_is_told_to_stop_while_its_engine_starts(tmp_path):
    with serving(tmp_path, "--compile-at-start", wait=False) as live:
        live.wait_until(live.has_engine)
        pid = live.engine_pid
        assert live.get("/health")[0] == 503
        assert stop(live) == 0
        assert not is_running(pid)


# Told to stop


def refuses_connections(live: Live) -> bool:
    try:
        live.get("/health")
    except OSError:
        return True
    return False


def test_sigterm_lets_what_runs_end(tmp_path):
    with serving(tmp_path, *SLOWLY, "--shutdown-timeout=100") as live:
        body = {**ENDLESS, "prompt": ["a"] * 8, "max_tokens": 150}
        streams = Client(live, body | {"stream": True})
        assert streams.has_begun.wait(START_SECONDS)
        waits = Client(live, body)  # second in the queue
        live.wait_until(lambda: json.loads(live.get("/load")[1])["server_load"] >= 9)
        pid = live.engine_pid
        live.process.terminate()
        live.wait_until(lambda: refuses_connections(live))
        assert streams.is_alive()
        status, answer = streams.ended()
        chunks = events(answer)
        reasons = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
        assert (status, chunks[-1], reasons.count("length")) == (200, "[DONE]", 8)
        status, answer = waits.ended()
        assert (status, len(json.loads(answer)["choices"])) == (200, 8)
        assert live.process.wait(START_SECONDS) == 0
        assert not is_running(pid)
        assert "Traceback" not in live.log.read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_second_signal_stops_at_once(tmp_path, second):
    with serving(tmp_path, *SLOWLY, "--shutdown-timeout=1000") as live:
        clients = busy(live)
        pid = live.engine_pid
        live.process.terminate()
        live.wait_until(lambda: refuses_connections(live))
        assert all(client.is_alive() for client in clients)
        live.process.send_signal(second)
        assert live.process.wait(START_SECONDS) == 0
        live.wait_until(lambda: not is_running(pid))
        assert_told(*clients, "the server is shutting down")
        assert "Traceback" not in live.log.read_text()


def test_no_time_to_end(tmp_path):
    with serving(tmp_path, *SLOWLY, "--shutdown-timeout=0") as live:
        clients = busy(live)
        pid = live.engine_pid
        assert stop(live) == 0
        assert not is_running(pid)
        assert_told(*clients, "the server is shutting down")
        assert "Traceback" not in live.log.read_text()


# Cannot start


def refusal(tmp_path, *flags) -> str:
    """The sentence of a server that cannot start, which exits with status 2."""
    process = start(tmp_path / "log", *flags)
    assert process.wait(START_SECONDS) == 2
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    return sentence


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refusal(tmp_path, "--port", str(port), "--model", str(tmp_path / "never looked at"))
    assert f"cannot listen at 127.0.0.1:{port}" in sentence


def test_a_model_that_is_not_there(tmp_path):
    assert "nowhere" in refusal(tmp_path, "--port=0", "--model", str(tmp_path / "nowhere"))


def test_an_engine_that_cannot_start(tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(RECITER / "target", folder)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert weights.name in refusal(tmp_path, "--port=0", "--restart-engine", "--model", str(folder))
    assert "max_model_len" in refusal(tmp_path, *MODEL, "--port=0", "--max-model-len=100000000")


def test_an_engine_that_is_killed_at_its_first_start(tmp_path):
    with serving(tmp_path, "--compile-at-start", "--restart-engine", wait=False) as live:
        live.wait_until(live.has_engine)
        kill_engine(live)
        assert live.process.wait(START_SECONDS) == 2
        assert "error: the engine process has died; see its log." in live.log.read_text()


# Sockets, TLS, and what stands before the server


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=START_SECONDS)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(START_SECONDS)
        self.sock.connect(str(self.path))


@pytest.mark.long
def test_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:  # of a server that has not cleaned up
        dead.bind(str(path))
    process = start(tmp_path / "first", *MODEL, f"--uds={path}")
    live = Live("", process, tmp_path / "first")
    try:

        def is_healthy():
            connection = UnixConnection(path)
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except OSError:
                return False
            finally:
                connection.close()

        live.wait_until(is_healthy)
        assert "cannot listen at" in refusal(tmp_path, *MODEL, f"--uds={path}")
        assert is_healthy()  # it was not taken from it
    finally:
        assert stop(live) == 0
    assert not path.exists()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A folder with a self-signed certificate of localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True)
    return folder


def test_tls_keys_of_a_file_origins_and_a_path_behind_a_proxy(tmp_path, certificate):
    (tmp_path / "keys").write_text("# of two tenants\n\nsecret-1\nsecret-2\n")
    port = free_port()
    flags = [f"--ssl-certfile={certificate / 'cert'}", f"--ssl-keyfile={certificate / 'key'}"]
    flags += [f"--api-key-file={tmp_path / 'keys'}", "--allowed-origins=https://a.example", "--root-path=/llm"]
    log = tmp_path / "log"
    live = Live(f"https://127.0.0.1:{port}", start(log, *MODEL, f"--port={port}", *flags), log)
    context = ssl.create_default_context(cafile=certificate / "cert")

    def get(path, method="GET", **headers):
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=START_SECONDS)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            answer.read()
            return answer
        except OSError:
            return None
        finally:
            connection.close()

    try:
        live.wait_until(lambda: (answer := get("/health")) is not None and answer.status == 200)
        for path in ("/health", "/llm/health"):  # whether or not the proxy strips its part
            assert get(path).status == 200
        for path in ("/v1/models", "/llm/v1/models", "/llm/llm/health", "/llmhealth"):
            assert get(path).status == 401
        for key, status in {"secret-1": 200, "secret-2": 200, "secret-3": 401}.items():
            assert get("/llm/v1/models", authorization=f"Bearer {key}").status == status
        asks = {"origin": "https://a.example", "access_control_request_method": "POST"}
        allowed = get("/v1/models", "OPTIONS", **asks)
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert get("/v1/models", origin="https://a.example").headers["access-control-allow-origin"]  # and its 401
        other = get("/v1/models", "OPTIONS", **(asks | {"origin": "https://b.example"}))
        assert (other.status, other.headers["access-control-allow-origin"]) == (400, None)
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" not in plain.recv(1000)
        assert get("/health").status == 200
    finally:
        assert stop(live) == 0


def test_files_that_are_no_certificate(tmp_path):
    (tmp_path / "cert").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert "TLS cannot be served with" in refusal(tmp_path, *MODEL, "--port=0", f"--ssl-certfile={tmp_path / 'cert'}")
