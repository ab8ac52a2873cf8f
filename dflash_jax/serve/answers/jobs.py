"""A request of a client on its way through the engine: one or several prompts, each with its completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from dflash_jax.base.errors import EngineDeadError, QueueFullError, RequestError
from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.answers.metrics import Finished
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.engine_link.client import EngineStream
from dflash_jax.serve.engine_link.link_messages import Add, RequestDelta
from dflash_jax.serve.protocol import APIError

Round = tuple[int, int]  # drafts verified, tokens emitted


@dataclass(eq=False)
class Job:
    """What a client asked for, and what has come of it.

    Attributes:
        id: as the answer has it.
        client_ids: of each prompt, as the client chose it, for /abort_request; prompts may share one.
        prompts: token ids of each.
        params: of each prompt.
        streams: whether the client wants pieces.
        first_token: seconds from arrival to the first token; None before it.
        queue: seconds from arrival to the start of the first prefill.
        finish_reasons: of the completions that have ended.
    """

    id: str
    client_ids: list[str]
    prompts: list[list[int]]
    params: list[SamplingParams]
    cache_salt: str | None
    streams: bool
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    queue: float | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    rounds: list[Round] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_completions(self) -> int:
        """Of all prompts."""
        return sum(params.n for params in self.params)

    @property
    def engine_ids(self) -> list[str]:
        """Of each prompt, in the engine."""
        return [self.id] if len(self.prompts) == 1 else [f"{self.id}-{i}" for i in range(len(self.prompts))]

    @property
    def known_ids(self) -> dict[str, list[str]]:
        """Ids in the engine by the ids that clients know: their own, and that of the answer."""
        known: dict[str, list[str]] = {}
        for client_id, engine_id in zip(self.client_ids, self.engine_ids, strict=True):
            known.setdefault(client_id, []).append(engine_id)
        return {self.id: self.engine_ids} | known

    def engine_requests(self) -> list[Add]:
        """What the engine is asked; in the order of the prompts."""
        return [
            Add(request_id, token_ids, params, self.cache_salt, self.streams)
            for request_id, token_ids, params in zip(self.engine_ids, self.prompts, self.params, strict=True)
        ]

    def take(self, delta: RequestDelta) -> None:
        """Count what has come.

        Raises:
            APIError: 500; the engine could not go on with a completion.
        """
        if self.first_token is None:
            self.first_token, self.queue = delta.first_token_seconds, delta.queue_seconds
        if delta.finished:
            self.num_cached_tokens += delta.num_cached_tokens
        for completion in delta.completions:
            self.num_tokens += len(completion.token_ids)
            self.rounds += completion.rounds
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)
            if completion.error is not None:
                raise APIError(f"the engine has failed to complete this request: {completion.error}", 500)


async def follow(
    state: ServerState, job: Job, patience: float | None = None
) -> AsyncGenerator[tuple[int, RequestDelta] | None, None]:
    """What the engine says of a job, with the number of the prompt; None where it says nothing for `patience` seconds.

    Leaving early aborts what runs.

    Raises:
        RequestError: it cannot be served.
        QueueFullError: too many wait already.
        EngineDeadError: there is no engine, or it has died.
        APIError: 500, a completion has failed; 504, it took longer than a request may.
    """
    number = {engine_id: i for i, engine_id in enumerate(job.engine_ids)}
    cut_off = "abort"  # why completions that have not ended are heard of no more
    async with state.client.stream(job.engine_requests()) as stream:  # what is refused here has never run
        _register(state, job)
        try:
            async for delta in _deltas(state, job, stream, patience):
                yield None if delta is None else (number[delta.request_id], delta)
        except (RequestError, QueueFullError):
            cut_off = ""
            raise
        except EngineDeadError:
            cut_off = "error"
            raise
        finally:
            _forget(state, job)
            if cut_off:
                _observe(state, job, cut_off)


async def told(news: AsyncIterator[tuple[int, RequestDelta] | None]) -> AsyncIterator[tuple[int, RequestDelta]]:
    """The same without what is None."""
    async for each in news:
        if each is not None:
            yield each


async def _deltas(
    state: ServerState, job: Job, stream: EngineStream, patience: float | None
) -> AsyncIterator[RequestDelta | None]:
    """What comes of a stream, counted; None where nothing does for `patience` seconds."""
    limit, last = state.args.limits.request_timeout, job.started
    while stream.unfinished:
        left = None if limit is None else job.started + limit - time.perf_counter()
        if left is not None and left <= 0:
            raise APIError(f"the request took longer than {limit:g} s; ask for less.", 504, type="TimeoutError")
        waits = [seconds for seconds in (patience, left) if seconds is not None]
        delta = await stream.get(min(waits, default=None))
        if delta is not None:
            job.take(delta)
            now = time.perf_counter()
            if job.streams and last != job.started:
                state.metrics.observe_chunk(now - last, sum(len(c.token_ids) for c in delta.completions))
            last = now
        if delta is not None or patience is not None:
            yield delta


def _register(state: ServerState, job: Job) -> None:
    """Let clients abort the job."""
    for known, engine_ids in job.known_ids.items():
        state.running.setdefault(known, []).extend(engine_ids)


def _forget(state: ServerState, job: Job) -> None:
    """The job has ended, or its client has left."""
    for known, engine_ids in job.known_ids.items():
        left = [engine_id for engine_id in state.running[known] if engine_id not in engine_ids]
        if left:
            state.running[known] = left
        else:
            del state.running[known]


def _observe(state: ServerState, job: Job, cut_off: str) -> None:
    """Count a job that was run."""
    num_cut_off = job.num_completions - len(job.finish_reasons)
    state.metrics.observe(
        Finished(
            reason=(*job.finish_reasons, *[cut_off] * num_cut_off),
            num_prompt_tokens=job.num_prompt_tokens,
            num_tokens=job.num_tokens,
            n=job.num_completions,
            max_tokens=job.params[0].max_tokens,
            queue=job.queue,
            first_token=job.first_token,
            whole=time.perf_counter() - job.started,
        )
    )
