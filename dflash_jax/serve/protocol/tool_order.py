"""One order of the keys of tools, whatever order the client wrote: the prefix cache knows a prompt by its tokens.

Chat templates print tools as they come, in front of the conversation. MCP servers that keep schemas in hash maps write
them in another order after each start, and then not one token of a conversation would be found in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# Keys that come first, in the order in which models have seen them in training; others follow by their names.
_OF_FUNCTIONS = ("name", "description", "parameters")
_OF_SCHEMAS = ("type", "description", "enum", "properties", "required", "items")
_SCHEMAS = (
    "items",
    "additionalProperties",
    "additionalItems",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "dependentSchemas")


def ordered_function(function: dict[str, Any]) -> dict[str, Any]:
    """The part `function` of a tool, its keys and those of its schema in the one order.

    Properties keep the order of `required`, which is a list and means the same wherever it comes from: models write
    arguments in the order of the properties, and authors put first what the others build on. Properties that are not
    required follow by their names.

    Raises:
        RecursionError: the schema nests too deep.
    """
    return _ordered(function, _OF_FUNCTIONS, {"parameters": ordered_schema})


def ordered_schema(schema: Any) -> Any:
    """A JSON schema with its keys in the one order; what is no object comes back as it is."""
    if not isinstance(schema, dict):
        return schema
    required = schema.get("required")
    first = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    by_key: dict[str, Callable[[Any], Any]] = {
        "properties": lambda value: _ordered_map(value, first),
        **dict.fromkeys(_SCHEMAS, ordered_schema),
        **dict.fromkeys(_LISTS, _ordered_list),
        **dict.fromkeys(_MAPS, _ordered_map),
    }
    return _ordered(schema, _OF_SCHEMAS, by_key)


def _ordered(value: dict[str, Any], first: Iterable[str], by_key: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {key: by_key[key](value[key]) if key in by_key else value[key] for key in _keys(value, first)}


def _ordered_map(value: Any, first: Iterable[str] = ()) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: ordered_schema(value[key]) for key in _keys(value, first)}


def _ordered_list(value: Any) -> Any:
    return [ordered_schema(part) for part in value] if isinstance(value, list) else value


def _keys(value: dict[str, Any], first: Iterable[str]) -> list[str]:
    known = dict.fromkeys(key for key in first if key in value)
    return [*known, *sorted(value.keys() - known.keys())]
