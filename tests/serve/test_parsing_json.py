"""The JSON scanner against `json`, and the types that schemas give to plain text."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.text.parsing.json_scanner import JsonScanner, Malformed
from dflash_jax.text.parsing.schema import parameter_types, schema_types, typed_json


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("5", {"integer"}, "5"),
        (" 5\n", {"number"}, "5"),
        ("5", {"number", "string"}, "5"),
        ("5", {"string"}, '"5"'),
        ("5", {"string", "integer"}, "5"),
        ("5.0", {"integer"}, "5.0"),
        ("5.5", {"integer", "string"}, '"5.5"'),
        ("9" * 5000, {"integer"}, f'"{"9" * 5000}"'),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, '"NaN"'),
        ("true", {"boolean"}, "true"),
        ("False", {"boolean"}, "false"),
        ("false", {"string"}, '"false"'),
        ("null", {"string", "null"}, "null"),
        ("none", {"string", "null"}, '"none"'),
        ("null", {"string"}, '"null"'),
        ('"x"', {"string", "null"}, '"\\"x\\""'),
        ('{"a": [1,2]}', {"object"}, '{"a": [1,2]}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[" * 100_000, {"array"}, f'"{"[" * 100_000}"'),
        ("", {"integer"}, '""'),
    ],
)
def test_values_get_the_types_of_the_schema(value, types, expected):
    assert typed_json(value, frozenset(types)) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"type": "string", "enum": ["1", 2]}, {"string"}),
        ({"const": True}, {"boolean"}),
        ({"oneOf": [{"type": "array"}, {"allOf": [{"type": "int"}]}]}, {"array", "integer"}),
        ({"$ref": "#/$defs/a"}, {"object", "null"}),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "other.json"}, set()),
        ({}, set()),
        (True, set()),
        ({"type": 5, "enum": 3, "anyOf": {}}, set()),
        ({"type": [{}, "string"]}, {"string"}),
    ],
)
def test_types_of_a_schema(schema, types):
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}, {"type": "object"}]}}}
    assert schema_types(schema, root) == types


def scanned(text):
    """What a scanner makes of the text; None if the text is not exactly one value."""
    scanner = JsonScanner()
    verified = ""
    try:
        for char in text:
            if scanner.done:
                return None
            verified += scanner.push(char)
    except Malformed:
        return None
    return verified if scanner.done else None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), st.booleans(), st.sampled_from([None, 1]))
def test_scanner_passes_json_on(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert scanned(text) == text


@settings(max_examples=500)
@given(st.lists(st.sampled_from([*'{}[]",:\\u0e1-+. \n\t', "true", "null", '"a"', "12"]), max_size=12).map("".join))
@example("1.e5]")
@example('"a": -}')
@example("12}")
@example('"\\ n"]')
@example('"\\u00 e9"]')
def test_scanner_agrees_with_json(body):
    for text in ("{" + body, "[" + body):
        try:
            expected = json.loads(text, strict=False)
        except ValueError:
            expected = None
        verified = scanned(text.strip())
        assert (None if verified is None else json.loads(verified)) == expected


def test_tools_of_any_shape():
    tools = [{"function": {"name": "f", "parameters": None}}, {"name": "g", "parameters": {"properties": {"a": {}}}}]
    assert parameter_types(tools) == {"f": {}, "g": {"a": {"string"}}}
