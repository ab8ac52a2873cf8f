"""From the body of a chat or a completion to its job: token ids, the job's ids, and its line in the log."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fastapi import Request

from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.answers.jobs import Job
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    fit_prompt,
    prompt_too_long,
    unknown_fields,
)

logger = logging.getLogger(__name__)
Body = ChatCompletionRequest | CompletionRequest
# In which opencode and routers, Codex, and Claude Code name the conversation.
SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
LONGEST_ID = 256  # characters of an X-Request-Id that are kept: the limit of the field request_id


def encode(
    state: ServerState, text: str, what: str, *, add_special_tokens: bool = True, is_truncated: bool = False
) -> list[int]:
    """Token ids of a prompt's text.

    A text that surely has more tokens than the model takes is refused before it is tokenised, which takes seconds for
    a body of 16 MiB.

    Args:
        state: of the server.
        text: of one prompt.
        what: what needs the tokenizer, for the error.
        add_special_tokens: whether to add those that the model expects around a text.
        is_truncated: whether the request lets its prompt be cut; then all of the text is tokenised.

    Raises:
        APIError: 400, the text is too long; 503, no engine serves.
        RequestError: the model has no tokenizer.
    """
    tokenizer, max_model_len = state.renderer.need_tokenizer(what), state.ready.max_model_len
    lower_bound = tokenizer.least_tokens(text)
    if lower_bound >= max_model_len and not is_truncated:
        raise prompt_too_long(f"at least {lower_bound}", max_model_len)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def new_job(
    state: ServerState, body: Body, request: Request, prefix: str, prompts: Sequence[list[int]], params: SamplingParams
) -> Job:
    """A job of these prompts, each cut as the body asks; the id of its answer begins with `prefix`.

    Raises:
        APIError: 400, a prompt leaves no room for an answer; 503, no engine serves.
    """
    header = request.headers.get("x-request-id", "")[:LONGEST_ID]
    client_id = body.given_id or header or uuid.uuid4().hex
    fitted = [
        fit_prompt(
            token_ids,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            max_tokens=params.max_tokens,
            max_model_len=state.ready.max_model_len,
        )
        for token_ids in prompts
    ]
    if unknown := unknown_fields(body):
        logger.debug("unknown fields of a request: %s", ", ".join(unknown)[:1000])
    return Job(
        id=f"{prefix}{client_id}",
        client_ids=[client_id] * len(fitted),
        prompts=fitted,
        params=[params] * len(fitted),
        cache_salt=body.cache_salt,
        streams=body.stream,
        session=session_of(request),
        constraint=next((demand.place for demand in body.demands()), None),
    )


def session_of(request: Request) -> str | None:
    """The conversation that a request says it belongs to; None if it says nothing that a line of the log may hold."""
    session = next(filter(None, map(request.headers.get, SESSION_HEADERS)), "")
    return session[:LONGEST_ID] if session.isascii() and session.isprintable() and session else None


def log_request(state: ServerState, job: Job, prompt: str | None) -> None:
    """Log a request if `--enable-log-requests` says so; `prompt` is its text, None if it is token ids."""
    if state.args.enable_log_requests:
        limit = state.args.max_log_len
        logger.info(
            "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
            job.id,
            None if prompt is None else prompt[:limit],
            [token_ids[:limit] for token_ids in job.prompts],
            job.params[0],
        )


def rendered_prompts(state: ServerState, job: Job) -> list[dict[str, Any]]:
    """What a job would ask of the engine, one entry a prompt, under the names of vLLM's `GenerateRequest`.

    Routers look up prefixes by these token ids, which only the server that has the chat template can make.
    """
    return [
        {
            "request_id": job.id,
            "model": state.model,
            "token_ids": token_ids,
            "sampling_params": {
                f.name: value for f in fields(params) if (value := getattr(params, f.name)) != f.default
            },
            "stream": job.streams,
            "cache_salt": job.cache_salt,
        }
        for token_ids, params in zip(job.prompts, job.params, strict=True)
    ]


def response_headers(state: ServerState, job: Job) -> dict[str, str]:
    """X-Request-Id with the client's id if `--enable-request-id-headers` says so; not if it is not printable ASCII."""
    (client_id, *_) = job.client_ids
    is_printable = client_id.isascii() and client_id.isprintable()
    return {"x-request-id": client_id} if state.args.enable_request_id_headers and is_printable else {}
