"""`POST /v1/responses`, which becomes a chat. Nothing is stored: every request brings all items of its conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from dflash_jax.serve.protocol.base import NEUTRAL, UNSUPPORTED, Float, Integer, RequestBody, Text, parse
from dflash_jax.serve.protocol.chat import ChatCompletionRequest, ReasoningEffort
from dflash_jax.serve.protocol.errors import APIError, shown
from dflash_jax.serve.protocol.response_items import INPUT_SCHEMA, chat_messages, check_input
from dflash_jax.serve.protocol.response_tools import RESPONSE_TOOL_CHOICE_SCHEMA, Toolbox
from dflash_jax.serve.protocol.structured import Demand

_NO_LOGPROBS = "use /v1/chat/completions, whose answers have a place for it"
_RESPONSES_UNSUPPORTED = UNSUPPORTED | {
    "previous_response_id": "this server stores no answers, send the items of earlier turns in input",
    "conversation": "this server stores no conversations, send the items of earlier turns in input",
    "background": "this server stores no answers to ask for later, leave it out and use stream=true",
    "prompt": "this server stores no prompts, use instructions and input",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "n": "leave it out, a response is one answer",
    "best_of": "leave it out, a response is one answer",
    "chat_template": "start the server with --chat-template, clients may not run templates of their own",
    "continue_final_message": "use /v1/chat/completions",
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": _NO_LOGPROBS,
    "prompt_logprobs": _NO_LOGPROBS,
    "return_token_ids": _NO_LOGPROBS,
    "return_token_sources": _NO_LOGPROBS,
}
LOGPROBS = "message.output_text.logprobs"  # of `include`
SEALED_REASONING = "reasoning.encrypted_content"  # of `include`

Input = Annotated[str | list[dict[str, Any]], PlainValidator(check_input), WithJsonSchema(INPUT_SCHEMA)]
ResponseToolChoice = Annotated[str | dict[str, Any], WithJsonSchema(RESPONSE_TOOL_CHOICE_SCHEMA)]


class ReasoningOptions(BaseModel):
    """How much the model reasons; reasoning is answered as it is, without a summary."""

    model_config = ConfigDict(extra="allow", strict=True)
    effort: ReasoningEffort | None = None
    summary: str | None = None


class TextOptions(BaseModel):
    """What the text must look like; `verbosity` changes nothing here."""

    model_config = ConfigDict(extra="allow", strict=True)
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesChat(ChatCompletionRequest):
    """The chat that a response is; its errors name the fields of `ResponsesRequest`."""

    renamed: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens"}

    max_output_tokens: Integer | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """As of a chat, with the limit under its name here."""
        return super().sampling_fields() | {"max_tokens": self.max_output_tokens}

    def demands(self) -> list[Demand]:
        """As of a chat, with the format under its name here."""
        names = {"response_format": "text.format"}
        return [Demand(names.get(demand.name, demand.name), demand.params) for demand in super().demands()]


class ResponsesRequest(RequestBody):
    """The body of a response. Fields of a chat that Responses lacks, such as `seed` and `stop`, are those of a chat."""

    unsupported: ClassVar[Mapping[str, str]] = _RESPONSES_UNSUPPORTED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL | {"n": (1,), "best_of": (1,)}

    input: Input
    model: Text | None = None
    instructions: Text | None = Field(None, description="A system message before the input.")
    tools: list[dict[str, Any]] = Field([], description="Functions and namespaces of them; others are passed over.")
    tool_choice: ResponseToolChoice | None = Field(None, description="Default: 'auto' with tools, else 'none'.")
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    max_output_tokens: Integer | None = Field(None, description="Default: all that fit.")
    temperature: Float | None = Field(None, description="0 is greedy. Default: the model's generation_config.json.")
    top_p: Float | None = None
    stream: bool = False
    include: list[str] = Field([], description="reasoning.encrypted_content lets clients send reasoning back.")
    metadata: dict[str, Any] = {}
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    service_tier: str | None = None
    store: bool = Field(False, description="Nothing is stored.")
    truncation: Literal["auto", "disabled"] = Field("disabled", description="Prompts that are too long are refused.")
    user: Text | None = None

    @model_validator(mode="after")
    def _check_include(self) -> ResponsesRequest:
        if LOGPROBS in self.include:
            raise APIError(f"include={shown(LOGPROBS)} is not supported: {_NO_LOGPROBS}.", param="include")
        return self

    @model_validator(mode="after")
    def _check_echo(self) -> ResponsesRequest:
        """Refuse what the answer could not repeat: halves of characters, and nests too deep."""
        for name, value in self.echo().items():
            try:
                msgspec.json.encode(value)
            except (ValueError, RecursionError) as error:
                message = f"{name} holds what JSON cannot write ({error}); correct it."
                raise APIError(message, param=name) from error
        return self

    def chat(self, toolbox: Toolbox) -> ResponsesChat:
        """The chat that it asks for; `toolbox` is that of `tools`.

        Raises:
            APIError: 400; an item, a tool, the choice of one or the format is not supported.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if name != "stream_options"}
        fields = {
            "model": self.model,
            "messages": chat_messages(self.input, self.instructions, toolbox.flat_name),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _response_format(self.text.format),
            "reasoning_effort": self.reasoning.effort,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        return parse(ResponsesChat, extra | fields | toolbox.choose(self.tool_choice))

    def echo(self) -> dict[str, Any]:
        """The fields of the answer that repeat the request, as OpenAI's clients expect them."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "text": {"format": self.text.format or {"type": "text"}},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": self.tools,
            "top_logprobs": 0,
            "truncation": self.truncation,
            "user": self.user,
            "background": False,
        }


def _response_format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the form that a chat has."""
    kind = None if text_format is None else text_format.get("type")
    if text_format is None or kind in ("text", "json_object"):
        return text_format
    if kind != "json_schema":
        message = f"text.format.type={shown(kind)} is not allowed: it must be 'text', 'json_object' or 'json_schema'."
        raise APIError(message, param="text.format.type")
    if not isinstance(text_format.get("schema"), dict):
        raise APIError(
            "text.format of type 'json_schema' has no schema: "
            "give {'type': 'json_schema', 'name': ..., 'schema': {...}}.",
            param="text.format.schema",
        )
    return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}
