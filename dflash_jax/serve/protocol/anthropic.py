"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's bodies, the chats that they ask for, and errors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from dflash_jax.serve.protocol.anthropic_blocks import CONTENT_SCHEMA, chat_messages, system_text
from dflash_jax.serve.protocol.base import Float, Integer, RequestBody, Strings, Text, parse
from dflash_jax.serve.protocol.chat import ChatCompletionRequest
from dflash_jax.serve.protocol.errors import APIError, shown
from dflash_jax.serve.protocol.structured import Demand

# Fields of this server's chats that a Messages request may have too, since Anthropic's API has none of that meaning.
EXTENSIONS = (
    "seed", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "stop_token_ids",
    "min_tokens", "ignore_eos", "structured_outputs", "speculation", "truncate_prompt_tokens", "cache_salt",
    "request_id", "chat_template_kwargs",
)  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": CONTENT_SCHEMA},
    },
}
TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "type": {"type": ["string", "null"]},
            "name": {"type": "string", "minLength": 1},
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": "object"},
        },
    },
}


def _check_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise APIError(f"tools={shown(tools)} is not allowed: it must be a list of tools.", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            message = f"tools.{i}={shown(tool)} is no tool: give {{'name': ..., 'input_schema': ...}}."
            raise APIError(message, param=f"tools.{i}")
        if _is_custom(tool):
            _check_tool(tool, f"tools.{i}")
    return tools


def _check_tool(tool: dict[str, Any], path: str) -> None:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name or not name.isprintable():
        message = f"{path}.name={shown(name)} is not allowed: it must be a non-empty string on one line."
        raise APIError(message, param=f"{path}.name")
    if schema is not None and not isinstance(schema, dict):
        message = f"{path}.input_schema={shown(schema)} is not allowed: it must be a JSON schema, an object."
        raise APIError(message, param=f"{path}.input_schema")


def _is_custom(tool: dict[str, Any]) -> bool:
    """Whether the client itself has defined a tool; other types name tools that Anthropic defines or runs."""
    return tool.get("type") in (None, "custom")


Messages = Annotated[list[dict[str, Any]], PlainValidator(chat_messages), WithJsonSchema(MESSAGES_SCHEMA)]
System = Annotated[str, PlainValidator(system_text), WithJsonSchema(CONTENT_SCHEMA)]
Tools = Annotated[list[dict[str, Any]], PlainValidator(_check_tools), WithJsonSchema(TOOLS_SCHEMA)]


class ToolChoice(BaseModel):
    """Which tools may or must be called."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def of_chat(self) -> str | dict[str, Any]:
        """What OpenAI's `tool_choice` calls this choice.

        Raises:
            APIError: 400; a tool shall be called, and none is named.
        """
        if self.type != "tool":
            return _CHOICES[self.type]
        if not self.name:
            message = "tool_choice.name is missing: name the tool, or use a tool_choice of type 'any'."
            raise APIError(message, param="tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


class Thinking(BaseModel):
    """Whether the model reasons before it answers: unless the type is "disabled". Budgets and displays are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


class MessagesChat(ChatCompletionRequest):
    """The chat that a Messages request asks for; stop strings keep the name by which errors call them."""

    renamed: ClassVar = {**ChatCompletionRequest.renamed, "stop": "stop_sequences"}
    stop_sequences: Strings = []

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        return super().sampling_fields() | {"stop": self.stop_sequences}

    def demands(self) -> list[Demand]:
        """As of a chat, with the format under its name here."""
        names = {"response_format": "output_config.format"}
        return [Demand(names.get(demand.name, demand.name), demand.params) for demand in super().demands()]


class CountTokensRequest(RequestBody):
    """A conversation in Anthropic's form, whose tokens are to be counted.

    `messages` and `system` are translated as they are read: `messages` has OpenAI's form, `system` is a text.
    """

    model: Text | None = None
    messages: Messages
    system: System = ""
    tools: Tools = Field([], description="Tools with an input_schema; types that Anthropic defines are skipped.")
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Sets enable_thinking of the chat template.")

    @property
    def skipped_tools(self) -> list[str]:
        """Types of the tools that only Anthropic has, such as web_search_20250305, which the model does not see."""
        return [str(tool["type"]) for tool in self.tools if not _is_custom(tool)]

    def chat(self) -> MessagesChat:
        """The chat that the request asks for.

        Raises:
            APIError: 400; a field is not allowed.
        """
        return parse(MessagesChat, self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.messages],
            "tools": [_chat_tool(tool) for tool in self.tools if _is_custom(tool)] or None,
            "continue_final_message": _is_begun(self.messages[-1]),
        }
        choice = self.tool_choice
        if choice is not None and (fields["tools"] or choice.type in ("any", "tool")):
            fields["tool_choice"] = choice.of_chat()
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        extra = self.model_extra or {}
        fields |= {name: extra[name] for name in EXTENSIONS if name in extra}
        kwargs = extra.get("chat_template_kwargs", {})
        if self.thinking is not None and isinstance(kwargs, dict):
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"} | kwargs
        return fields


class MessagesRequest(CountTokensRequest):
    """The body of a message. Fields that Anthropic's API has and this server does not serve are ignored."""

    max_tokens: Integer = Field(description="Lowered to what fits behind the prompt.")
    stop_sequences: Strings = []
    temperature: Float | None = Field(None, description="Default: the model's generation_config.json.")
    top_p: Float | None = None
    top_k: Integer | None = None
    stream: bool = False
    output_config: dict[str, Any] = Field({}, description="format: a JSON schema of the text. Others are ignored.")

    def _chat_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "stream")
        fields = super()._chat_fields() | {name: getattr(self, name) for name in names}
        wanted = self.output_config.get("format")
        if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
            schema = {"name": "output", "schema": wanted.get("schema")}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form, without the fields that would only change the prompt, such as cache_control."""
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _is_begun(message: dict[str, Any]) -> bool:
    """Whether the last message is an answer whose text is to be continued, as Anthropic's API does."""
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def anthropic_error_body(error: APIError, request_id: str) -> dict[str, Any]:
    """The JSON body of an error in Anthropic's form."""
    message = error.message
    if error.param == "prompt":  # a Messages request has no such field: the prompt that was made of it is too long
        message = f"prompt is too long: {message}"  # the words by which Claude Code knows that it must compact
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
