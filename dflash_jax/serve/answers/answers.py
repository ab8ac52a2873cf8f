"""What chats and completions have in common: jobs out of bodies, and the parts that both answers have."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.answers.jobs import Job
from dflash_jax.serve.answers.server_state import ServerState
from dflash_jax.serve.answers.usage import drafted_flags, metrics_of, usage_of
from dflash_jax.serve.engine_link.link_messages import CompletionDelta
from dflash_jax.serve.protocol import ChatCompletionRequest, CompletionRequest, fit_prompt, unknown_fields
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)
Body = ChatCompletionRequest | CompletionRequest
LONGEST_ID = 256  # characters; what the field request_id may have


def new_job(
    state: ServerState, body: Body, request: Request, prefix: str, prompts: Sequence[list[int]], params: SamplingParams
) -> Job:
    """A job of these prompts, cut to what fits.

    Raises:
        APIError: 400, a prompt leaves no room.
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
        logger.debug("fields that nothing is known about: %s", ", ".join(unknown)[:1000])
    return Job(
        id=f"{prefix}-{client_id}",
        client_ids=[client_id] * len(fitted),
        prompts=fitted,
        params=[params] * len(fitted),
        cache_salt=body.cache_salt,
        streams=body.stream,
    )


def log_request(state: ServerState, job: Job, prompt: str | None) -> None:
    """Log a request, if asked to."""
    if state.args.enable_log_requests:
        limit = state.args.max_log_len
        logger.info(
            "Received request %s: prompt: %r, prompt_token_ids: %s, params: %s",
            job.id,
            None if prompt is None else prompt[:limit],
            [token_ids[:limit] for token_ids in job.prompts],
            job.params[0],
        )


def headers_of(state: ServerState, job: Job) -> dict[str, str]:
    """Headers of an answer."""
    (client_id, *_) = job.client_ids
    is_sayable = client_id.isascii() and client_id.isprintable()
    return {"x-request-id": client_id} if state.args.enable_request_id_headers and is_sayable else {}


def costs(state: ServerState, job: Job, *, reasons: bool = False) -> dict[str, Any]:
    """The fields `usage` and `metrics` of an answer that is whole."""
    args = state.args
    usage = usage_of(job, with_cached=args.enable_prompt_tokens_details, with_reasoning=reasons)
    metrics = metrics_of(job, args.per_request_spec_decode_metrics, state.ready.num_speculative_tokens)
    return {"usage": usage} | ({} if metrics is None else {"metrics": metrics})


class TokenSources:
    """The `tokens` of a stream's chunks: each token's text, and whether it was drafted."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=False)

    def of(self, completion: CompletionDelta) -> list[dict[str, Any]]:
        """Of the tokens that have come; a character's text stands with the last of its tokens."""
        return [
            {"text": self._detokenizer.push(token_id), "drafted": drafted}
            for token_id, drafted in zip(completion.token_ids, drafted_flags(completion), strict=True)
        ]


class ChunkBuffer:
    """Holds back what a completion gains until it is worth a chunk.

    Args:
        least: tokens of a chunk, but for the last.
    """

    def __init__(self, least: int):
        self._least = least
        self._held: CompletionDelta | None = None

    def push(self, completion: CompletionDelta) -> CompletionDelta | None:
        """All that is held and this, if it is enough."""
        self._held = completion if self._held is None else _joined(self._held, completion)
        if len(self._held.token_ids) < self._least and completion.finish_reason is None:
            return None
        held, self._held = self._held, None
        return held


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None if first.logprobs is None else [*first.logprobs, *(second.logprobs or ())]
    return CompletionDelta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        rounds=first.rounds + second.rounds,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        error=second.error,
    )
