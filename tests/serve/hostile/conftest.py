"""A server under attack, and a client whose stream must go on unharmed."""

import http.client
import json
import threading

import pytest

from tests.serve.hostile.attack import KEYS, NORMAL, PATIENCE
from tests.serve.live import NAME, resident_megabytes, serving

PAUSE = 0.5  # seconds between two streams of the neighbour, which would take a core for all of a slow attack
GROWTH = 250  # megabytes that a process may hold more after all of this,
PROGRAM = 25  # not counting those of each step that is compiled while it serves
FLAGS = (
    f"--served-model-name={NAME}",
    "--max-num-seqs=4",
    "--num-speculative-tokens=15",  # other lengths would be more programs to compile
    "--request-header-timeout=2",
    "--request-body-timeout=3",
    *(f"--api-key={key}" for key in KEYS),
)


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """A server with keys and short timeouts; at the end it is idle, has not grown, and has logged no traceback."""
    with serving(tmp_path_factory.mktemp("hostile"), *FLAGS) as live:
        assert live.post("/v1/completions", NORMAL | {"structured_outputs": {"regex": "[a-z]+"}}, KEYS[0])[0] == 200
        live.expected = live.post("/v1/completions", NORMAL, KEYS[0])[1]["choices"][0]["text"]
        pids = live.process.pid, live.engine_pid
        before = [resident_megabytes(pid) for pid in pids]
        num_compiles = live.metric("num_compiles_total")
        yield live
        live.wait_until(live.is_idle)
        assert live.is_healthy()
        assert (live.process.pid, live.engine_pid) == pids
        assert "Traceback" not in live.log.read_text()
        growth = [resident_megabytes(pid) - b for pid, b in zip(pids, before, strict=True)]
        programs = PROGRAM * (live.metric("num_compiles_total") - num_compiles)
        assert growth[0] < GROWTH
        assert growth[1] < GROWTH + programs, (
            f"the engine has grown by {growth[1]} MB, of which {programs} are compiled"
        )


@pytest.fixture(autouse=True)
def neighbour(server):
    """A client that streams the same text over and over, during the attack and once after it."""
    texts, stop = [], threading.Event()

    def streams():
        while not stop.is_set():
            texts.append(streamed(server, NORMAL))
            stop.wait(PAUSE)

    thread = threading.Thread(target=streams)
    thread.start()
    yield
    num_during = len(texts)
    stop.set()
    thread.join(PATIENCE)
    if len(texts) == num_during:
        texts.append(streamed(server, NORMAL))
    assert set(texts) == {server.expected}


def streamed(server, body, key=KEYS[0]) -> str:
    """The text of a streamed completion, or what came in its place."""
    address = server.base.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        lines = connection.getresponse().read().decode().split("\n\n")
        *chunks, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) if done == "[DONE]" else done
    except (OSError, ValueError, KeyError) as error:
        return repr(error)
    finally:
        connection.close()
