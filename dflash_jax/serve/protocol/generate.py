"""SGLang's native `POST /generate`, to the extent that SGLang's benchmarks use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema, model_validator

from dflash_jax.serve.protocol.base import (
    Float,
    Integer,
    LogitBias,
    Prompts,
    RequestBody,
    RequestIds,
    Strings,
    Text,
    TokenIds,
)
from dflash_jax.serve.protocol.errors import APIError
from dflash_jax.serve.protocol.structured import Demand, demands_of

_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class GenerateSampling(RequestBody):
    """The field `sampling_params`, with SGLang's names."""

    renamed: ClassVar[Mapping[str, str]] = _RENAMED

    max_new_tokens: Integer = 128
    min_new_tokens: Integer = 0
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Integer | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    frequency_penalty: Float = 0.0
    presence_penalty: Float = 0.0
    n: Integer = 1
    sampling_seed: Integer | None = None
    stop: Strings = []
    stop_token_ids: TokenIds = []
    logit_bias: LogitBias = {}
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    regex: str | None = None
    json_schema: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = None
    ebnf: str | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; None for what the body leaves open."""
        names = (
            "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
            "frequency_penalty", "presence_penalty", "n", "seed", "stop", "stop_token_ids", "logit_bias", "ignore_eos",
            "skip_special_tokens",
        )  # fmt: skip
        fields = {name: getattr(self, _RENAMED.get(name, name)) for name in names}
        return fields | {"include_stop_str_in_output": self.no_stop_trim}

    def demands(self) -> list[Demand]:
        """Every field that constrains the text."""
        return demands_of(None, None, {"regex": self.regex, "json_schema": self.json_schema, "ebnf": self.ebnf})


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class GenerateRequest(RequestBody):
    """The body of a `/generate`: one prompt, or a batch of prompts."""

    renamed: ClassVar[Mapping[str, str]] = {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}

    text: Prompts | None = None
    input_ids: Prompts | None = None
    sampling_params: Annotated[
        list[GenerateSampling],
        FailFast(),
        BeforeValidator(_as_list, json_schema_input_type=GenerateSampling | list[GenerateSampling]),
    ] = Field(default_factory=lambda: [GenerateSampling()], description="For all prompts, or one for each.")
    stream: bool = False
    rid: RequestIds | None = Field(None, description="The request's id, or one for each prompt.")
    return_logprob: bool = False
    logprob_start_len: Integer = Field(-1, description="From 0 on, the prompt's logprobs come too.")
    top_logprobs_num: Integer = 0
    return_text_in_logprobs: bool = False
    model: Text | None = None

    @model_validator(mode="after")
    def _check_generate(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            subject = "neither text nor input_ids is" if self.text is None else "both text and input_ids are"
            raise APIError(f"{subject} given: give one of them.", param="text")
        for name, value, kind in (("text", self.text, str), ("input_ids", self.input_ids, int)):
            first = value[0] if isinstance(value, list) else value
            first = first[0] if isinstance(first, list) else first
            if first is not None and not isinstance(first, kind):
                message = f"{name} holds values of type {type(first).__name__}: text is for texts, input_ids for ids."
                raise APIError(message, param=name)
        number = len(self.prompts)
        for name, listed in (("sampling_params", self.sampling_params), ("rid", self.rid)):
            if listed is not None and len(listed) != number and (name == "rid" or len(listed) != 1):
                message = f"{name} holds {len(listed)} for {number} prompts: give one for each."
                raise APIError(message, param=name)
        if self.top_logprobs_num and not self.return_logprob:
            message = f"top_logprobs_num={self.top_logprobs_num} needs return_logprob=true: set it, or leave it out."
            raise APIError(message, param="top_logprobs_num")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; a single one if the body is not a batch."""
        prompts: Any = self.input_ids if self.text is None else self.text
        return prompts if self.is_batch else [prompts]

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        if self.text is not None:
            return isinstance(self.text, list)
        return isinstance(self.input_ids, list) and isinstance(self.input_ids[0], list)

    def logprob_fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams` about log-probabilities."""
        if not self.return_logprob:
            return {}
        fields = {"logprobs": self.top_logprobs_num}
        return fields if self.logprob_start_len < 0 else fields | {"prompt_logprobs": self.top_logprobs_num}
