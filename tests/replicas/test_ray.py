"""Replicas on Ray Serve: sessions, prompts that begin alike, deaths, updates and scaling (make test-ray)."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import RUNS_LONG
from tests.replicas.cluster import LICENCE, SECONDS, running
from tests.serve.live import free_port

pytestmark = pytest.mark.ray
# Ray's own proxies with our router, and HAProxy, which streams straight from the replicas and takes no router of ours.
PROXIES = {
    "ray": {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.ray_routing.middlewares"},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "hdr(x-session-id)"},
}
only_ray = pytest.mark.parametrize("cluster", ["ray"], indirect=True)
REQUESTS = 1000 if RUNS_LONG else 100  # during an update
LONG = 2000  # tokens, seconds of a stream


@pytest.fixture(scope="module", params=PROXIES)
def cluster(request):
    """Two replicas."""
    ports = {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
    with running(PROXIES[request.param] | ports) as cluster:
        cluster.server.pop("autoscaling_config")
        if request.param == "haproxy":
            cluster.server.pop("request_router_config")
        cluster.server["num_replicas"] = 2
        cluster.deploy()
        cluster.wait_until(lambda: cluster.is_up(2))
        yield cluster


def session_of_each(cluster, count: int = 2) -> list[str]:
    """A session of each replica: those whose replicas count different requests."""
    by_count = {}
    for number in range(40):
        session = f"session-{number}"
        cluster.complete(session)
        by_count = {cluster.metric("request_success_total", other): other for other in {*by_count.values(), session}}
        if len(by_count) == count:
            break
    return list(by_count.values())


def test_sessions_stay_where_they_are_and_both_replicas_answer(cluster):
    before = {session: cluster.metric("prompt_tokens_total", session) for session in session_of_each(cluster)}
    assert len(before) == 2
    for session in before:
        for _ in range(5):
            assert cluster.complete(session)["choices"][0]["text"].split()[:2] == ["Work", "or"]
    tokens = cluster.complete()["usage"]["prompt_tokens"]
    gains = [cluster.metric("prompt_tokens_total", session) - count for session, count in before.items()]
    assert sorted(gains) == [5 * tokens, 6 * tokens]


def test_a_client_that_leaves_ends_its_request(cluster):
    body = {"prompt": LICENCE, "max_tokens": 4000, "ignore_eos": True, "stream": True, "speculation": False}
    session = {"x-session-id": "leaves"}
    with httpx.stream("POST", f"{cluster.base}/v1/completions", json=body, headers=session, timeout=SECONDS) as answer:
        lines = answer.iter_lines()  # whose end would close the connection
        next(lines)
        assert cluster.metric("num_requests_running", "leaves") == 1
    cluster.wait_until(lambda: cluster.metric("num_requests_running", "leaves") == 0, seconds=2)


@only_ray
def test_turns_of_a_chat_meet_again_without_a_session(cluster):
    def ask(messages):
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        return httpx.post(f"{cluster.base}/v1/chat/completions", json=body, timeout=SECONDS).json()

    system = {"role": "system", "content": "Recite."}
    for number in range(8):
        chat = [system, {"role": "user", "content": f"{number} {LICENCE} " * 12}]
        first = ask(chat)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        chat += [first["choices"][0]["message"] | {"role": "assistant"}, {"role": "user", "content": "Go on"}]
        assert ask(chat)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64, number


def test_a_killed_replica_costs_its_own_clients_only_and_they_hear_at_once(cluster):
    sessions = session_of_each(cluster)
    complete = [cluster.stream(session, max_tokens=LONG) for session in sessions]
    (victim, pid), (spared, _) = cluster.replicas().items()
    ends, began = {}, threading.Semaphore(0)

    def read(session):
        once = iter([began.release])
        try:
            ends[session] = cluster.stream(session, lambda: next(once, int)(), max_tokens=LONG)
        except (httpx.TransportError, AssertionError):
            ends[session] = time.monotonic()

    threads = [threading.Thread(target=read, args=[session]) for session in sessions]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert began.acquire(timeout=SECONDS)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(SECONDS)
    (told,) = (end for end in ends.values() if isinstance(end, float))
    assert told - killed < 2
    assert next(end for end in ends.values() if isinstance(end, str)) in complete
    assert complete[0] == complete[1]
    cluster.wait_until(lambda: len(cluster.replicas()) == 2 and victim not in cluster.replicas())
    assert spared in cluster.replicas()
    cluster.wait_until(lambda: cluster.is_up(2))


@only_ray
def test_a_replica_whose_engine_has_died_is_replaced(cluster):
    (victim, pid), _ = cluster.replicas().items()
    children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    (engine,) = (int(child) for listed in children for child in listed)
    assert "engine_process" in Path(f"/proc/{engine}/cmdline").read_text()
    os.kill(engine, signal.SIGKILL)
    cluster.wait_until(lambda: victim not in cluster.replicas() and cluster.is_up(2))
    for _ in range(8):
        cluster.complete()


def test_an_update_loses_no_request_and_lets_streams_end(cluster):
    complete, short = cluster.stream(max_tokens=LONG), cluster.stream()
    before = cluster.replicas()
    began, streams = threading.Semaphore(0), []
    threads = [
        threading.Thread(target=lambda: streams.append(cluster.stream(None, began.release, max_tokens=LONG)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        assert began.acquire(timeout=SECONDS)
    cluster.app["args"]["flags"].append("--max-n=7")
    cluster.deploy()
    sent = 0
    with ThreadPoolExecutor(4) as pool:
        while sent < REQUESTS or not cluster.is_up(2):
            assert set(pool.map(lambda _: cluster.stream(), range(20))) == {short}
            sent += 20
    for thread in threads:
        thread.join(SECONDS)
    assert streams == [complete] * 2
    assert not before.keys() & cluster.replicas().keys()
    answer = httpx.post(f"{cluster.base}/v1/completions", json={"prompt": "a", "n": 8})
    assert answer.status_code == 400, "the new flag is in force"


@only_ray
@pytest.mark.parametrize(
    ("wanted", "target_requests", "target_cache"), [(3, 2, 1.0), (2, 1000, 1e-3)], ids=["requests", "cache"]
)
def test_load_adds_replicas_and_rest_removes_them(cluster, wanted, target_requests, target_cache):
    policy = {"policy_function": "deploy.ray_scaling:QueueAndCache", "policy_kwargs": {"kv_cache_usage": target_cache}}
    cluster.server.pop("num_replicas", None)
    cluster.server["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": wanted,
        "target_ongoing_requests": target_requests,
        "upscale_delay_s": 1,
        "downscale_delay_s": 1,
        "look_back_period_s": 2,
        "policy": policy,
    }
    cluster.deploy()
    cluster.wait_until(lambda: cluster.is_up(1))
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            cluster.stream(max_tokens=1000)

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask) for _ in range(8)]
        try:
            cluster.wait_until(lambda: len(cluster.replicas()) == wanted)
        finally:
            is_over.set()
        for client in clients:
            client.result(SECONDS)
    cluster.wait_until(lambda: cluster.is_up(1))
