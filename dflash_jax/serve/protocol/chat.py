"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from dflash_jax.serve.protocol.base import NEUTRAL, UNSUPPORTED, Integer, RequestBody
from dflash_jax.serve.protocol.errors import APIError, shown
from dflash_jax.serve.protocol.messages import MESSAGES_SCHEMA, template_messages
from dflash_jax.serve.protocol.sampling import SamplingBody
from dflash_jax.serve.protocol.structured import Demand
from dflash_jax.serve.protocol.tools import (
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    check_tool_choice,
    check_tools,
    required_schema,
    tool_schema,
)

# Arguments of transformers' apply_chat_template that clients may not set, or set by fields of their own.
RESERVED_KWARGS = frozenset(
    {
        "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
_CONVERSATION_UNSUPPORTED = UNSUPPORTED | {
    "chat_template": "start the server with --chat-template, clients may not run templates of their own",
    "mm_processor_kwargs": "give text, this server reads nothing else",
}
_CHAT_UNSUPPORTED = _CONVERSATION_UNSUPPORTED | {
    "functions": "use tools, which has replaced it",
    "function_call": "use tool_choice, which has replaced it",
    "audio": "leave it out, this server answers with text",
    "modalities": "use ['text'], this server answers with text",
    "web_search_options": "leave it out, this server searches nothing",
    "echo": "use continue_final_message, or /v1/completions",
    "add_special_tokens": "leave it out, the chat template adds them",
}

Messages = Annotated[list[dict[str, Any]], PlainValidator(template_messages), WithJsonSchema(MESSAGES_SCHEMA)]
Tools = Annotated[list[dict[str, Any]], PlainValidator(check_tools), WithJsonSchema(TOOLS_SCHEMA)]
ToolChoice = Annotated[str | dict[str, Any], PlainValidator(check_tool_choice), WithJsonSchema(TOOL_CHOICE_SCHEMA)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationBody(RequestBody):
    """Base of bodies that the chat template turns into a prompt.

    Messages and tools have the form that templates read; see `template_messages` and `check_tools`.
    """

    unsupported: ClassVar[Mapping[str, str]] = _CONVERSATION_UNSUPPORTED

    tools: Tools | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = Field(True, description="Default: true, but with continue_final_message.")
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="'none' is enable_thinking=false. Others reach the template, under the nearest name it has."
    )

    @model_validator(mode="after")
    def _check_conversation(self) -> ConversationBody:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise APIError(
                    "continue_final_message and add_generation_prompt exclude each other: set one of them to false.",
                    param="continue_final_message",
                )
            self.add_generation_prompt = False
        for name in self.chat_template_kwargs:
            if name in RESERVED_KWARGS:
                message = f"chat_template_kwargs.{name} is not allowed: leave it out, or use the field of that name."
                raise APIError(message, param=f"chat_template_kwargs.{name}")
        return self

    def template_kwargs(self, default: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of the chat template other than messages and `add_generation_prompt`.

        Args:
            default: the server's `--default-chat-template-kwargs`; the request overrides them.
        """
        effort = self.reasoning_effort
        kwargs = dict(default)
        if effort is not None:
            kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
        kwargs |= self.chat_template_kwargs
        for name in ("tools", "documents", "continue_final_message"):
            if value := getattr(self, name):
                kwargs[name] = value
        return kwargs


class ChatCompletionRequest(SamplingBody, ConversationBody):
    """The body of a chat completion."""

    unsupported: ClassVar[Mapping[str, str]] = _CHAT_UNSUPPORTED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL | {
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
    }
    renamed: ClassVar[Mapping[str, str]] = {
        **SamplingBody.renamed,
        "max_tokens": "max_completion_tokens",
        "logprobs": "top_logprobs",
    }

    messages: Messages
    max_completion_tokens: Integer | None = Field(None, description="Default: all that fit.")
    max_tokens: Integer | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool = False
    top_logprobs: Integer = 0
    tool_choice: ToolChoice | None = Field(None, description="Default: 'auto' with tools, else 'none'.")
    parallel_tool_calls: bool = True
    include_reasoning: bool = Field(True, description="False leaves the reasoning out of the answer.")
    separate_reasoning: bool = Field(True, description="False leaves the reasoning in the content.")

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs={self.top_logprobs} needs logprobs=true: set it, or leave top_logprobs out."
            raise APIError(message, param="top_logprobs")
        if self.tool_choice is None:
            self.tool_choice = "auto" if self.tools else "none"
        elif self.tool_choice != "none" and not self.tools:
            message = f"tool_choice={shown(self.tool_choice)} needs tools: give them, or leave tool_choice out."
            raise APIError(message, param="tool_choice")
        if self.tool_name is not None and self._named_tool() is None:
            names = [tool["function"]["name"] for tool in self.tools or ()]
            message = f"tool_choice names {shown(self.tool_name)}, which is not in tools: choose one of {shown(names)}."
            raise APIError(message, param="tool_choice.function.name")
        return self

    @property
    def tool_name(self) -> str | None:
        """The name of the tool that `tool_choice` forces; None if it names none."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    def parser_options(self) -> dict[str, Any]:
        """The arguments of `OutputParser` that the request sets: `tool_schemas`, `tool_choice` and `tool_name`."""
        choice = self.tool_choice if isinstance(self.tool_choice, str) else "auto"
        return {"tool_schemas": self.tools or (), "tool_choice": choice, "tool_name": self.tool_name}

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; `max_tokens` is None where the request sets no limit."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = self.top_logprobs if self.logprobs else None
        return super().sampling_fields() | {"max_tokens": limit, "logprobs": logprobs}

    def demands(self) -> list[Demand]:
        """Every field that constrains the text, or a forced tool alone: it overrides `response_format`, as in vLLM.

        instructor's RESPONSES_TOOLS sends both.
        """
        demands = super().demands()
        if self.tool_choice == "required" or self._named_tool() is not None:
            demands = [demand for demand in demands if demand.name != "response_format"]
        if self.tool_choice == "required":
            schema = required_schema(self.tools or (), parallel=self.parallel_tool_calls)
            demands.append(Demand("tool_choice", {"json": schema}))
        elif (tool := self._named_tool()) is not None:
            demands.append(Demand("tool_choice", {"json": tool_schema(tool)}))
        return demands

    def _named_tool(self) -> dict[str, Any] | None:
        return next((tool for tool in self.tools or () if tool["function"]["name"] == self.tool_name), None)
