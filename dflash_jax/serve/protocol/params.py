"""From a body to `SamplingParams` and prompts: the request goes before the server's defaults, these before OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.protocol.chat import ChatCompletionRequest
from dflash_jax.serve.protocol.completion import CompletionRequest
from dflash_jax.serve.protocol.errors import APIError
from dflash_jax.serve.protocol.generate import GenerateRequest, GenerateSampling
from dflash_jax.serve.protocol.sampling import SamplingBody
from dflash_jax.serve.protocol.structured import structured_outputs_params

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what generation_config.json may set


class Limits(Protocol):
    """What one request may ask of the server."""

    @property
    def max_n(self) -> int:
        """Completions of a prompt."""

    @property
    def max_stop_strings(self) -> int:
        """Stop strings."""

    @property
    def max_prompts(self) -> int:
        """Prompts of a body."""

    @property
    def max_logprobs(self) -> int:
        """Alternatives of a token."""


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest, defaults: Mapping[str, Any], limits: Limits
) -> SamplingParams:
    """How to sample a chat or a completion.

    Args:
        request: checked when it was parsed.
        defaults: of the model's generation_config.json, for what the request leaves open; others are ignored.
        limits: of the server.

    Raises:
        APIError: 400; a value is outside its range or a limit, or values exclude each other.
    """
    return _params(request, {}, _names(request), defaults, limits)


def generate_sampling_params(
    request: GenerateRequest, defaults: Mapping[str, Any], limits: Limits
) -> list[SamplingParams]:
    """How to sample each prompt of a `/generate`; see `sampling_params`."""
    more = request.logprob_fields()
    chosen = [_params(each, more, _names(each) | _names(request), defaults, limits) for each in request.sampling_params]
    return chosen if len(chosen) > 1 else chosen * len(request.prompts)


def completion_prompts(request: CompletionRequest | GenerateRequest, limits: Limits) -> list[str | list[int]]:
    """The prompts of a body, texts or token ids, none of them empty.

    Raises:
        APIError: 400; there are too many.
    """
    if isinstance(request, GenerateRequest):
        prompts, name = request.prompts, "input_ids" if request.text is None else "text"
    else:
        given: Any = request.prompt
        is_one = isinstance(given, str) or isinstance(given[0], int)
        prompts, name = [given] if is_one else given, "prompt"
    if len(prompts) > limits.max_prompts:
        message = f"{name} holds {len(prompts)} prompts, more than {limits.max_prompts}: send them in several requests."
        raise APIError(message, param=name)
    return prompts


def fit_prompt(
    token_ids: Sequence[int], *, truncate_prompt_tokens: int | None, max_tokens: int | None, max_model_len: int
) -> list[int]:
    """The tokens of a prompt that are kept, so that it leaves room for an answer.

    Args:
        token_ids: of the whole prompt.
        truncate_prompt_tokens: how many to keep, of its end; -1 keeps as many as leave room for `max_tokens`.
        max_tokens: of `SamplingParams`. What does not fit behind the prompt is not an error: the engine lowers it.
        max_model_len: most tokens of prompt and answer.

    Raises:
        APIError: 400; the prompt leaves no room, or `max_tokens` would not even fit without it.
    """
    if max_tokens is not None and max_tokens > max_model_len:
        message = f"max_tokens={max_tokens} exceeds the model's maximum context length ({max_model_len}): lower it."
        raise APIError(message, param="max_tokens")
    keep = truncate_prompt_tokens
    if keep == -1:
        keep = max(max_model_len - (max_tokens or 1), 1)
    kept = list(token_ids if keep is None else token_ids[-keep:])
    if len(kept) >= max_model_len:
        raise prompt_too_long(str(len(kept)), max_model_len)
    return kept


def prompt_too_long(length: str, max_model_len: int) -> APIError:
    """The refusal of a prompt that leaves no room for an answer; `length` says how many tokens it has."""
    return APIError(
        f"Input length ({length}) exceeds model's maximum context length ({max_model_len}) less the one token "
        "that an answer needs: shorten the prompt, or set truncate_prompt_tokens=-1.",
        param="prompt",
    )


def _params(
    request: ChatCompletionRequest | CompletionRequest | GenerateSampling,
    more: Mapping[str, Any],
    names: Mapping[str, str],
    defaults: Mapping[str, Any],
    limits: Limits,
) -> SamplingParams:
    fields = {"max_tokens": None} | request.sampling_fields() | dict(more)
    _check_limits(fields, names, limits)
    fields |= {name: defaults[name] for name in DEFAULTED if fields[name] is None and name in defaults}
    given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
    try:
        params = SamplingParams(**given, structured_outputs=structured_outputs_params(request.demands()))
    except RequestError as error:
        raise _renamed(error, names) from error
    if params.n > 1 and params.temperature == 0:
        raise APIError(
            f"n={params.n} with temperature=0 would give the same text {params.n} times: "
            "n must be 1 when using greedy sampling, or raise temperature.",
            param="n",
        )
    return params


def _names(request: SamplingBody | GenerateSampling | GenerateRequest) -> dict[str, str]:
    """Fields of `SamplingParams` under the names that the client has used."""
    return {name: own for name, own in request.renamed.items() if own in request.model_fields_set}


def _check_limits(fields: Mapping[str, Any], names: Mapping[str, str], limits: Limits) -> None:
    for name, value, limit in (
        ("n", fields["n"], limits.max_n),
        ("stop", len(fields["stop"]), limits.max_stop_strings),
        ("logprobs", fields.get("logprobs"), limits.max_logprobs),
        ("prompt_logprobs", fields.get("prompt_logprobs"), limits.max_logprobs),
    ):
        if value is not None and value > limit:
            name, what = names.get(name, name), " strings" if name == "stop" else ""
            raise APIError(f"{name}={value}{what} exceeds this server's limit of {limit}: lower it.", param=name)


def _renamed(error: RequestError, names: Mapping[str, str]) -> APIError:
    """What `SamplingParams` refused, under the names of the body."""
    name, equals, rest = str(error).partition("=")
    if not equals:
        return APIError(str(error))
    own = names.get(name, name)
    return APIError(f"{own}={rest}", param=own)
