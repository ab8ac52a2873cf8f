"""What Ray's controller and proxies run of ours, without a cluster."""

import asyncio
import json
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from dflash_jax.base.errors import ConfigError

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own models use what pydantic has deprecated
    from deploy.ray_routing import MOST_BYTES, PromptSession, SessionRouter, prompt_key
    from deploy.ray_scaling import QueueAndCache
    from deploy.ray_serve import Replicas, build

SYSTEM, HI, YES = ({"role": role, "content": role * 3} for role in ("system", "user", "assistant"))


def key(**body):
    return prompt_key(json.dumps(body).encode())


def test_prompts_that_go_on_have_one_key_and_others_have_others():
    assert key(messages=[SYSTEM, HI]) == key(messages=[SYSTEM, HI, YES, HI], temperature=0)
    assert key(input=[HI]) == key(input=[HI, YES])
    assert key(prompt="a" * 1100) == key(prompt="a" * 1200)
    keys = [
        key(messages=[HI]),
        key(messages=[SYSTEM, HI]),
        key(messages=[SYSTEM, YES]),
        key(system="s", messages=[HI]),
        key(instructions="s", input="a"),
        key(prompt="a"),
        key(prompt=["a", "b"]),
        key(text="b"),
        key(input_ids=[1, 2]),
        key(prompt_cache_key="mine", prompt="a"),
    ]
    assert len({*keys}) == len(keys)
    assert keys[-1] == "mine"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": 7}', b'{"messages": [{"role": 7}]}'])
def test_what_cannot_be_read_has_no_key(body):
    assert prompt_key(body) is None


def sent_on(body: bytes, headers=(), method="POST"):
    """The session and the body that the proxy gets."""
    pieces = [body[i : i + 1_000_000] for i in range(0, max(len(body), 1), 1_000_000)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})
    got = []

    async def proxy(scope, receive, send):
        got.append(dict(scope["headers"]).get(b"x-session-id"))
        got.append([await receive() for _ in range(len(messages))])

    async def receive():
        return waiting.pop(0)

    waiting = list(messages)
    scope = {"type": "http", "method": method, "headers": [*headers]}
    asyncio.run(PromptSession(proxy)(scope, receive, None))
    assert got[1] == messages
    return got[0]


def test_a_session_is_given_to_who_has_none_and_the_body_goes_on_unchanged():
    body = json.dumps({"prompt": "a" * 2_500_000}).encode()
    assert sent_on(body) == prompt_key(body).encode()
    assert sent_on(body, [(b"x-session-id", b"mine")]) == b"mine"
    assert sent_on(b"", method="GET") is None
    assert sent_on(json.dumps({"prompt": "a" * (MOST_BYTES + 1)}).encode()) is None


@dataclass(frozen=True)
class Id:
    unique_id: str


def choose(queues: dict[str, int], session: str) -> str | None:
    """The replica that the router tries first; None if it lets the queues decide."""
    router = SessionRouter.__new__(SessionRouter)
    router.initialize_state(most_ahead=2)
    router._replica_queue_len_cache = {Id(name): queue for name, queue in queues.items()}
    replicas = [SimpleNamespace(replica_id=Id(name)) for name in queues]
    request = SimpleNamespace(metadata=SimpleNamespace(session_id=session), routing_context=SimpleNamespace())
    *first, rest = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    assert rest == replicas
    return first[0][0].replica_id.unique_id if first else None


def test_a_session_has_a_home_until_that_is_far_behind():
    homes = {session: choose({"a": 0, "b": 0, "c": 0}, session) for session in map(str, range(30))}
    assert {*homes.values()} == {"a", "b", "c"}
    assert choose({"a": 0, "b": 0, "c": 0}, "") is None
    session = next(session for session, home in homes.items() if home == "a")
    assert choose({"a": 2, "b": 0, "c": 5}, session) == "a"
    assert choose({"a": 3, "b": 0, "c": 3}, session) == "b"


def test_replicas_are_as_many_as_requests_or_cache_need():
    def wanted(requests, usages, running=2):
        config = SimpleNamespace(get_target_ongoing_requests=lambda: 10)
        context = SimpleNamespace(
            current_num_replicas=running,
            target_num_replicas=running,
            total_num_requests=requests,
            aggregated_metrics={"kv_cache_usage": usages},
            config=config,
        )
        return QueueAndCache(kv_cache_usage=0.5)(context)[0]

    assert wanted(40, {}) == 4
    assert wanted(40, {"a": 0.1, "b": 0.1}) == 4
    assert wanted(10, {"a": 1.0, "b": 0.5}) == 3
    assert wanted(0, {}, running=0) == 0


@pytest.mark.parametrize(
    "flags", [["--port=1"], ["--shutdown-timeout=5"], ["--nonsense"], ["--max-concurrent-requests=7"]]
)
def test_flags_without_effect_are_refused(flags):
    with pytest.raises(ConfigError, match=flags[0].split("=")[0]):
        build(Replicas(flags=flags))


def test_a_replica_gets_the_gpus_that_its_engine_uses():
    def gpus(**args):
        return build(Replicas(**args))._bound_deployment.ray_actor_options["num_gpus"]

    assert gpus() == 1
    assert gpus(flags=["--tensor-parallel-size=4"]) == 4
    assert gpus(gpus=0) == 0
