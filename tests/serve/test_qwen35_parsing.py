"""What Qwen3.5 and later write: calls without closing tags, calls inside the reasoning, and values of every type."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.text.parsing import collect
from tests.serve.test_parsing import flat, parser, stream
from tests.serve.transcripts import CODER, QWEN3, call, coder, out

TYPES = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "real": {"type": "number"},
    "flag": {"type": "boolean"},
    "map": {"type": "object"},
    "many": {"type": "array"},
    "nothing": {"type": "null"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"anyOf": [{"type": "string"}, {"type": "object"}]},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}]
F = {"tools": "qwen3_coder", "tool_schemas": TOOLS}
THINKING = {**QWEN3, **F, "starts_in_reasoning": True}
BEGIN = "<tool_call>\n<function=f>\n"
TEXT, WHOLE = "<parameter=text>\na\n", "<parameter=whole>\n2\n"
CLOSED = "</parameter>\n"
END = "</function>\n</tool_call>"
A, AB = call("f", '{"text": "a"}'), call("f", '{"text": "a", "whole": 2}')
SECOND = call("f", '{"whole": 2}', 1)


def parse(text, **options):
    return parser(**options).parse_all(text)


WITHOUT_TAGS = {
    "no </parameter> before the next": (BEGIN + TEXT + WHOLE + CLOSED + END, [AB]),
    "nor before the end": (BEGIN + TEXT + WHOLE + END, [AB]),
    "typed, then a string": (
        BEGIN + WHOLE + TEXT + CLOSED + END,
        [call("f", '{"whole": 2, "text": "a"}')],
    ),
    "an empty value": (
        BEGIN + "<parameter=text>\n" + WHOLE + CLOSED + END,
        [call("f", '{"text": "", "whole": 2}')],
    ),
    "an empty value on one line": (
        BEGIN + "<parameter=text><parameter=whole>2</parameter>" + END,
        [call("f", '{"text": "", "whole": 2}')],
    ),
    "all on one line": ("<tool_call><function=f><parameter=text>a</function></tool_call>", [A]),
    "no </function>": (BEGIN + TEXT + CLOSED + "</tool_call>", [A]),
    "no </function> without parameters": (BEGIN + "</tool_call>", [call("f")]),
    "no </parameter>, no </function>": (BEGIN + TEXT + "</tool_call>", [A]),
    "no </parameter>, no </tool_call>": (BEGIN + TEXT + "</function>", [A]),
    "no </tool_call>": (BEGIN + TEXT + CLOSED + "</function>\n", [A]),
    "neither outer tag": (BEGIN + TEXT + CLOSED, [A]),
    "an outer tag that is cut": (BEGIN + TEXT + CLOSED + "</func", [A]),
    "a tag behind the value that is cut": (BEGIN + TEXT + "</function>\n</tool_", [A]),
    "neither outer tag before another call": (
        BEGIN + TEXT + CLOSED + BEGIN + WHOLE + CLOSED + END,
        [A, SECOND],
    ),
    "no </tool_call> before another call": (BEGIN + TEXT + CLOSED + "</function>\n" + BEGIN + WHOLE + END, [A, SECOND]),
    "no </parameter> before another call": (BEGIN + TEXT + "</tool_call>\n" + BEGIN + WHOLE + END, [A, SECOND]),
    "no </function> before another function": (
        BEGIN + TEXT + CLOSED + "<function=f>\n" + WHOLE + CLOSED + END,
        [A, SECOND],
    ),
    "parallel": ((BEGIN + TEXT + CLOSED + END + "\n") * 3, [call("f", '{"text": "a"}', i) for i in range(3)]),
}


@pytest.mark.parametrize(("text", "calls"), WITHOUT_TAGS.values(), ids=WITHOUT_TAGS)
def test_calls_without_some_tags(text, calls):
    expected = out(None, *calls)
    assert parse(text, **F) == expected
    for cut in range(len(text) + 1):
        assert collect(flat(stream([text[:cut], text[cut:]], **F))) == expected
    assert collect(flat(stream(text, **F))) == expected


VALUES = [
    "a < b && c > d",
    "<b>bold</b>\n\n  <i>x</i>",
    "\n\nblank lines\n\n",
    "</tool_call>\nand more",
    "x\n</function>\n\nx",
    "x\n</function>\n<function=g>",
    "x\n</function>" + " " * 9 + "</tool_call>",
    "say <parameter=whole> inline",
    "\n<parameter=text>",  # it has a value already
    "\n<parameter=unknown>\n",
    "\n<parameter=whole",
    "<parameter",
    "</",
    "\n",
    "",
]


@pytest.mark.parametrize("value", VALUES)
def test_what_looks_like_tags_stays_in_the_value(value):
    text = coder("f", text=value)
    for cut in range(len(text) + 1):
        (tool_call,) = collect(flat(stream([text[:cut], text[cut:]], **F))).tool_calls
        assert json.loads(tool_call.arguments) == {"text": value}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("whole", "-7", -7),
        ("real", "2.5e3", 2500.0),
        ("real", "3", 3),
        ("flag", "True", True),
        ("flag", "false", False),
        ("map", '{"a": {"b": "<\\n>"}}', {"a": {"b": "<\n>"}}),
        ("many", '[1, "<x>", null]', [1, "<x>", None]),
        ("many", "[\n  1\n]", [1]),
        ("nothing", "None", None),
        ("maybe", "null", None),
        ("maybe", "4", 4),
        ("either", "plain", "plain"),
        ("either", '{"a": 1}', {"a": 1}),
        ("undeclared", "5", "5"),
    ],
)
@pytest.mark.parametrize("closing", ["\n</parameter>\n", "\n"])
def test_values_have_the_types_of_the_schema(key, written, value, closing):
    text = f"{BEGIN}<parameter={key}>\n{written}{closing}{END}"
    (tool_call,) = parse(text, **F).tool_calls
    assert json.loads(tool_call.arguments) == {key: value}


@pytest.mark.parametrize("end", ["", CLOSED, CLOSED + "</func"])
def test_a_call_that_was_cut_is_no_call(end):
    text = BEGIN + TEXT + end
    machine = parser(**F)
    parsed = collect([*machine.push(text), *machine.finish(is_whole=False)])
    assert parsed == out(text)
    assert not machine.has_tool_calls


def test_a_cut_call_keeps_what_is_complete():
    machine = parser(**F)
    text = BEGIN + TEXT + CLOSED + "</function>\n"
    assert collect([*machine.push(text), *machine.finish(is_whole=False)]) == out(None, A)


@pytest.mark.parametrize("end", ["", "\n", "</param", "</parameter"])
def test_a_value_that_nothing_closes_is_no_call(end):
    text = BEGIN + "<parameter=text>\nParis" + end
    assert parse(text, **F) == out(text)


# ---- Inside the reasoning

CALL = BEGIN + TEXT + CLOSED + END
IN_REASONING = {
    "ends it": (f"hm\n{CALL}", out(None, A, reasoning="hm\n")),
    "ends it, and text follows": (f"hm {CALL}\nDone.\n", out("Done.", A, reasoning="hm ")),
    "ends it for several": (f"hm {CALL}\n{BEGIN}{WHOLE}{END} Done.", out("Done.", A, SECOND, reasoning="hm ")),
    "</think> behind it": (f"hm {CALL}\n</think>\n\n", out(None, A, reasoning="hm \n")),
    "thinks on": (f"hm {CALL} no</think>Yes.", out("Yes.", A, reasoning="hm  no")),
    "thinks on and calls again": (
        f"hm {CALL} no</think>\n\n{BEGIN}{WHOLE}{END}",
        out(None, A, SECOND, reasoning="hm  no"),
    ),
    "without closing tags": (f"hm {BEGIN}{TEXT}{CLOSED}", out(None, A, reasoning="hm ")),
    "only named": ("use <tool_call> here", out(reasoning="use <tool_call> here")),
    "named, then real": (f"use <tool_call> or {CALL}", out(None, A, reasoning="use <tool_call> or ")),
    "malformed": (f"{BEGIN}{TEXT}</parameter> or", out(reasoning=f"{BEGIN}{TEXT}</parameter> or")),
}


@pytest.mark.parametrize(("text", "expected"), IN_REASONING.values(), ids=IN_REASONING)
def test_calls_inside_the_reasoning(text, expected):
    for cut in range(len(text) + 1):
        assert collect(flat(stream([text[:cut], text[cut:]], **THINKING))) == expected
    assert parse(f"<think>{text}", **QWEN3, **F) == expected


PIECES = [
    BEGIN, TEXT, WHOLE, CLOSED, END, "</function>", "</tool_call>", "<tool_call>", "<function=f>", "</parameter>",
    "<parameter=", "text>", "\n", " ", "<", "</", "x", "</think>", "<think>", "5", '{"a": 1}', " " * 9,
    "<parameter=map>\n", "<parameter=either>",
]  # fmt: skip


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=8),
    st.sampled_from([F, CODER, THINKING, {**QWEN3, **F}]),
    st.booleans(),
)
def test_chunks_do_not_matter(chunks, options, is_whole):
    def parsed(pieces):
        machine = parser(**options)
        deltas = [delta for piece in pieces for delta in machine.push(piece)]
        return collect([*deltas, *machine.finish(is_whole=is_whole)])

    text = "".join(chunks)
    at_once = parsed([text])
    assert parsed(chunks) == parsed(text) == at_once
    for tool_call in at_once.tool_calls:
        assert isinstance(json.loads(tool_call.arguments), dict)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from(["text", "either"]), st.text("ab<>/\n =", max_size=30), min_size=1), st.data())
def test_strings_survive(values, data):
    text = coder("f", **values)
    cut = data.draw(st.integers(0, len(text)))
    (tool_call,) = collect(flat(stream([text[:cut], text[cut:]], **F))).tool_calls
    assert json.loads(tool_call.arguments) == values
