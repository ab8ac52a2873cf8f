"""From a body to `SamplingParams` and prompts. A request overrides the server's defaults, which override OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import SamplingParams
from dflash_jax.serve.protocol.chat import ChatCompletionRequest
from dflash_jax.serve.protocol.completion import CompletionRequest
from dflash_jax.serve.protocol.errors import APIError
from dflash_jax.serve.protocol.generate import GenerateRequest, GenerateSampling
from dflash_jax.serve.protocol.sampling import SamplingBody
from dflash_jax.serve.protocol.structured import structured_outputs_params

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # generation_config.json may set these


class Limits(Protocol):
    """The server's limits of what one request may ask for."""

    @property
    def max_n(self) -> int:
        """Most completions of a prompt."""

    @property
    def max_stop_strings(self) -> int:
        """Most stop strings."""

    @property
    def max_prompts(self) -> int:
        """Most prompts of a body."""

    @property
    def max_logprobs(self) -> int:
        """Most alternatives of a token."""


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest,
    defaults: Mapping[str, Any],
    limits: Limits,
    most_tokens: int | None = None,
) -> SamplingParams:
    """The sampling parameters of a chat or a completion.

    Args:
        request: the body.
        defaults: of the generation config, for what the request leaves open; its `max_new_tokens` counts in chats,
            since completions have OpenAI's default.
        limits: of the server.
        most_tokens: of an answer, whatever is asked for; None sets no limit.

    Raises:
        APIError: 400; a value is outside its range or beyond a limit, or values exclude each other.
    """
    params = _params(request, {}, _names(request), defaults, limits)
    tokens = (defaults.get("max_new_tokens") if params.max_tokens is None else params.max_tokens, most_tokens)
    return replace(params, max_tokens=min((count for count in tokens if count is not None), default=None))


def generate_sampling_params(
    request: GenerateRequest, defaults: Mapping[str, Any], limits: Limits, most_tokens: int | None = None
) -> list[SamplingParams]:
    """The sampling parameters of each prompt of a `/generate`; see `sampling_params` for arguments and errors."""
    logprob_fields, names = request.logprob_fields(), _names(request)
    params = [
        _params(sampling, logprob_fields, _names(sampling) | names, defaults, limits)
        for sampling in request.sampling_params
    ]
    if most_tokens is not None:
        params = [replace(p, max_tokens=min(p.max_tokens or most_tokens, most_tokens)) for p in params]
    return params if len(params) > 1 else params * len(request.prompts)


def completion_prompts(request: CompletionRequest | GenerateRequest, limits: Limits) -> list[str | list[int]]:
    """The prompts of a body, as texts or token ids.

    Raises:
        APIError: 400; there are too many.
    """
    if isinstance(request, GenerateRequest):
        prompts, name = request.prompts, "input_ids" if request.text is None else "text"
    else:
        prompt: Any = request.prompt
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        prompts, name = [prompt] if is_single else prompt, "prompt"
    if len(prompts) > limits.max_prompts:
        message = f"{name} holds {len(prompts)} prompts, more than {limits.max_prompts}: send them in several requests."
        raise APIError(message, param=name)
    return prompts


def fit_prompt(
    token_ids: Sequence[int], *, truncate_prompt_tokens: int | None, max_tokens: int | None, max_model_len: int
) -> list[int]:
    """The tokens of a prompt after truncation.

    Args:
        token_ids: of the whole prompt.
        truncate_prompt_tokens: how many tokens to keep, from the end; -1 keeps as many as leave room for `max_tokens`,
            None keeps all.
        max_tokens: of `SamplingParams`. If it does not fit behind the prompt, the engine lowers it.
        max_model_len: most tokens of prompt and answer together.

    Raises:
        APIError: 400; the prompt leaves no room for an answer.
    """
    keep = truncate_prompt_tokens
    if keep == -1:  # agents ask for 32,000 tokens whatever the model's length: such an answer takes what is left
        keep = max(max_model_len - min(max_tokens or 1, max_model_len), 1)
    kept = list(token_ids if keep is None else token_ids[-keep:])
    if len(kept) >= max_model_len:
        raise prompt_too_long(str(len(kept)), max_model_len)
    return kept


def prompt_too_long(length: str, max_model_len: int) -> APIError:
    """The refusal of a prompt that leaves no room for an answer; `length` says how many tokens it has."""
    return APIError(
        f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {length}, and an "
        "answer needs one: shorten the prompt, or set truncate_prompt_tokens=-1.",
        param="prompt",
        code="context_length_exceeded",  # agents compact their conversation when they see OpenAI's code
    )


def _params(
    request: ChatCompletionRequest | CompletionRequest | GenerateSampling,
    further: Mapping[str, Any],
    names: Mapping[str, str],
    defaults: Mapping[str, Any],
    limits: Limits,
) -> SamplingParams:
    fields = {"max_tokens": None} | request.sampling_fields() | dict(further)
    _check_limits(fields, names, limits)
    fields |= {name: defaults[name] for name in DEFAULTED if fields[name] is None and name in defaults}
    values = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
    try:
        params = SamplingParams(**values, structured_outputs=structured_outputs_params(request.demands()))
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
    """The client's names of fields of `SamplingParams`, by our names, where they differ and the client used them."""
    return {name: alias for name, alias in request.renamed.items() if alias in request.model_fields_set}


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
    """An error of `SamplingParams` under the client's name of the field, which its sentence has before the "="."""
    name, equals, rest = str(error).partition("=")
    if not equals:
        return APIError(str(error))
    name = names.get(name, name)
    return APIError(f"{name}={rest}", param=name)
