"""`EngineClient` against an engine that says what a test wants, at the other end of a socket pair."""

import asyncio
import functools
import socket

import msgspec
import pytest

from dflash_jax.base.errors import EngineDeadError, QueueFullError, RequestError
from dflash_jax.base.outputs import EngineStats
from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.engine_link import client as client_module
from dflash_jax.serve.engine_link.client import EngineClient, added
from dflash_jax.serve.engine_link.link_messages import (
    HEADER,
    Abort,
    Add,
    Call,
    CompletionDelta,
    Failed,
    Outputs,
    Ready,
    Refused,
    Reply,
    RequestDelta,
    Start,
    ToEngine,
)

READY = Ready(max_model_len=64, vocab_size=8, num_speculative_tokens=3, kv_tokens=1024, max_num_seqs=2)
PATIENCE = 20


class Engine:
    """The engine at the other end of the socket pair."""

    async def connect(self, theirs: socket.socket) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=theirs)
        self.decoder = msgspec.msgpack.Decoder(ToEngine)

    async def hear(self):
        size = int.from_bytes(await self.reader.readexactly(HEADER), "big")
        return self.decoder.decode(await self.reader.readexactly(size))

    def say(self, *messages) -> None:
        self.writer.write(b"".join(map(framed, messages)))

    def die(self) -> None:
        self.writer.close()


class Client(EngineClient):
    """A client that starts the engines of a test, one after the other."""

    def __init__(self, *engines: Engine, restarts: bool = False):
        super().__init__(Start("model", None, {}, "info"), restarts=restarts)
        self.engines = list(engines)

    async def _spawn(self):
        ours, theirs = socket.socketpair()
        await self.engines.pop(0).connect(theirs)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._start)
        return reader


def framed(message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER, "big") + body


def delta(request_id: str, text: str, *, finished: bool = False) -> RequestDelta:
    completion = CompletionDelta(0, text, [1], None, [], "stop" if finished else None, None, None)
    return RequestDelta(request_id, [completion], finished, None, 0, 0.0, 0.0)


def outputs(*deltas: RequestDelta, **stats) -> Outputs:
    return Outputs(list(deltas), EngineStats(**stats))


def add(request_id: str, n: int = 1) -> Add:
    return Add(request_id, [1, 2], SamplingParams(n=n), None, True)


async def until(holds) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.001)


def with_engine(test):
    """Run a test as a coroutine, with a client and its one engine, which is ready."""

    @functools.wraps(test)
    def run():
        async def run_test():
            engine = Engine()
            client = Client(engine)
            task = asyncio.create_task(client.run())
            await until(lambda: hasattr(engine, "decoder"))
            assert isinstance(await engine.hear(), Start)
            engine.say(READY)
            await until(lambda: client.ready is not None)
            async with asyncio.timeout(PATIENCE):
                await test(client, engine)
            engine.die()
            await task
            assert client.num_requests == 0

        asyncio.run(asyncio.wait_for(run_test(), PATIENCE))

    del run.__wrapped__  # or pytest would look for fixtures
    return run


@with_engine
async def test_messages_in_pieces_and_together(client, engine):
    async with client.stream([add("a")]) as stream:
        engine_id = (await engine.hear()).request_id
        data = b"".join(framed(outputs(delta(engine_id, letter))) for letter in "hello")
        data += framed(outputs(delta(engine_id, "!" * 100_000, finished=True)))
        for start in range(0, 200):
            engine.writer.write(data[start : start + 1])
            await engine.writer.drain()
            await asyncio.sleep(0)
        engine.writer.write(data[200:])
        texts = []
        while stream.unfinished:
            texts.append((await stream.get()).completions[0].text)
        assert texts == [*"hello", "!" * 100_000]


@with_engine
async def test_streams_hear_of_their_own_requests_alone(client, engine):
    async with client.stream([add("a"), add("b")]) as both, client.stream([add("c")]) as other:
        ids = [(await engine.hear()).request_id for _ in "abc"]
        engine.say(
            outputs(*[delta(engine_id, name, finished=True) for engine_id, name in zip(ids, "abc", strict=True)])
        )
        deltas = [await both.get(), await both.get(), await other.get()]
        assert [d.request_id for d in deltas] == ["a", "b", "c"]
        assert [d.completions[0].text for d in deltas] == ["a", "b", "c"]
        assert not both.unfinished
        assert await both.get(0.01) is None


@with_engine
async def test_late_messages_about_a_client_that_has_left_are_dropped(client, engine):
    async with client.stream([add("first")]):
        assert (await engine.hear()).request_id == "first"
    assert await engine.hear() == Abort("first")
    async with client.stream([add("second")]) as stream:
        await engine.hear()
        engine.say(
            outputs(delta("first", "the first's")),
            Refused("first", "RequestError", "the first's"),
            outputs(delta("first", "", finished=True), delta("second", "the second's", finished=True)),
        )
        assert (await stream.get()).completions[0].text == "the second's"


@with_engine
async def test_a_request_is_sent_when_the_engine_has_read_those_before(client, engine):
    """So a burst of long prompts waits with its clients, and not in the memory of the socket's buffer."""
    long = Add("long", [1] * 4_000_000, SamplingParams(), None, True)
    async with client.stream([long]):

        async def send(name):
            async with client.stream([add(name)]) as stream:
                return (await stream.get()).completions[0].text

        waiting = [asyncio.create_task(send(name)) for name in "ab"]
        leaving = asyncio.create_task(send("c"))
        await asyncio.sleep(0.05)
        assert client.num_requests == 1
        leaving.cancel()
        assert [(await engine.hear()).request_id for _ in range(3)] == ["long", "a", "b"]
        engine.say(outputs(*[delta(name, f"{name}'s", finished=True) for name in "ab"]))
        assert await asyncio.gather(*waiting) == ["a's", "b's"]
        assert client.num_requests == 1


@with_engine
async def test_an_error_of_an_unknown_kind_and_a_reply_to_nobody(client, engine):
    """An engine of another version may say either; neither ends the server's side."""
    engine.say(Reply(12345))
    async with client.stream([add("a")]) as stream:
        await engine.hear()
        engine.say(Refused("a", "ErrorOfTomorrow", "no"))
        with pytest.raises(RuntimeError, match="no"):
            await stream.get()


@with_engine
async def test_leaving_aborts_what_has_not_ended(client, engine):
    async with client.stream([add("a"), add("b")]) as stream:
        ids = [(await engine.hear()).request_id for _ in "ab"]
        engine.say(outputs(delta(ids[0], "", finished=True)))
        await stream.get()
    assert await engine.hear() == Abort(ids[1])
    client.abort("b")  # of somebody who is gone: ignored
    client.abort("unheard of")
    async with client.stream([add("c")]):
        assert isinstance(await engine.hear(), Add)
        client.abort("c")
        assert isinstance(await engine.hear(), Abort)


@with_engine
async def test_refusals(client, engine):
    kinds = {"RequestError": RequestError, "QueueFullError": QueueFullError, "RuntimeError": RuntimeError}
    for name, kind in kinds.items():
        async with client.stream([add("a"), add("b")]) as stream:
            ids = [(await engine.hear()).request_id for _ in "ab"]
            engine.say(Refused(ids[0], name, "no"))
            with pytest.raises(kind, match="no"):
                await stream.get()
        assert await engine.hear() == Abort(ids[1])


@with_engine
async def test_a_full_queue_is_told_without_the_engine(client, engine):
    """A step may take seconds, and the engine reads between steps."""
    engine.say(msgspec.structs.replace(READY, max_num_queued_seqs=1))
    await until(lambda: client.ready.max_num_queued_seqs == 1)
    with pytest.raises(RequestError, match=r"has 4 completions, and at most 2 may run and 1 wait"):
        async with client.stream([add("a", n=2), add("b", n=2)]):
            pass
    async with client.stream([add("a", n=2)]) as first:
        engine_id = (await engine.hear()).request_id
        with pytest.raises(QueueFullError, match=r"2 sequences run or wait, 2 more have come"):
            async with client.stream([add("b", n=2)]):
                pass
        completion = CompletionDelta(1, "", [1], None, [], "stop", None, None)
        engine.say(outputs(RequestDelta(engine_id, [completion], False, None, 0, 0.0, 0.0)))
        await first.get()
        async with client.stream([add("b", n=2)]):
            assert isinstance(await engine.hear(), Add)
    async with client.stream([add("c", n=2), add("d")]):  # those that have left do not count
        pass


@with_engine
async def test_calls(client, engine):
    async def answer(error):
        call = await engine.hear()
        assert call == Call(call.number, "flush_cache")
        engine.say(Reply(call.number, error))

    await asyncio.gather(client.call("flush_cache"), answer(None))
    with pytest.raises(RequestError, match="flush_cache: not now"):
        await asyncio.gather(client.call("flush_cache"), answer("not now"))
    gone = asyncio.create_task(client.call("flush_cache"))
    call = await engine.hear()
    gone.cancel()
    await asyncio.wait({gone})
    engine.say(Reply(call.number))  # nobody waits for it
    await asyncio.gather(client.call("flush_cache"), answer(None))


UNKNOWN = len(b"\xc1\xc1").to_bytes(HEADER, "big") + b"\xc1\xc1"  # a message that is no msgpack


@pytest.mark.parametrize(
    ("last_words", "dies", "cause"),
    [
        (b"", True, "has died"),
        (framed(Failed("EngineDeadError", "NaN all over")), False, "NaN all over"),
        (b"\0\0\1", True, "has died"),
        (UNKNOWN, False, "could not be handled"),
    ],
    ids=["silent", "says so", "half a message", "no msgpack"],
)
def test_death_is_told_to_everybody_at_once(last_words, dies, cause):
    """Also if the engine says so and stays, ends in the middle of a message, or sends what cannot be decoded."""

    async def scenario():
        engine = Engine()
        client = Client(engine)
        changes = []
        task = asyncio.create_task(client.run(lambda: changes.append(client.ready)))
        await until(lambda: hasattr(engine, "decoder"))
        engine.say(READY)
        await until(lambda: client.ready is not None)
        async with client.stream([add("a")]) as one, client.stream([add("b")]) as two:
            call = asyncio.create_task(client.call("flush_cache"))
            engine.say(outputs(num_running=2, kv_cache_usage=0.5, num_prompt_tokens=7))
            await until(lambda: client.stats.num_running == 2)
            engine.writer.write(last_words)
            if dies:
                engine.die()
            for stream in (one, two):
                with pytest.raises(EngineDeadError, match=cause):
                    await stream.get()
            with pytest.raises(RequestError, match=cause):
                await call
        async with asyncio.timeout(PATIENCE):
            await task
        with pytest.raises(EngineDeadError, match=cause):
            async with client.stream([add("c")]):
                pass
        with pytest.raises(EngineDeadError, match=cause):
            await client.call("flush_cache")
        client.abort("a")
        assert changes == [READY, None]
        assert client.failed_at_start is None
        assert client.stats == EngineStats(num_prompt_tokens=7)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_an_engine_that_comes_back(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_DELAY", 0.0)

    async def scenario():
        first, broken, second = Engine(), Engine(), Engine()
        client = Client(first, broken, second, restarts=True)
        task = asyncio.create_task(client.run())
        for engine in (first, broken, second):
            await until(lambda engine=engine: hasattr(engine, "decoder"))
            if engine is broken:
                engine.die()  # before it was ready: not the server's end, since there was one that was
                continue
            engine.say(READY, outputs(num_prompt_tokens=5, num_accepted_tokens_per_pos=(2, 1)))
            await until(lambda: client.ready is not None)
            async with client.stream([add("a")]) as stream:
                assert isinstance(await engine.hear(), Start)
                engine_id = (await engine.hear()).request_id
                stats = {"num_prompt_tokens": 7, "num_accepted_tokens_per_pos": (2, 1), "num_snapshots": 3}
                engine.say(outputs(delta(engine_id, "x"), **stats))
                await stream.get()
                if engine is first:
                    engine.die()
                    with pytest.raises(EngineDeadError):
                        await stream.get()
        sums = EngineStats(num_prompt_tokens=14, num_accepted_tokens_per_pos=(4, 2), num_snapshots=3)
        assert client.stats == sums  # the dead engine's snapshots are gone with it
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_an_engine_that_cannot_start():
    async def scenario(*words):
        engine = Engine()
        client = Client(engine, restarts=True)  # which would only fail again
        task = asyncio.create_task(client.run())
        await until(lambda: hasattr(engine, "decoder"))
        await engine.hear()  # a socket that is closed with words unread takes along what it has said itself
        engine.say(*words)
        engine.die()
        async with asyncio.timeout(PATIENCE):
            await task
        return client.failed_at_start

    assert asyncio.run(scenario(Failed("ConfigError", "no such option"))).message == "no such option"
    assert "has died" in asyncio.run(asyncio.wait_for(scenario(), PATIENCE)).message


def test_a_process_that_cannot_be_made(monkeypatch):
    pairs, socketpair = [], socket.socketpair

    def remembered():
        pairs.append(socketpair())
        return pairs[-1]

    monkeypatch.setattr(client_module.socket, "socketpair", remembered)
    monkeypatch.setattr(client_module, "ENGINE_PROCESS", ("/nowhere/python",))
    client = EngineClient(Start("model", None, {}, "info"), restarts=False)
    asyncio.run(client.run())
    assert "cannot be started" in client.failed_at_start.message
    *_, of_the_engine = pairs  # those before are the event loop's own
    assert [end.fileno() for end in of_the_engine] == [-1, -1]  # both are closed


def test_sums_of_states():
    first = EngineStats(num_running=1, num_drafts=3, num_accepted_tokens_per_pos=(1, 2))
    second = EngineStats(num_running=2, num_drafts=4, num_accepted_tokens_per_pos=(1,))
    assert added(first, second) == EngineStats(num_running=3, num_drafts=7, num_accepted_tokens_per_pos=(2, 2))
    assert added(EngineStats(), second) == second
