"""What the text must look like, of all the fields that can say so: at most one may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflash_jax.base.values import StructuredOutputsParams
from dflash_jax.serve.protocol.errors import APIError, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
HARMLESS = ("disable_fallback",)  # of vLLM's structured_outputs: there is nothing to fall back to
# What vLLM and SGLang call a kind outside structured_outputs.
_TOP_LEVEL = {"regex": "regex", "ebnf": "grammar", "json_schema": "json"}


class Demand(NamedTuple):
    """A field of a body, and what it asks of `StructuredOutputsParams`."""

    name: str
    given: dict[str, Any]


def check_response_format(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format`.

    Raises:
        APIError: its type is unknown, or a schema is missing.
    """
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise APIError(
            f"response_format.type={shown(kind)} is not allowed: it must be 'text', 'json_object' or 'json_schema'.",
            param="response_format.type",
        )
    if kind == "json_schema":
        outer = given.get("json_schema")
        if not isinstance(outer, dict) or not isinstance(outer.get("schema"), dict):
            raise APIError(
                "response_format of type 'json_schema' has no schema: "
                "give {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}.",
                param="response_format.json_schema",
            )
    return given


def check_structured_outputs(given: dict[str, Any]) -> dict[str, Any]:
    """What `structured_outputs` asks for, in vLLM's words, without what asks for nothing.

    Raises:
        APIError: it holds something unknown. That it holds exactly one kind is checked with the other fields.
    """
    for name, value in given.items():
        if name not in KINDS and name not in HARMLESS and value:
            message = f"structured_outputs holds {shown(name)}={shown(value)}: give one of {', '.join(KINDS)} instead."
            raise APIError(message, param=f"structured_outputs.{name}")
    kept = {name: given[name] for name in KINDS if given.get(name) is not None and given[name] is not False}
    if not isinstance(kept.get("choice", []), list):
        message = f"structured_outputs.choice={shown(kept['choice'])} is not allowed: it must be a list of strings."
        raise APIError(message, param="structured_outputs.choice")
    return kept


def demands_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    top_level: Mapping[str, Any],
) -> list[Demand]:
    """The fields that demand something, checked before."""
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
    """The one demand, if there is any.

    Raises:
        APIError: there are several, or it cannot be met.
    """
    if not demands:
        return None
    (name, given), *others = demands
    if others:
        names = " and ".join(demand.name for demand in demands)
        raise APIError(f"{names} each say what the text must look like: give one of them.", param=others[0].name)
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:  # RequestError, or Python's about an integer too long to be shown
        raise APIError(f"{name}: {error}", param=name) from error
