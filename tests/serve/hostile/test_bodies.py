"""Bodies that cannot be served get a 4xx in bounded time; hard ones are served; a stream beside them goes on."""

import json
import threading

import pytest

from tests.serve.hostile.attack import HELLO, KEYS, NORMAL, PATIENCE, raw, refused, request, status_of


def nested_schema(depth: int) -> str:
    """A schema of nested objects, as text, since Python's own writer does not go so deep."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def chain(rule: str, length: int) -> str:
    """A grammar in which each rule refers to the next."""
    name = rule[0]
    return "\n".join([f"start: {name}0", *(rule.format(i, i + 1) for i in range(length)), f'{name}{length}: "b"'])


def ask(**fields) -> bytes:
    return json.dumps(HELLO | fields).encode()


DEEP_SCHEMA = b'{"type":"json_schema","json_schema":{"name":"x","schema":%b}}' % nested_schema(2000).encode()
BAD_BODIES = {
    "empty": b" ",
    "no JSON": b"{'prompt': 1}",
    "half": b'{"prompt": "a"',
    "trailing": b'{"prompt": "a"} x',
    "a list": b"[1, 2]",
    "a string": b'"prompt"',
    "null": b"null",
    "wrong types": b'{"prompt": {"a": 1}, "max_tokens": "many"}',
    "a boolean for a number": b'{"prompt": "a", "max_tokens": true}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16 without a mark": '{"prompt": "a"}'.encode("utf-16-be") + b"\xd8",
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate as stop": b'{"prompt": "a", "stop": "\\udfff"}',
    "a lone surrogate in a regex": b'{"prompt": "a", "structured_outputs": {"regex": "\\udfff"}}',
    "a lone surrogate as bad word": b'{"prompt": "a", "bad_words": ["\\udfff"]}',
    "a lone surrogate as model": b'{"prompt": "a", "model": "\\ud83d"}',
    "a lone surrogate in an id": b'{"prompt": "a", "request_id": "\\ud83d"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "1e999": b'{"prompt": "a", "logit_bias": {"1": 1e999}}',
    "a long integer": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a wide integer": b'{"prompt": [99999999999999999999]}',
    "deep arrays": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "open brackets": b"[" * 100_000,
    "max_tokens": ask(max_tokens=-(10**18)),
    "n": ask(n=10**9),
    "negative n": ask(n=-1),
    "logprobs": ask(logprobs=10**6),
    "a large logit_bias": ask(logit_bias={str(i): 200 for i in range(100_000)}),
    "a logit_bias beyond the vocabulary": ask(logit_bias={str(i): 1 for i in range(100_000)}),
    "stop strings": ask(stop=[f"s{i}" for i in range(10_000)]),
    "too many prompts": ask(prompt=["a"] * 1025),
    "a million tokens": ask(prompt=[1] * 1_000_000),
    "a million letters": ask(prompt="ab " * 350_000),
    "tokens that are none": ask(prompt=[2**31 - 1]),
    "an unknown model": ask(model="x" * 100_000),
    "a deep schema": b'{"prompt":"a","response_format":%b}' % DEEP_SCHEMA,
    "a deep schema as text": ask(structured_outputs={"json": nested_schema(2000)}),
    "a huge schema": ask(structured_outputs={"json": {"properties": {f"p{i}": {} for i in range(100_000)}}}),
    "a schema of many properties": ask(
        structured_outputs={"json": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}}
    ),
    "a schema that is itself": ask(structured_outputs={"json": {"$ref": "#"}}),
    "a schema with a remote part": ask(structured_outputs={"json": {"$ref": "http://169.254.169.254/x"}}),
    "a regex of parentheses": ask(structured_outputs={"regex": "(" * 100_000 + "a" + ")" * 100_000}),
    "a quadratic regex": ask(structured_outputs={"regex": "(a?)" * 20_000 + "a" * 20_000}),
    "a regex with a look behind": ask(structured_outputs={"regex": "(?<=a)b"}),
    "a megabyte of alternatives": ask(structured_outputs={"regex": "|".join(f"w{i:06}" for i in range(130_000))}),
    "a grammar of parentheses": ask(structured_outputs={"grammar": "start: " + "(" * 9_999 + '"a"' + ")" * 9_999}),
    "a deep GBNF": ask(structured_outputs={"grammar": "root ::= " + "(" * 9_999 + '"a"' + ")" * 9_999}),
    "a grammar of doubling terminals": ask(structured_outputs={"grammar": chain("R{0}: R{1} R{1}", 40)}),
    "a grammar of a chain": ask(structured_outputs={"grammar": chain("r{0}: r{1}", 20_000)}),
    "a choice of many": ask(structured_outputs={"choice": [f"c{i}" for i in range(100_000)]}),
    "no choice": ask(structured_outputs={"choice": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_cannot_be_served(server, name):
    answer = raw(server, request(BAD_BODIES[name]))
    assert refused(status_of(answer)), answer[:500]
    _, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error["code"] in (status_of(answer), "context_length_exceeded")
    assert len(body) < 12_000


REFERENCES = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
HARD_TASKS = {
    "a regex bomb": {"regex": "(a{1,1000}){1,1000}"},
    "a regex of nested quantifiers": {"regex": "(((((a+)+)+)+)+)+b"},
    "an exponential regex": {"regex": "[ab]*a[ab]{25}"},
    "alternatives": {"regex": "|".join(f"w{i:06}" for i in range(8_000))},
    "a quadratic regex": {"regex": "(a?)" * 8_000 + "a" * 8_000},
    "repeated rules": {"grammar": "start: b{1,1000}\nb: c{1,1000}\nc: d{1,1000}\nd: /a{1,1000}/"},
    "an ambiguous grammar": {"grammar": 'start: start start start | "a" | '},
    "rules three thousand deep": {"grammar": chain('r{0}: "a" r{1}', 3300)},
    "references": {"json": {"$defs": REFERENCES | {"d900": {}}, "$ref": "#/$defs/d0"}},
    "a long string": {"json": {"type": "string", "maxLength": 10**8}},
    "many items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
}  # fmt: skip


@pytest.mark.parametrize("name", HARD_TASKS)
def test_a_hard_grammar_is_served_or_refused(server, name):
    """None of these ends the engine, holds others up, or is the server's failure."""
    status, body = server.post(
        "/v1/completions", HELLO | {"max_tokens": 8, "structured_outputs": HARD_TASKS[name]}, KEYS[0]
    )
    assert status == 200 or 400 <= status < 500, body


def test_many_entries_that_can_be_served(server):
    status, body = server.post("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 1}, KEYS[0])
    assert status == 200
    assert len(body["choices"]) == 1024
    status, _ = server.post("/v1/completions", HELLO | {"logit_bias": {str(i): 1 for i in range(1000)}}, KEYS[0])
    assert status == 200


def test_a_slow_grammar_holds_up_neither_others_nor_aborts(server):
    """Grammars that take seconds; meanwhile other requests are answered, and the neighbour streams."""
    slow = {"regex": "(a?)" * 13_000 + "a" * 13_000}  # about as long as may be
    bodies = [json.dumps(HELLO | {"structured_outputs": slow, "request_id": f"slow-{i}"}).encode() for i in range(4)]
    results = []
    for _ in range(20):  # rounds of each length wait once for a program to be compiled
        server.post("/v1/completions", NORMAL, KEYS[0])
    threads = [threading.Thread(target=lambda b=b: results.append(raw(server, request(b)))) for b in bodies]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: json.loads(server.get("/load")[1])["server_load"] >= 4)
    assert server.post("/v1/completions", NORMAL, KEYS[0])[1]["choices"][0]["text"] == server.expected
    assert not results  # all of this while the first was still compiled
    for i in range(4):
        assert server.post("/abort_request", {"rid": f"slow-{i}"}, KEYS[0])[0] == 200
    for thread in threads:
        thread.join(PATIENCE)
    assert [status_of(result) for result in results] == [200] * 4
    assert all(b'"finish_reason":"abort"' in result for result in results)
