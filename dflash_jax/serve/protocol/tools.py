"""The tools of a chat, and the JSON schemas of forced tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.serve.protocol.errors import APIError, shown
from dflash_jax.serve.protocol.tool_order import ordered_function

CHOICES = ("none", "auto", "required")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                },
            },
        },
    },
}
TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {
            "type": "object",
            "required": ["function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """OpenAI's `tools` without nulls, in the order of `tool_order`, since templates print them.

    Raises:
        APIError: 400; the list is empty, or an entry is not a tool or nests too deep.
    """
    if not isinstance(tools, list) or not tools:
        message = f"tools={shown(tools)} is not allowed: give at least one tool, or leave it out."
        raise APIError(message, param="tools")
    return [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]


def check_tool_choice(choice: Any) -> str | dict[str, Any]:
    """OpenAI's `tool_choice`, unchanged: one of `CHOICES`, or an object that names a tool.

    Raises:
        APIError: 400; it is neither.
    """
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    function = choice.get("function") if isinstance(choice, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if is_named and choice.get("type") in (None, "function"):
        return choice
    raise APIError(
        f"tool_choice={shown(choice)} is not allowed: it must be 'none', 'auto', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}.",
        param="tool_choice",
    )


def required_schema(tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> dict[str, Any]:
    """The JSON schema of `tool_choice="required"`: a list of calls, of a single one if they may not be parallel.

    The definitions of all tools move to the root of the schema, where the tools' references point.

    Raises:
        APIError: 400; two tools define the same name differently.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool_schema(tool))
        for place in ("$defs", "definitions"):
            defined = parameters.pop(place, None)
            for name, definition in defined.items() if isinstance(defined, dict) else ():
                if definitions.setdefault(place, {}).setdefault(name, definition) != definition:
                    raise APIError(
                        f"the tools define {shown(name)} in {place} in two ways; give the one another name.",
                        param="tools",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | ({} if parallel else {"maxItems": 1}) | definitions


def tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, an object; a tool without `parameters` takes none."""
    parameters = tool["function"].get("parameters")
    return NO_PARAMETERS if parameters is None else {"type": "object", **parameters}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") not in (None, "function"):
        raise APIError(
            f"{path}={shown(tool)} is not supported: give {{'type': 'function', 'function': {{'name': ...}}}}.",
            param=path,
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or not name.isprintable():
        message = f"{path}.function.name={shown(name)} is not allowed: it must be a non-empty string on one line."
        raise APIError(message, param=f"{path}.function.name")
    if parameters is not None and not isinstance(parameters, dict):
        message = f"{path}.function.parameters={shown(parameters)} is not allowed: it must be a JSON schema, an object."
        raise APIError(message, param=f"{path}.function.parameters")
    kept = {key: value for key, value in function.items() if value is not None}
    try:
        kept = ordered_function(kept)
    except RecursionError as error:
        message = f"{path}.function.parameters nests too deep for this server; simplify the schema."
        raise APIError(message, param=f"{path}.function.parameters") from error
    others = {key: tool[key] for key in sorted(tool.keys() - {"type", "function"})}
    return {"type": "function", "function": kept, **others}
