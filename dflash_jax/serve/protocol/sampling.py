"""The fields that chats and completions share: sampling, streaming, and constraints on the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from dflash_jax.serve.protocol.base import Float, Integer, LogitBias, RequestBody, RequestId, Strings, Text, TokenIds
from dflash_jax.serve.protocol.errors import APIError
from dflash_jax.serve.protocol.structured import Demand, check_response_format, check_structured_outputs, demands_of

_LENGTH_SCHEMA = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}]}


class StreamOptions(BaseModel):
    """Whether a stream ends with a chunk of the usage, and whether every chunk tells the usage so far."""

    model_config = ConfigDict(extra="allow", strict=True)
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(RequestBody):
    """Base of `ChatCompletionRequest` and `CompletionRequest`. Names are OpenAI's, then vLLM's, then SGLang's.

    Attributes:
        renamed: names that fields of `SamplingParams` have in this body, by the names that they have there.
    """

    model: Text | None = None

    temperature: Float | None = Field(None, description="0 is greedy. Default: the model's generation_config.json.")
    top_p: Float | None = None
    top_k: Integer | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    repeat_penalty: Float | None = Field(None, description="llama.cpp's name of repetition_penalty.")
    frequency_penalty: Float = 0.0
    presence_penalty: Float = 0.0
    n: Integer = 1
    best_of: Integer | None = Field(None, description="At most n; nothing is drawn to be thrown away.")
    seed: Integer | None = None
    stop: Strings = []
    stop_token_ids: TokenIds = []
    bad_words: Strings = []
    logit_bias: LogitBias = {}
    allowed_token_ids: TokenIds | None = None
    min_tokens: Integer = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = Field(False, description="SGLang's name of include_stop_str_in_output.")
    prompt_logprobs: Integer | None = None

    response_format: Annotated[dict[str, Any], AfterValidator(check_response_format)] | None = None
    structured_outputs: Annotated[dict[str, Any], AfterValidator(check_structured_outputs)] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object."
    )
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = Field(None, description="llama.cpp's name of structured_outputs.grammar.")
    json_schema: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = Field(
        None, description="llama.cpp's name of structured_outputs.json."
    )

    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_sources: bool = Field(
        False, description="Chunks of the stream list each token's text and whether the drafter had proposed it."
    )
    return_meta_info: bool = Field(False, description="Answer with SGLang's meta_info, which has the acceptance.")
    speculation: bool = Field(True, description="False decodes this request without the drafter; the text is the same.")

    truncate_prompt_tokens: Annotated[Integer, WithJsonSchema(_LENGTH_SCHEMA)] | None = Field(
        None, description="Keep the last so many tokens of the prompt; -1 keeps as many as fit."
    )
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    priority: Integer = Field(0, description="0: requests are served in the order they come.")
    request_id: RequestId | None = None
    rid: RequestId | None = Field(None, description="SGLang's name of request_id.")

    renamed: ClassVar[Mapping[str, str]] = {"repetition_penalty": "repeat_penalty"}

    @model_validator(mode="after")
    def _check_sampling(self) -> SamplingBody:
        if not self.stream:
            for name in ("stream_options", "return_token_sources"):
                if getattr(self, name):
                    raise APIError(f"{name} needs stream=true: set it, or leave {name} out.", param=name)
        elif self.prompt_logprobs is not None:
            message = f"prompt_logprobs={self.prompt_logprobs} cannot be streamed: set stream=false or leave it out."
            raise APIError(message, param="prompt_logprobs")
        if self.best_of is not None and self.best_of > self.n:
            message = f"best_of={self.best_of} exceeds n={self.n}: ask for the n that you want and leave best_of out."
            raise APIError(message, param="best_of")
        if self.priority != 0:
            message = f"priority={self.priority} is not supported: requests are served as they come, leave it out."
            raise APIError(message, param="priority")
        k = self.truncate_prompt_tokens
        if k is not None and k < 1 and k != -1:
            message = f"truncate_prompt_tokens={k} is not allowed: it must be at least 1, or -1 for as many as fit."
            raise APIError(message, param="truncate_prompt_tokens")
        return self

    @property
    def given_id(self) -> str | None:
        """The id that the client gave the request in its body; None if it gave none."""
        return self.request_id or self.rid

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage_stats(self) -> bool:
        """Whether every chunk tells the usage so far; as in vLLM, this needs `include_usage`."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams`, None for what the body leaves open; subclasses add lengths and logprobs."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
            "n", "seed", "stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens",
            "ignore_eos", "skip_special_tokens", "prompt_logprobs", "speculation",
        )  # fmt: skip
        keeps_stop = self.include_stop_str_in_output or self.no_stop_trim
        fields = {name: getattr(self, name) for name in names} | {"include_stop_str_in_output": keeps_stop}
        return fields if self.repeat_penalty is None else fields | {"repetition_penalty": self.repeat_penalty}

    def demands(self) -> list[Demand]:
        """Every field that constrains the text."""
        top_level = {"regex": self.regex, "ebnf": self.ebnf}  # empty ones of llama.cpp ask for nothing
        top_level |= {
            "grammar": self.grammar or None,
            "json_schema": self.json_schema or None,
        }
        return demands_of(self.response_format, self.structured_outputs, top_level)
