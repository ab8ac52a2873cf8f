"""Jobs and their streams against an engine that follows a script, and what is counted and logged of them."""

import asyncio
import json
import re
from contextlib import aclosing, nullcontext
from dataclasses import replace

import pytest
from starlette.requests import ClientDisconnect

from dflash_jax.base.errors import EngineDeadError, RequestError
from dflash_jax.base.outputs import EngineStats
from dflash_jax.base.values import SamplingParams
from dflash_jax.options.serve_args import Limits, ServeArgs
from dflash_jax.serve.answers.jobs import Job, follow
from dflash_jax.serve.answers.metrics import Metrics, stats_lines
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.engine_link.client import EngineClient
from dflash_jax.serve.engine_link.link_messages import CompletionDelta, Ready, RequestDelta, Start
from dflash_jax.serve.http.streaming import KEEP_ALIVE, EventStream, event
from dflash_jax.serve.protocol import APIError

KEY = "key-0"  # of the one prompt of `a_job` in the engine


class ScriptedClient(EngineClient):
    """A client whose engine follows a script of deltas to hand out, seconds to wait, and an error to die of."""

    def __init__(self, script):
        super().__init__(Start("", None, {}, "info"), restarts=False)
        self.ready = Ready(max_model_len=100, vocab_size=10, num_speculative_tokens=3, kv_tokens=100, max_num_seqs=2)
        self.script, self.aborted, self.player = script, [], None

    async def open(self, stream, requests):
        self._check_engine()
        (request,) = requests
        self._streams[request.request_id], self._num_unfinished[request.request_id] = stream, request.params.n
        self.player = asyncio.ensure_future(self._play(request.request_id))

    def abort(self, request_id):
        self.aborted.append(request_id)

    async def _play(self, request_id):
        for step in self.script:
            await asyncio.sleep(step if isinstance(step, float) else 0)
            if not isinstance(step, float):
                self._deliver(request_id, step)


def completion(text, finish_reason=None, index=0, error=None):
    return CompletionDelta(index, text, [1], None, [], finish_reason, None, error)


def delta(text, finish_reason=None):
    return RequestDelta(KEY, [completion(text, finish_reason)], finish_reason is not None, None, 0, 0.0, 0.0)


def a_state(script, **limits):
    metrics = Metrics(EngineStats, prefix="t:", model="m")
    return ServerState(ServeArgs(limits=Limits(**limits)), None, ScriptedClient(script), metrics, {})


def a_job(n=1):
    return Job("r", ["mine"], [[1, 2]], [SamplingParams(n=n)], cache_salt=None, streams=True, key="key")


async def told_of(state, patience=None, n=1):
    async with aclosing(follow(state, a_job(n), patience)) as deltas:
        async for news in deltas:
            yield KEEP_ALIVE if news is None else event({"text": news[1].completions[0].text})


async def respond(stream, disconnect=None, can_send=True):
    """The bytes that a client gets of a response; it leaves when `disconnect` is set."""
    sent = []

    async def receive():
        await (disconnect or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if not can_send:
            raise OSError
        sent.append(message.get("body", b""))

    await stream({"type": "http", "asgi": {"spec_version": "2.3" if can_send else "2.4"}}, receive, send)
    return b"".join(sent)


def test_silence_is_filled_with_comments():
    async def run():
        state = a_state([delta("a"), 0.2, delta("b", "stop")])
        return await respond(await EventStream.of(told_of(state, 0.03)))

    text = asyncio.run(run())
    assert text.count(KEEP_ALIVE) >= 2
    assert text.replace(KEEP_ALIVE, b"") == event({"text": "a"}) + event({"text": "b"})


def test_an_engine_that_dies_ends_a_stream_with_an_error():
    state = a_state([delta("a"), EngineDeadError("the engine has died.")])

    async def run():
        return await respond(await EventStream.of(told_of(state)))

    first, error, done, rest = asyncio.run(run()).split(b"\n\n")
    assert first == event({"text": "a"}).strip()
    body = json.loads(error.removeprefix(b"data: "))["error"]
    assert body == {"message": "the engine has died.", "type": "ServiceUnavailableError", "param": None, "code": 503}
    assert (done, rest) == (b"data: [DONE]", b"")
    assert not state.running
    assert b'finished_reason="error"' in state.metrics.text()


def test_what_is_refused_at_once_is_no_stream_and_not_counted():
    state = a_state([EngineDeadError("it has died.")])
    state.client.ready = None

    async def run():
        await EventStream.of(told_of(state))

    with pytest.raises(EngineDeadError):
        asyncio.run(run())
    assert not state.running
    assert b"finished_reason=" not in state.metrics.text()


@pytest.mark.parametrize("script", [[delta("a"), 9.0], [9.0]], ids=["begun", "waiting"])
@pytest.mark.parametrize("can_send", [True, False])
def test_who_left_before_the_first_event_is_aborted(script, can_send):
    """Also if the response ends before it has begun to read the events."""
    state = a_state(script)

    async def run():
        gone, events = asyncio.Event(), told_of(state)
        gone.set()
        stream = await EventStream.of(events, patience=0.05)
        with nullcontext() if can_send else pytest.raises(ClientDisconnect):
            await respond(stream, gone, can_send)
        aborted = list(state.client.aborted)
        state.client.player.cancel()
        return aborted

    assert asyncio.run(run()) == [KEY]
    assert not state.running


def test_what_the_engine_refuses_is_not_counted():
    state = a_state([RequestError("the grammar is none.")])

    async def run():
        await EventStream.of(told_of(state))

    with pytest.raises(RequestError):
        asyncio.run(run())
    assert b"finished_reason=" not in state.metrics.text()


def test_a_request_that_takes_too_long_is_ended():
    state = a_state([delta("a"), 9.0], request_timeout=0.2)

    async def run():
        items = [news async for news in told_of(state, 0.05)]
        state.client.player.cancel()
        return items

    with pytest.raises(APIError, match=r"longer than 0\.2 s") as error:
        asyncio.run(run())
    assert error.value.status == 504
    assert state.client.aborted == [KEY]


def test_siblings_of_a_completion_that_fails_have_failed_too():
    """Its client has not left, so they are no aborts; one that had ended before keeps its reason."""
    failed = [completion("", "error", 1, error="no room"), completion("b", "stop", 0), completion("c", None, 2)]
    state = a_state([RequestDelta(KEY, failed, False, None, 0, 0.0, 0.0)])

    async def run():
        return await respond(await EventStream.of(told_of(state, n=3)))

    with pytest.raises(APIError, match="failed to complete this request: no room"):
        asyncio.run(run())
    metrics = state.metrics.text().decode()
    counts = re.findall(r'request_success_total{.*finished_reason="(\w+)".*} (.*)', metrics)
    assert dict(counts) == {"error": "2.0", "stop": "1.0"}


def test_every_prompt_of_a_batch_can_be_aborted_by_its_own_id():
    params = [SamplingParams()] * 2
    job = Job("a", ["a", "b"], [[1], [2]], params, cache_salt=None, streams=False)
    first, second = job.engine_ids
    assert job.abort_ids == {"a": [first], "b": [second]}
    shared = Job("cmpl-x", ["x", "x"], [[1], [2]], params, cache_salt=None, streams=False)
    assert shared.abort_ids == {"x": shared.engine_ids, "cmpl-x": shared.engine_ids}


def test_no_two_jobs_share_an_id_in_the_engine_whatever_their_clients_call_them():
    ids = [
        engine_id for _ in range(3) for engine_id in Job("a", ["a"], [[1]], [SamplingParams()], None, True).engine_ids
    ]
    assert len(set(ids)) == 3


BEFORE = EngineStats(
    num_prompt_tokens=100, num_generation_tokens=50, num_drafts=10, num_draft_tokens=30, num_accepted_tokens=20,
    num_accepted_tokens_per_pos=(10, 6, 4), num_prefix_queries=100, num_prefix_hits=50,
)  # fmt: skip
NOW = replace(
    BEFORE, num_prompt_tokens=120, num_generation_tokens=80, num_drafts=20, num_draft_tokens=60, num_accepted_tokens=35,
    num_accepted_tokens_per_pos=(18, 11, 6), num_prefix_queries=120, num_prefix_hits=55, num_running=3, num_waiting=1,
    kv_cache_usage=0.25,
)  # fmt: skip
SPEC = (
    "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.50 tokens/s, Drafted throughput: 3.00 "
    "tokens/s, Accepted: 15 tokens, Drafted: 30 tokens, Per-position acceptance rate: 0.800, 0.500, 0.200, "
    "Avg Draft acceptance rate: 50.0%"
)


def test_the_log_sums_up_what_happened_in_between():
    first, spec = stats_lines(BEFORE, NOW, 10.0)
    assert first == (
        "Avg prompt throughput: 2.0 tokens/s, Avg generation throughput: 3.0 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    assert spec == SPEC
    assert stats_lines(BEFORE, BEFORE, 10.0) == []


def test_the_log_counts_a_new_engine_from_nothing():
    """Even an engine that has had more prompts than the old one and has emitted less."""
    after = EngineStats(
        num_prompt_tokens=200, num_generation_tokens=30, num_drafts=10, num_draft_tokens=30, num_accepted_tokens=15,
        num_accepted_tokens_per_pos=(8, 5, 2),
    )  # fmt: skip
    first, spec = stats_lines(BEFORE, after, 10.0)
    assert first.startswith("Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 3.0 tokens/s, Running: 0")
    assert spec == SPEC
