"""JSON schemas as llguidance serves them: objects closed, and what it cannot enforce left out. Pure host code."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

Schema = dict[str, Any]
LONGEST_WARNING = 300  # characters

logger = logging.getLogger(__name__)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains", "then", "else")
_NAMED = ("properties", "patternProperties")


def json_grammar(text: str) -> str:
    """The grammar, in llguidance's form, of a JSON schema; not checked yet.

    What llguidance cannot enforce, such as `uniqueItems`, formats that it does not know and look-ahead, is left out
    rather than refused, since pydantic and agents' own tools send it; the log says what the text may break.
    """
    schema = json.loads(text)
    close_objects(schema)
    grammar = LLMatcher.grammar_from_json_schema(schema)
    if not LLMatcher.validate_grammar(grammar):
        return grammar
    dropped = _drop_patterns(schema)
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": True, "coerce_one_of": True})
    is_refused, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not is_refused:
        reasons = "; ".join([*messages, *(f"pattern {pattern}" for pattern in dropped)])
        logger.warning(
            "A JSON schema is enforced in part: %s.", textwrap.shorten(reasons, LONGEST_WARNING, placeholder=" ...")
        )
    return grammar


def close_objects(schema: Schema) -> None:
    """Let objects have no other properties than those that the schema names, in place.

    JSON Schema allows any further property unless `additionalProperties` says otherwise. Small models then invent keys
    until they are cut off, so OpenAI's strict mode and xgrammar's (vLLM's default) forbid them, and clients count on
    it. Explicit `additionalProperties` and `unevaluatedProperties` are kept. An object without `properties` stays open:
    it is how tools ask for a free-form object. So do objects that require what they do not name, and those whose
    properties come from several parts at once (`allOf`, or `properties` beside `anyOf`), since closing one part would
    forbid those of the others.
    """
    nodes = [*_nodes(schema)]
    combined: set[int] = set()
    for node in nodes:
        sources = [group for group in _parts(node, schema) if any(_names_properties(part, schema) for part in group)]
        if len(sources) + _has_names(node) > 1:
            combined.update(map(id, _same_instance(node, schema)))
    for node in nodes:
        if id(node) in combined:
            continue
        if "additionalProperties" not in node and "unevaluatedProperties" in node:
            node["additionalProperties"] = node.pop("unevaluatedProperties")  # the same where there is one part
        if _is_closable(node):
            node["additionalProperties"] = False
        elif "propertyNames" in node and not _has_names(node):
            _name_properties(node, schema)


def _is_closable(node: Schema) -> bool:
    if any(key in node for key in ("additionalProperties", "unevaluatedProperties", "propertyNames")):
        return False
    if not any(isinstance(node.get(key), dict) for key in _NAMED):
        return False
    properties, required = node.get("properties"), node.get("required", [])
    return isinstance(required, list) and all(name in (properties or {}) for name in required)


def _drop_patterns(schema: Schema) -> list[str]:
    """Leave out every `pattern` that is no regular expression for llguidance, in place; returns these patterns."""
    dropped = []
    for node in _nodes(schema):
        pattern = node.get("pattern")
        if isinstance(pattern, str) and LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            dropped.append(node.pop("pattern"))
    return dropped


def _name_properties(node: Schema, root: Schema) -> None:
    """Turn `propertyNames` of a dictionary into properties, which llguidance serves; pydantic's dict[Enum, ...]."""
    names = _target(node["propertyNames"], root) or {}
    value = node.get("additionalProperties", {})
    if isinstance(names.get("enum"), list) and all(isinstance(name, str) for name in names["enum"]):
        node["properties"] = dict.fromkeys(names["enum"], value)
    elif isinstance(names.get("const"), str):
        node["properties"] = {names["const"]: value}
    elif isinstance(names.get("pattern"), str):
        node["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del node["propertyNames"]
    node["additionalProperties"] = False


def _nodes(schema: Schema) -> Iterator[Schema]:
    """The schema and all schemas in it, but those that only exclude. Without recursion, since clients nest deep."""
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key in _LISTS:
            pending += node[key] if isinstance(node.get(key), list) else ()
        for key in _MAPS:
            pending += node[key].values() if isinstance(node.get(key), dict) else ()
        pending += [node[key] for key in _ONES if key in node]
        pending += node["items"] if isinstance(node.get("items"), list) else ()  # an older draft's prefixItems


def _parts(node: Schema, root: Schema) -> Iterator[list[Schema]]:
    """Groups of schemas for the same instance as the node's: each of `allOf`, and one of alternatives."""
    groups = [[part] for part in node.get("allOf") or ()] if isinstance(node.get("allOf"), list) else []
    groups += [node[key] for key in ("anyOf", "oneOf") if isinstance(node.get(key), list)]
    groups += [[node[key]] for key in ("then", "else") if key in node]
    if "$ref" in node:
        groups.append([_target(node, root)])
    for group in groups:
        yield [part for part in group if isinstance(part, dict)]


def _same_instance(node: Schema, root: Schema) -> list[Schema]:
    """The node and all schemas that judge the same instance."""
    reached: dict[int, Schema] = {}
    pending = [node]
    while pending:
        part = pending.pop()
        if id(part) not in reached:
            reached[id(part)] = part
            pending += [further for group in _parts(part, root) for further in group]
    return list(reached.values())


def _names_properties(node: Schema, root: Schema) -> bool:
    return any(map(_has_names, _same_instance(node, root)))


def _has_names(node: Schema) -> bool:
    return any(isinstance(node.get(key), dict) and node[key] for key in _NAMED)


def _target(node: Any, root: Schema) -> Schema | None:
    """The schema that a `$ref` of the node points at, the node itself without one; None if it is not in this schema."""
    reference = node.get("$ref") if isinstance(node, dict) else None
    if not isinstance(reference, str):
        return node if isinstance(node, dict) else None
    if not reference.startswith("#"):
        return None
    place: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else None
