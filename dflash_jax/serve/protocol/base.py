"""The base of all bodies: nulls, unknown fields, and the types of fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from typing_extensions import TypeAliasType

from dflash_jax.serve.protocol.errors import APIError, shown, validation_error

# Fields that clients of OpenAI, vLLM or SGLang may send, and that change nothing about an answer here.
IGNORED = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "verbosity", "length_penalty", "early_stopping", "spaces_between_special_tokens",
        "stream_reasoning", "return_hidden_states", "bootstrap_host", "bootstrap_port", "bootstrap_room", "log_metrics",
        "cache_prompt", "id_slot", "timings_per_token",
    }
)  # fmt: skip
_STRUCTURED = "use structured_outputs={{'{}': ...}}, which has replaced it"

# Fields that would change the answer and are not supported, and what to do instead. False, 0 and empty values pass.
UNSUPPORTED = {
    "use_beam_search": "leave it out, beams are not served",
    "guided_json": _STRUCTURED.format("json"),
    "guided_regex": _STRUCTURED.format("regex"),
    "guided_choice": _STRUCTURED.format("choice"),
    "guided_grammar": _STRUCTURED.format("grammar"),
    "guided_json_object": _STRUCTURED.format("json_object"),
    "guided_whitespace_pattern": "leave it out, white space follows the grammar",
    "structural_tag": "use structured_outputs with json, regex, choice or grammar",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "custom_logit_processor": "use logit_bias, bad_words or allowed_token_ids",
    "custom_params": "leave it out, there are no custom processors",
    "stop_regex": "use stop, or structured_outputs={'regex': ...}",
    "logprob_token_ids": "use top_logprobs (in a chat) or logprobs (in a completion)",
    "token_ids_logprob": "use top_logprobs_num",
    "thinking_token_budget": "use max_tokens, or chat_template_kwargs={'enable_thinking': false}",
    "max_repetition_pattern_size": "use repetition_penalty or frequency_penalty",
    "prompt_embeds": "give text or token ids",
    "input_embeds": "give text or token ids",
    "image_data": "give text, this server reads nothing else",
    "video_data": "give text, this server reads nothing else",
    "audio_data": "give text, this server reads nothing else",
    "lora_path": "leave it out, no adapters are served",
    "session_params": "leave it out, every request stands alone",
    "kv_transfer_params": "leave it out, keys and values stay on this server",
    "typical_p": "use top_p or min_p",
    "tfs_z": "use top_p or min_p",
    "top_n_sigma": "use top_p or min_p",
    "mirostat": "use temperature, top_p or min_p",
    "dynatemp_range": "use temperature",
    "xtc_probability": "use temperature, top_p or min_p",
    "dry_multiplier": "use repetition_penalty or frequency_penalty",
}  # fmt: skip
# Values of these that ask for nothing, which some clients send with every request.
NEUTRAL: dict[str, tuple[Any, ...]] = {"typical_p": (1,), "tfs_z": (1,), "top_n_sigma": (-1,)}


def allow_null(schema: dict[str, Any]) -> None:
    """Allow null in the JSON schema of every optional field of a body; null stands for the default."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for name in properties.keys() - set(required):
        field = dict(properties[name])
        about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
        options = field.pop("anyOf", None) or [field]
        if {"type": "null"} not in options:
            options = [*options, {"type": "null"}]
        properties[name] = about | {"anyOf": options}


class RequestBody(BaseModel):
    """Base of bodies. A field that is null gets its default; unknown fields are kept in `model_extra`.

    Attributes:
        unsupported: fields that are refused, and what to do instead.
        neutral: values of these fields that ask for nothing, and pass.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=allow_null)
    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body  # pydantic refuses it
        for name in cls.unsupported:
            value = body.get(name)
            if value and value not in cls.neutral.get(name, ()):
                message = f"{name}={shown(value)} is not supported: {cls.unsupported[name]}."
                raise APIError(message, param=name)
        return {name: value for name, value in body.items() if value is not None}


Body = TypeVar("Body", bound=RequestBody)


def parse(model: type[Body], body: object) -> Body:
    """Make a request of a decoded JSON value.

    Raises:
        APIError: 400; the value is not such a request.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_context=False)) from error


def unknown_fields(request: RequestBody) -> list[str]:
    """Names of a request's unknown fields, for the log."""
    return sorted((request.model_extra or {}).keys() - IGNORED - request.unsupported.keys())


def _unicode(text: str, info: ValidationInfo) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{info.field_name}={shown(text)} is not valid Unicode ({error}); correct it."
        raise APIError(message, param=info.field_name) from error
    return text


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _bias(value: Any, info: ValidationInfo) -> Any:
    """Check a bias of token ids; only the first error is reported, since a body may hold a million entries."""
    if not isinstance(value, dict):
        raise APIError(
            f"{info.field_name}={shown(value)} is not allowed: it must map token ids to numbers.", param=info.field_name
        )
    for token, bias in value.items():
        if not isinstance(bias, int | float) or not -100 <= bias <= 100:
            message = f"{info.field_name}[{shown(token)}]={shown(bias)} is not allowed: it must be in [-100, 100]."
            raise APIError(message, param=info.field_name)
    return value


def _prompt(value: Any, info: ValidationInfo) -> Any:
    """Check one prompt or several; the first element says which kind all must have."""
    name = info.field_name or "prompt"
    if not value or not isinstance(value, str | list):
        raise APIError(
            f"{name}={shown(value)} is no prompt: give a text, a list of token ids, or a list of either, not empty.",
            param=name,
        )
    if isinstance(value, str):
        return value
    adapter = _TEXTS if isinstance(value[0], str) else _BATCH if isinstance(value[0], list) else _IDS
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise validation_error([{**first, "loc": (name, *first["loc"])}]) from error


def _integer(value: Any) -> Any:
    """An integer that the client wrote as `4.0` or `"4"`, which vLLM takes, too; others unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and re.fullmatch(INTEGER_TEXT, value) else value


def _float(value: Any) -> Any:
    """A number that the client wrote as text; others unchanged."""
    return float(value) if isinstance(value, str) and re.fullmatch(NUMBER_TEXT, value) else value


INTEGER_TEXT = r"^-?[0-9]{1,18}$"
NUMBER_TEXT = r"^-?[0-9]{1,18}(\.[0-9]{1,18})?$"
_BOUNDS = Field(ge=-(2**63), lt=2**63)
_Value = TypeVar("_Value")
_Some = Annotated[_Value, Field(min_length=1)]
Integer = Annotated[
    int,
    _BOUNDS,
    BeforeValidator(
        _integer, json_schema_input_type=Annotated[int, _BOUNDS] | Annotated[str, Field(pattern=INTEGER_TEXT)]
    ),
]
Float = Annotated[
    float, BeforeValidator(_float, json_schema_input_type=float | Annotated[str, Field(pattern=NUMBER_TEXT)])
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], FailFast()])
Text = Annotated[str, AfterValidator(_unicode)]
RequestId = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_unicode)]
Strings = TypeAliasType(
    "Strings", Annotated[list[str], FailFast(), BeforeValidator(_listed, json_schema_input_type=str | list[str])]
)
RequestIds = TypeAliasType(
    "RequestIds",
    Annotated[
        list[RequestId], FailFast(), BeforeValidator(_listed, json_schema_input_type=RequestId | list[RequestId])
    ],
)
LogitBias = Annotated[dict[str, float], PlainValidator(_bias, json_schema_input_type=dict[str, float])]
Prompts = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(
        _prompt,
        json_schema_input_type=_Some[str]
        | _Some[list[_Some[str]]]
        | _Some[list[TokenId]]
        | _Some[list[_Some[list[TokenId]]]],
    ),
]

_IDS = TypeAdapter(TokenIds)
_TEXTS = TypeAdapter(Annotated[list[Annotated[str, Field(min_length=1)]], FailFast()])
_BATCH = TypeAdapter(Annotated[list[Annotated[TokenIds, Field(min_length=1)]], FailFast()])
