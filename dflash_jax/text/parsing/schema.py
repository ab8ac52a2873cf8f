"""Types for the values of `qwen3_coder`, which are plain text, from the JSON schemas of the tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

STRING = frozenset({"string"})
# Names that are not JSON Schema's, but occur in tools written by hand.
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}

ParameterTypes = Mapping[str, frozenset[str]]


def parameter_types(tools: Iterable[Mapping[str, Any]]) -> dict[str, ParameterTypes]:
    """The JSON types of every parameter, by tool and parameter; tools as in OpenAI's `tools`, or bare functions."""
    types: dict[str, ParameterTypes] = {}
    for tool in tools:
        function = tool.get("function", tool)
        root = _mapping(function.get("parameters"))
        properties = _mapping(root.get("properties"))
        types[function["name"]] = {name: schema_types(schema, root) or STRING for name, schema in properties.items()}
    return types


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it names none. Its references point into `root`."""
    types: set[str] = set()
    todo, followed = [schema], set()
    while todo:
        schema = _mapping(todo.pop())
        named = schema.get("type")
        names = [named] if isinstance(named, str) else _list(named)
        values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        types.update(_ALIASES.get(name, name) for name in names if isinstance(name, str))
        types.update(json_type(value) for value in values if not names)
        for union in ("anyOf", "oneOf", "allOf"):
            todo += _list(schema.get(union))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:  # else a schema that refers to itself never ends
            followed.add(reference)
            todo.append(_resolve(reference, root))
    return frozenset(types)


def typed_json(value: str, types: frozenset[str]) -> str:
    """The JSON of a value that a model wrote as text.

    Text that is JSON of an allowed type is passed on as it is; all other text becomes a string. JSON of another type
    becomes a string where strings are allowed; where they are not, it is passed on, and the client's check refuses it.
    """
    python = {"True": "true", "False": "false", "None": "null"}  # Qwen writes these literals as Python does
    text = python.get(value.strip(), value.strip())
    try:
        kind = json_type(json.loads(text, parse_constant=_reject))
    except (ValueError, RecursionError):
        kind = "string"
    allowed = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return text if kind != "string" and allowed else json.dumps(value, ensure_ascii=False)


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def json_type(value: Any) -> str:
    """JSON Schema's name of the type of a decoded value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", list: "array", dict: "object"}
    return names.get(type(value), "string")


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference points at within `root`; an empty one if there is none."""
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = _mapping(target).get(part.replace("~1", "/").replace("~0", "~"))
    return target


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
