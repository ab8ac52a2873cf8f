"""JSON schemas: which objects are closed, and what is left out of schemas that cannot be enforced whole."""

import json
import logging
from enum import StrEnum
from pathlib import Path
from re import Pattern

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from pydantic import Base64Str, BaseModel, SecretStr

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import SamplingParams, StructuredOutputsParams
from dflash_jax.engine.host.constraints import llguidance_grammar
from tests.pairs import EOS

CLOSED = '{"a":"x","more":1}'
NAMED = {"type": "object", "properties": {"a": {"type": "string"}}}
OTHER = {"type": "object", "properties": {"b": {"type": "string"}}}


@pytest.fixture(scope="module")
def allows(byte_tokenizer):
    """Whether a schema allows a text, whole."""
    tokenizer = from_tokenizer(byte_tokenizer.hf, n_vocab=300, eos_token=EOS)

    def check(schema, text):
        matcher = LLMatcher(tokenizer, llguidance_grammar(StructuredOutputsParams(json=schema)), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(byte_tokenizer.encode(text)) == len(text) and matcher.is_accepting()

    return check


def inside(schema):
    return {"type": "object", "properties": {"in": schema}, "required": ["in"]}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (NAMED, True),
        ({"properties": NAMED["properties"], "patternProperties": {"^x": {}}}, True),
        (NAMED | {"additionalProperties": True}, False),
        (NAMED | {"additionalProperties": {"type": "integer"}}, False),
        (NAMED | {"unevaluatedProperties": False}, True),
        (NAMED | {"unevaluatedProperties": True}, False),
        ({"type": "object"}, False),
        ({"type": "object", "additionalProperties": False, "properties": NAMED["properties"]}, True),
        ({"anyOf": [NAMED, OTHER]}, True),
        ({"$defs": {"N": NAMED}, "$ref": "#/$defs/N"}, True),
        (NAMED | {"anyOf": [{"required": ["a"]}]}, True),
        # Parts of one object: closing one would forbid what the others name.
        ({"allOf": [NAMED, OTHER]}, False),
        (NAMED | {"anyOf": [OTHER, {"properties": {"c": {}}}]}, False),
        ({"$defs": {"N": NAMED}, "$ref": "#/$defs/N", "properties": {"b": {}}}, False),
        (NAMED | {"required": ["more"]}, False),
    ],
)
def test_objects_that_name_their_properties_have_no_others(allows, schema, is_closed):
    assert allows(schema, '{"a":"x"}') or not is_closed
    assert allows(schema, CLOSED) is not is_closed
    if "$ref" not in schema:
        assert allows(inside(schema), f'{{"in":{CLOSED}}}') is not is_closed
        items = {"type": "array", "items": schema}
        assert allows(items, f"[{CLOSED}]") is not is_closed


def test_an_object_of_no_properties(allows):
    assert allows({"type": "object", "properties": {}}, "{}")
    assert not allows({"type": "object", "properties": {}}, '{"a":1}')


def test_parts_of_one_object_keep_what_the_others_name(allows):
    for schema in ({"allOf": [NAMED, OTHER]}, NAMED | {"anyOf": [OTHER]}):
        assert allows(schema, '{"a":"x","b":"y"}')
        assert not allows(schema, '{"a":1}')


class Colour(StrEnum):
    RED, BLUE = "red", "blue"


class Wide(BaseModel):
    """What pydantic writes with keywords that llguidance does not know."""

    tags: set[str]
    path: Path
    secret: SecretStr
    raw: bytes
    pattern: Pattern
    encoded: Base64Str
    counts: dict[Colour, int]


def test_pydantic_models_are_served(allows, caplog):
    caplog.set_level(logging.WARNING, "dflash_jax")
    text = {"tags": ["a"], "path": "/", "secret": "s", "raw": "", "pattern": "a+", "encoded": "YQ=="}
    schema = Wide.model_json_schema()
    assert allows(schema, json.dumps(text | {"counts": {"red": 1}}))
    assert not allows(schema, json.dumps(text | {"counts": {"green": 1}}))
    assert not allows(schema, json.dumps(text | {"counts": {"red": "1"}}))
    assert "enforced in part: " in caplog.text
    assert "uniqueItems" in caplog.text
    assert "password" in caplog.text


@pytest.mark.parametrize(
    ("value", "good", "bad", "word"),
    [
        ({"type": "string", "format": "uri-reference"}, '"x"', "1", "uri-reference"),
        ({"type": "string", "pattern": "^(?=a)[a-z]+$"}, '"x"', "1", "pattern"),
        ({"not": {"type": "string"}}, "1", None, "not"),
        ({"type": "array", "contains": {"type": "integer"}}, "[1]", "1", "contains"),
        ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]}, '"abcd"', "1", "oneOf"),
        (NAMED | {"dependentRequired": {"a": ["b"]}}, '{"a":"x"}', CLOSED, "dependentRequired"),
        (NAMED | {"if": {"required": ["a"]}, "then": {"required": ["a"]}}, '{"a":"x"}', CLOSED, "then"),
        (NAMED | {"anyOf": [{"not": {}}]}, '{"a":"x"}', CLOSED, "not"),
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_logged(allows, caplog, value, good, bad, word):
    caplog.set_level(logging.WARNING, "dflash_jax")
    schema = inside(value)
    assert allows(schema, f'{{"in":{good}}}')
    assert bad is None or not allows(schema, f'{{"in":{bad}}}')
    assert not allows(schema, f'{{"in":{good},"more":1}}')
    assert word in caplog.text


def test_names_by_pattern(allows):
    schema = {"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}, "additionalProperties": {"type": "integer"}}
    assert allows(schema, '{"x1":1,"x2":2}')
    assert not allows(schema, '{"y":1}')
    assert not allows(schema, '{"x1":"a"}')


def test_a_schema_that_is_none_is_refused_and_not_logged(constraints, caplog):
    for schema in ({"type": "foo"}, {"$ref": "#/$defs/x"}, {"properties": {"a": {"$ref": "https://example.com/x"}}}):
        with pytest.raises(RequestError, match=r"structured_outputs\.json cannot be served"):
            constraints["padded"].of(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert not caplog.records
