"""A client's request while it runs in the engine: one or several prompts, each with its completions."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from dflash_jax.base.errors import EngineDeadError, QueueFullError, RequestError
from dflash_jax.base.outputs import Logprob
from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.answers.metrics import Finished
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.engine_link.client import EngineStream
from dflash_jax.serve.engine_link.link_messages import Add, CheckedParams, RequestDelta
from dflash_jax.serve.protocol import APIError

logger = logging.getLogger(__name__)
Round = tuple[int, int]  # drafts verified, tokens emitted


@dataclass(eq=False)
class Job:
    """The prompts that a client wants completed, and the counts of what has come so far.

    Clients choose `id` and `client_ids`, to correlate logs and to abort requests. They may repeat, also among requests
    that run at once: the engine knows requests by the server's own `key`.

    Attributes:
        id: id of the answer.
        client_ids: the id of each prompt that /abort_request takes; prompts may share one.
        prompts: token ids of each prompt.
        params: sampling parameters of each prompt.
        cache_salt: only prompts of the same salt share pages of the prefix cache.
        streams: whether the client wants pieces as they come.
        is_echo_only: whether the one token that the engine makes is not for the client.
        session: the conversation that the client says it belongs to; None if it says nothing.
        constraint: the client's name of the field whose grammar the text follows; None without one.
        key: differs from that of every other job.
        created: Unix time of arrival, seconds.
        started: `time.perf_counter` at arrival.
        first_token: seconds from arrival to the first token; None before it.
        queue: seconds from arrival to the start of the first prefill; None before it.
        num_tokens: tokens emitted, over all completions.
        cached: tokens that the prefix cache had, by the prompt's id in the engine.
        num_reasoning_tokens: tokens of reasoning, over all completions that have ended.
        rounds: rounds of all completions.
        finish_reasons: finish_reason of each completion that has ended.
        prompt_logprobs: of the tokens of each prompt, by the prompt's number; absent until they come, if asked for.
    """

    id: str
    client_ids: list[str]
    prompts: list[list[int]]
    params: list[SamplingParams]
    cache_salt: str | None
    streams: bool
    constraint: str | None = None
    session: str | None = None
    is_echo_only: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    queue: float | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens, over all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that the prefix cache had, over all prompts."""
        return sum(self.cached.values())

    @property
    def num_completions(self) -> int:
        """Number of completions, over all prompts."""
        return sum(params.n for params in self.params)

    @property
    def engine_ids(self) -> list[str]:
        """The id of each prompt in the engine; no other request has it."""
        return [f"{self.key}-{i}" for i in range(len(self.prompts))]

    @property
    def abort_ids(self) -> dict[str, list[str]]:
        """Engine ids by each id that /abort_request may name: the client's ids, and the answer's."""
        by_client: dict[str, list[str]] = {}
        for client_id, engine_id in zip(self.client_ids, self.engine_ids, strict=True):
            by_client.setdefault(client_id, []).append(engine_id)
        return {self.id: self.engine_ids} | by_client

    def engine_requests(self) -> list[Add]:
        """The engine's requests, one for each prompt."""
        return [
            Add(request_id, token_ids, CheckedParams.of(params), self.cache_salt, self.streams)
            for request_id, token_ids, params in zip(self.engine_ids, self.prompts, self.params, strict=True)
        ]

    def explained(self, error: RequestError) -> RequestError | APIError:
        """The engine's refusal, with the client's name of a constraint in place of the engine's."""
        name, _, rest = str(error).partition(" ")
        if self.constraint is None or name.partition(".")[0] != "structured_outputs":
            return error
        return APIError(f"{self.constraint} {rest}", param=self.constraint)

    def take(self, delta: RequestDelta) -> None:
        """Count a delta.

        Raises:
            APIError: 500; the engine could not go on with a completion.
        """
        if self.first_token is None:
            self.first_token, self.queue = delta.first_token_seconds, delta.queue_seconds
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[self.engine_ids.index(delta.request_id)] = delta.prompt_logprobs
        self.cached[delta.request_id] = delta.num_cached_tokens
        for completion in delta.completions:
            self.num_tokens += len(completion.token_ids)
            self.rounds += completion.rounds
            if completion.finish_reason is not None:
                self.finish_reasons.append(completion.finish_reason)
        for completion in delta.completions:
            if completion.error is not None:
                raise APIError(f"the engine has failed to complete this request: {completion.error}", 500)


async def follow(
    state: ServerState, job: Job, patience: float | None = None
) -> AsyncGenerator[tuple[int, RequestDelta] | None, None]:
    """Have the engine serve a job.

    Leaving the generator early aborts what runs.

    Yields:
        The number of a prompt and its next delta; None after `patience` seconds without one.

    Raises:
        RequestError: the job cannot be served.
        QueueFullError: too many requests wait already.
        EngineDeadError: no engine serves, or it has died.
        APIError: 500, a completion has failed; 504, the job took longer than a request may.
    """
    number = {engine_id: i for i, engine_id in enumerate(job.engine_ids)}
    unfinished = "abort"  # finish_reason for /metrics of the completions that have not ended by themselves
    async with state.client.stream(job.engine_requests()) as stream:  # a job refused here is not counted: it never ran
        _register(state, job)
        try:
            async for delta in _deltas(state, job, stream, patience):
                yield None if delta is None else (number[delta.request_id], delta)
        except RequestError as error:
            unfinished = ""
            raise job.explained(error) from error
        except QueueFullError:
            unfinished = ""
            raise
        except EngineDeadError:
            unfinished = "error"
            raise
        except APIError as error:
            unfinished = "error" if error.status == 500 else "abort"  # siblings of a failed completion end with it
            raise
        finally:
            _unregister(state, job)
            if unfinished:
                _observe(state, job, unfinished)


async def without_keepalives(
    deltas: AsyncIterator[tuple[int, RequestDelta] | None],
) -> AsyncIterator[tuple[int, RequestDelta]]:
    """Drop the None items of `follow`, which only mark a quiet interval."""
    async for delta in deltas:
        if delta is not None:
            yield delta


async def _deltas(
    state: ServerState, job: Job, stream: EngineStream, patience: float | None
) -> AsyncIterator[RequestDelta | None]:
    """The deltas of a stream, each counted; None after `patience` seconds without one."""
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
    """Let /abort_request find the job."""
    for abort_id, engine_ids in job.abort_ids.items():
        state.running.setdefault(abort_id, []).extend(engine_ids)


def _unregister(state: ServerState, job: Job) -> None:
    """The job has ended, or its client has left; other jobs of the same ids stay."""
    for abort_id, engine_ids in job.abort_ids.items():
        others = [engine_id for engine_id in state.running[abort_id] if engine_id not in engine_ids]
        if others:
            state.running[abort_id] = others
        else:
            del state.running[abort_id]


def turn_line(job: Job, reasons: Sequence[str], seconds: float) -> str:
    """The line of the log about a job that has ended: what its prompt had cached, its speed, and its acceptance.

    Args:
        job: that has ended.
        reasons: the finish reason of each completion.
        seconds: since its arrival.
    """
    of_session = "" if job.session is None else f" (session {job.session})"
    cached = job.num_cached_tokens / max(job.num_prompt_tokens, 1)
    decode = seconds - (job.first_token or 0)
    emitted = [tokens for _, tokens in job.rounds if tokens]
    accepted = f", {sum(emitted) / len(emitted):.2f} a round" if emitted else ""
    return (
        f"{job.id}{of_session}: prompt {job.num_prompt_tokens} tokens, {cached:.1%} cached; "
        f"answer {job.num_tokens} tokens, {job.num_tokens / max(decode, 1e-9):.1f} tokens/s{accepted}; "
        f"first token after {job.first_token or seconds:.3f} s; {', '.join(dict.fromkeys(reasons))}"
    )


def _observe(state: ServerState, job: Job, unfinished: str) -> None:
    """Count and log a job that ran; `unfinished` is the reason of completions that have not ended by themselves."""
    num_unfinished = job.num_completions - len(job.finish_reasons)
    reasons, seconds = (*job.finish_reasons, *[unfinished] * num_unfinished), time.perf_counter() - job.started
    if not state.args.disable_log_stats:
        logger.info("%s", turn_line(job, reasons, seconds))
    state.metrics.observe(
        Finished(
            reason=reasons,
            num_prompt_tokens=job.num_prompt_tokens,
            num_tokens=job.num_tokens,
            n=job.num_completions,
            max_tokens=job.params[0].max_tokens,
            queue=job.queue,
            first_token=job.first_token,
            total=seconds,
        )
    )
