"""The fields that constrain the text, of which a request may use one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflash_jax.base.values import StructuredOutputsParams
from dflash_jax.serve.protocol.errors import APIError, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
HARMLESS = ("disable_fallback",)  # keys of vLLM's structured_outputs that change nothing: there is no fallback here
# Names that vLLM, SGLang and llama.cpp give the kinds outside structured_outputs.
_TOP_LEVEL = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}


# Where the schema of a field is, which errors about it name; other fields hold theirs directly.
_PLACES = {
    "response_format": "response_format.json_schema.schema",
    "text.format": "text.format.schema",
    "output_config.format": "output_config.format.schema",
    "tool_choice": "tools",
}


class Demand(NamedTuple):
    """The name of a field of a body that constrains the text, and the arguments of `StructuredOutputsParams` for it."""

    name: str
    params: dict[str, Any]

    @property
    def place(self) -> str:
        """The dotted path of its schema or grammar in the body."""
        if self.name == "structured_outputs":
            return ".".join([self.name, *self.params])
        return _PLACES.get(self.name, self.name)


def check_response_format(response_format: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format`, unchanged.

    Raises:
        APIError: 400; its type is unknown, or its schema is missing.
    """
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise APIError(
            f"response_format.type={shown(kind)} is not allowed: it must be 'text', 'json_object' or 'json_schema'.",
            param="response_format.type",
        )
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        if not isinstance(outer, dict) or not isinstance(outer.get("schema"), dict):
            raise APIError(
                "response_format of type 'json_schema' has no schema: "
                "give {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}.",
                param="response_format.json_schema",
            )
    return response_format


def check_structured_outputs(structured_outputs: dict[str, Any]) -> dict[str, Any]:
    """The keys of vLLM's `structured_outputs` that ask for something.

    `StructuredOutputsParams` checks later that it is exactly one.

    Raises:
        APIError: 400; a key is unknown, or `choice` is not a list.
    """
    for name, value in structured_outputs.items():
        if name not in KINDS and name not in HARMLESS and value:
            message = f"structured_outputs holds {shown(name)}={shown(value)}: give one of {', '.join(KINDS)} instead."
            raise APIError(message, param=f"structured_outputs.{name}")
    asked = {name: structured_outputs.get(name) for name in KINDS}
    kept = {name: value for name, value in asked.items() if value is not None and value is not False}
    if not isinstance(kept.get("choice", []), list):
        message = f"structured_outputs.choice={shown(kept['choice'])} is not allowed: it must be a list of strings."
        raise APIError(message, param="structured_outputs.choice")
    return kept


def demands_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    top_level: Mapping[str, Any],
) -> list[Demand]:
    """A demand for each field that constrains the text; the fields were checked before."""
    demands = []
    if response_format is not None and response_format["type"] == "json_object":
        demands.append(Demand("response_format", {"json_object": True}))
    if response_format is not None and response_format["type"] == "json_schema":
        demands.append(Demand("response_format", {"json": response_format["json_schema"]["schema"]}))
    if structured_outputs is not None:
        demands.append(Demand("structured_outputs", structured_outputs))
    demands += [Demand(name, {_TOP_LEVEL[name]: value}) for name, value in top_level.items() if value is not None]
    return demands


def structured_outputs_params(demands: Sequence[Demand]) -> StructuredOutputsParams | None:
    """The constraint on the text; None without a demand.

    Raises:
        APIError: 400; there are several demands, or the demand is not allowed.
    """
    if not demands:
        return None
    (name, params), *others = demands
    if others:
        names = " and ".join(demand.name for demand in demands)
        raise APIError(f"{names} each say what the text must look like: give one of them.", param=others[0].name)
    try:
        return StructuredOutputsParams(**params)
    except ValueError as error:  # RequestError, or Python's own about an integer too long to write
        raise APIError(f"{name}: {error}", param=name) from error
