"""The server-sent events of a job, which every API renders in its own format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from dflash_jax.serve.answers.chunks import ChunkBuffer
from dflash_jax.serve.answers.jobs import Job, follow
from dflash_jax.serve.answers.requests import Body
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import costs, usage_of
from dflash_jax.serve.engine_link.link_messages import CompletionDelta, RequestDelta
from dflash_jax.serve.http.streaming import DONE, KEEP_ALIVE, Events, event


async def stream(
    state: ServerState,
    job: Job,
    render: Callable[[int, RequestDelta], Iterable[dict[str, Any]]],
    last: Callable[[], Iterable[dict[str, Any]]] = tuple,
) -> Events:
    """The events of a job: what `render` makes of its deltas, what `last` makes at the end, and `[DONE]`.

    `render` gets the number of a prompt and its next delta. Comments keep the connection alive while nothing comes.
    Closing the generator aborts what runs. Errors are those of `follow`.
    """
    async with aclosing(follow(state, job, state.args.sse_keep_alive_interval or None)) as deltas:
        async for prompt_and_delta in deltas:
            if prompt_and_delta is None:
                yield KEEP_ALIVE
                continue
            for body in render(*prompt_and_delta):
                yield event(body)
    for body in last():
        yield event(body)
    yield DONE


def openai_stream(
    state: ServerState,
    body: Body,
    job: Job,
    head: dict[str, Any],
    render: Callable[[int, CompletionDelta], Iterable[dict[str, Any]]],
    *,
    with_reasoning: bool = False,
) -> Events:
    """The events of OpenAI's APIs: chunks of at least `--stream-interval` tokens, and `usage` where it is asked for.

    Args:
        state: of the server.
        body: of the request.
        job: of the request.
        head: the fields that all chunks have.
        render: the further fields of each chunk, from a prompt's number and what one of its completions has gained.
        with_reasoning: whether the usage at the end tells the tokens of reasoning.
    """
    buffers: dict[tuple[int, int], ChunkBuffer] = {}
    with_cached, forced = state.args.enable_prompt_tokens_details, state.args.enable_force_include_usage

    def chunks(prompt: int, delta: RequestDelta) -> Iterator[dict[str, Any]]:
        for completion in delta.completions:
            key = prompt, completion.index
            held = buffers.setdefault(key, ChunkBuffer(state.args.stream_interval)).push(completion)
            for fields in () if held is None else render(prompt, held):
                usage = (
                    {"usage": usage_of(job, with_cached=with_cached)} if forced or body.continuous_usage_stats else {}
                )
                yield head | fields | usage

    def last() -> Iterator[dict[str, Any]]:
        if forced or body.include_usage:
            wants = {"with_reasoning": with_reasoning, "with_meta_info": body.return_meta_info}
            yield head | {"choices": []} | costs(state, job, **wants)

    return stream(state, job, chunks, last)


def head_of(state: ServerState, job: Job, kind: str) -> dict[str, Any]:
    """The fields that OpenAI's answers and chunks begin with; `kind` is their `object`."""
    return {"id": job.id, "object": kind, "created": job.created, "model": state.model}
