"""What server and engine process say to each other: msgpack, typed on both ends, length first. Nothing is unpickled."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dflash_jax.base.values import EngineStats, Logprob, SamplingParams

HEADER = 4  # bytes of a message's length, big-endian
CallName = Literal["flush_cache", "start_profile", "stop_profile"]


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of what is sent; on the wire, the class's name and then the fields."""


class Start(Message):
    """The first message: what to load. `args` are options of `EngineArgs`."""

    model: str
    draft_model: str | None
    args: dict[str, Any]
    log_level: str


class Add(Message):
    """A request. With `streams` its pieces are sent as they come, otherwise the whole at the end."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    streams: bool


class Abort(Message):
    """End a request now; it ends with finish_reason "abort"."""

    request_id: str


class Call(Message):
    """Do something between two steps; answered by a `Reply` of the same number."""

    number: int
    name: CallName
    argument: str = ""


class Ready(Message):
    """The engine serves.

    Attributes:
        max_model_len: most tokens of prompt and completion.
        vocab_size: V.
        num_speculative_tokens: most drafts of a round; 0 without a drafter.
        kv_tokens: tokens that the KV cache holds.
    """

    max_model_len: int
    vocab_size: int
    num_speculative_tokens: int
    kv_tokens: int


class CompletionDelta(msgspec.Struct, array_like=True):
    """What a completion has gained since it was last heard of.

    Attributes:
        rounds: (drafts verified, tokens emitted) of each round. The last token of a round is the target's own; those
            before it were drafted. The first token of a completion comes from prefill and belongs to no round.
        finish_reason: as `CompletionOutput.finish_reason`, "error" included, with the cause in `error`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    rounds: list[tuple[int, int]]
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None


class RequestDelta(msgspec.Struct, array_like=True):
    """What a request has gained.

    Attributes:
        completions: those that have changed.
        prompt_logprobs: with the first delta that has tokens, if asked for.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        queue_seconds: from arrival to admission; None while it waits.
        first_token_seconds: from arrival to the first token.
    """

    request_id: str
    completions: list[CompletionDelta]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None


class Outputs(Message):
    """What a step brought."""

    deltas: list[RequestDelta]
    stats: EngineStats


class Refused(Message):
    """A request cannot be served, or not any further: the class of the error and its sentence."""

    request_id: str
    kind: str
    message: str


class Reply(Message):
    """The end of a `Call`; `error` is None if it went well."""

    number: int
    error: str | None = None


class Failed(Message):
    """The engine could not start, or has stopped for good; the process ends."""

    kind: str
    message: str


ToEngine = Start | Add | Abort | Call
FromEngine = Ready | Outputs | Refused | Reply | Failed
