"""Answers of models, how to parse them, and what they say."""

from dflash_jax.text.parsing import ParsedOutput, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "nights": {"type": "integer"},
                    "price": {"type": "number"},
                    "pets": {"type": "boolean"},
                    "guests": {"type": "array"},
                    "room": {"$ref": "#/$defs/Room"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "$defs": {"Room": {"type": "object", "properties": {"sea": {"type": "boolean"}}}},
            },
        },
    }
]
HERMES = {"tools": "hermes"}
CODER = {"tools": "qwen3_coder", "tool_schemas": TOOLS}
QWEN3 = {"reasoning": "qwen3"}


def out(content=None, *calls, reasoning=None) -> ParsedOutput:
    return ParsedOutput(reasoning, content, [ToolCall(f"id{i}", *call) for i, call in calls])


def call(name, arguments="{}", i=0):
    return i, (name, arguments)


def hermes(name, arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(name, **values) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


NESTED = '{"a": {"b": [1, -2.5e3, true, null, []]}, "c": {}}'
TRICKY = '{"s": "<tool_call> </tool_call> {\\"}\\" [\\\\ </think> \\u00e9\\ud83d\\ude00 日本 🎉", "n": 0}'
TYPED = {
    "city": 'a "b" \\ <b> </para\n日本',
    "nights": 3,
    "price": 2.50,
    "pets": "True",
    "guests": '["x", {"y": null}]',
}
TYPED_JSON = (
    r'{"city": "a \"b\" \\ <b> </para\n日本", '
    '"nights": 3, "price": 2.5, "pets": true, "guests": ["x", {"y": null}]}'
)

CASES = {
    # Reasoning
    "thinks": ("<think>\nhm < 3\n</think>\n\nYes.\n", QWEN3, out("\n\nYes.\n", reasoning="\nhm < 3\n")),
    "blank before thinking": ("\n <think>a</think>b", QWEN3, out("b", reasoning="a")),
    "never stops thinking": ("<think>a</thin", QWEN3, out(reasoning="a</thin")),
    "does not think": ("<thinker> a", QWEN3, out("<thinker> a")),
    "only a beginning": ("\n<thi", QWEN3, out("\n<thi")),
    "thinks of nothing": ("<think></think>a", QWEN3, out("a")),
    "later tags are text": ("a<think>b</think>", QWEN3, out("a<think>b</think>")),
    "prompt thinks": ("hm</think>Yes", {**QWEN3, "starts_in_reasoning": True}, out("Yes", reasoning="hm")),
    "prompt thinks, unclosed": ("\nhm", {**QWEN3, "starts_in_reasoning": True}, out(reasoning="\nhm")),
    "prompt thinks, opened twice": (
        "<think>a</think>b",
        {**QWEN3, "starts_in_reasoning": True},
        out("b", reasoning="a"),
    ),
    "no reasoning parser": ("<think>a</think>b", {}, out("<think>a</think>b")),
    # Hermes
    "call": (hermes("f", NESTED), HERMES, out(None, call("f", NESTED))),
    "tricky strings": (hermes("f", TRICKY), HERMES, out(None, call("f", TRICKY))),
    "raw newline in a string": (hermes("f", '{"a": "x\n\ty"}'), HERMES, out(None, call("f", '{"a": "x\\n\\ty"}'))),
    "two calls and text": (
        f"\nA\n{hermes('f', '{}')} B\n\n{hermes('g', NESTED)}\n C \n",
        HERMES,
        out("\nA\n B\n\n\n C", call("f"), call("g", NESTED, 1)),
    ),
    "only white space beside calls": (
        f"\n\n{hermes('f', '{}')}\n{hermes('g', '{}')}\n",
        HERMES,
        out(None, call("f"), call("g", i=1)),
    ),
    "text after a call": (f"\n{hermes('f', '{}')}\n\nDone.\n", HERMES, out("Done.", call("f"))),
    "other members": (
        '<tool_call>{"id": 7, "x": [{"name": "no"}], "parameters": {"a": 1}, "name": "f\\u00e9"}</tool_call>',
        HERMES,
        out(None, call("fé", '{"a": 1}')),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', HERMES, out(None, call("f"))),
    "closing tag missing": ('<tool_call>{"name": "f", "arguments": {}}', HERMES, out(None, call("f"))),
    "closing tag cut": ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', HERMES, out(None, call("f"))),
    "brace too many": ('<tool_call>{"name": "f"}}</tool_call>', HERMES, out("}</tool_call>", call("f"))),
    "thinks, then calls": (
        f"<think>a\n</think>\n\n{hermes('f', '{}')}",
        {**QWEN3, **HERMES},
        out(None, call("f"), reasoning="a\n"),
    ),
    "calls while thinking": (
        f"<think>a {hermes('f', '{}')} b</think>c",
        {**QWEN3, **HERMES},
        out("c", call("f"), reasoning="a  b"),
    ),
    "names the tag while thinking": (
        "<think>a <tool_call> b</think>c",
        {**QWEN3, **HERMES},
        out("c", reasoning="a <tool_call> b"),
    ),
    "tools unused": ("a < b\n", HERMES, out("a < b\n")),
    "tools off": (hermes("f", "{}"), {}, out(hermes("f", "{}"))),
    "tool_choice none": (hermes("f", "{}"), {**HERMES, "tool_choice": "none"}, out(hermes("f", "{}"))),
    # Qwen3-Coder
    "typed": (coder("book", **TYPED), CODER, out(None, call("book", TYPED_JSON))),
    "reference": (coder("book", room='{"sea":\n true}'), CODER, out(None, call("book", '{"room": {"sea":\n true}}'))),
    "wrong types": (
        coder("book", nights="two", pets="1", note="None"),
        CODER,
        out(None, call("book", '{"nights": "two", "pets": 1, "note": null}')),
    ),
    "unknown tool": (coder("f", a="1", b="null"), CODER, out(None, call("f", '{"a": "1", "b": "null"}'))),
    "one newline each end": (
        coder("book", city="\n x\n\n", note="\n"),
        CODER,
        out(None, call("book", '{"city": "\\n x\\n\\n", "note": "\\n"}')),
    ),
    "empty values": (
        "<tool_call><function=f><parameter=a></parameter><parameter=b>\n</parameter></function></tool_call>",
        CODER,
        out(None, call("f", '{"a": "", "b": ""}')),
    ),
    "tags in a value": (
        coder("f", code="<tool_call>\n</function>\n<parameter=b></tool_call>"),
        CODER,
        out(None, call("f", '{"code": "<tool_call>\\n</function>\\n<parameter=b></tool_call>"}')),
    ),
    "no parameters": ("<tool_call><function=f></function></tool_call>", CODER, out(None, call("f"))),
    "several coder calls": (
        f"A\n{coder('f', a='x')}\n{coder('g')}\n",
        CODER,
        out("A", call("f", '{"a": "x"}'), call("g", i=1)),
    ),
    "several functions in one": (
        "<tool_call><function=f></function>\n<function=g></function></tool_call>",
        CODER,
        out(None, call("f"), call("g", i=1)),
    ),
    "opening tag missing": ("A\n<function=f>\n</function>\n</tool_call>\n", CODER, out("A", call("f"))),
    "both outer tags missing": ("<function=f></function>\nB", CODER, out("B", call("f"))),
    # Forced by a grammar
    "required": (
        ' [{"name": "f", "parameters": {"a": "]"}} , {"name": "g", "arguments": {}}]\n',
        {"tool_choice": "required"},
        out(None, call("f", '{"a": "]"}'), call("g", i=1)),
    ),
    "required after thinking": (
        '<think>[</think>\n\n[{"name": "f"}]',
        {**QWEN3, **HERMES, "tool_choice": "required"},
        out(None, call("f"), reasoning="["),
    ),
    "required, cut between": ('[{"name": "f"}, ', {"tool_choice": "required"}, out(None, call("f"))),
    "required, cut in the second": (
        '[{"name": "f"}, {"name": "g", "parameters": {"a',
        {"tool_choice": "required"},
        out(', {"name": "g", "parameters": {"a', call("f")),
    ),
    "named": (f" {TRICKY}\n", {"tool_name": "f"}, out(None, call("f", TRICKY))),
    "named after thinking": (
        "{</think>\n\n{}",
        {**QWEN3, "starts_in_reasoning": True, "tool_name": "f"},
        out(None, call("f"), reasoning="{"),
    ),
}

# Text whose every call is malformed: it comes back as it is.
MALFORMED = {
    "not json": (" <tool_call>\nf(1)\n</tool_call>\n", HERMES),
    "python's constants": (hermes("f", '{"a": True}'), HERMES),
    "no number": (hermes("f", '{"a": 01}'), HERMES),
    "not a number": (hermes("f", '{"a": NaN}'), HERMES),
    "trailing comma": (hermes("f", '{"a": 1,}'), HERMES),
    "bad escape": (hermes("f", '{"a": "\\x"}'), HERMES),
    "mismatched": (hermes("f", '{"a": [1}'), HERMES),
    "arguments are no object": (hermes("f", '"{}"'), HERMES),
    "arguments twice": ('<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}</tool_call>', HERMES),
    "nameless": ('<tool_call>{"arguments": {"a": 1}}</tool_call>', HERMES),
    "empty name": (hermes("", "{}"), HERMES),
    "unsendable name": (hermes("\\ud800", "{}"), HERMES),
    "name is no string": ('<tool_call>{"name": {}, "arguments": {}}</tool_call>', HERMES),
    "cut in the arguments": ('A\n<tool_call>{"name": "f", "arguments": {"a": "x', HERMES),
    "cut in the name": ('<tool_call>{"name": "f', HERMES),
    "cut in an escape": ('<tool_call>{"name": "f", "arguments": {"a": "\\u00', HERMES),
    "tag alone": ("<tool_call>\n", HERMES),
    "nested without end": ('<tool_call>{"name": "f", "arguments": ' + '{"a":[' * 3000, HERMES),
    "prose about functions": ("use `<function=x>` and <function=y\n <function=>", CODER),
    "nameless function": ("<tool_call><function=></function></tool_call>", CODER),
    "text for a parameter": (
        "<tool_call>\n<function=f>\n<parameter=a>1</parameter> or\n</function>\n</tool_call>",
        CODER,
    ),
    "cut in a value": ("A\n<tool_call>\n<function=book>\n<parameter=city>\nParis\n</param", CODER),
    "hermes for coder": (hermes("f", "{}"), CODER),
    "coder for hermes": (coder("f", a=1), HERMES),
    "required but prose": ("\n I can't.\n", {"tool_choice": "required"}),
    "required but empty": ("[]", {"tool_choice": "required"}),
    "required, cut": ('[{"name": "f", "parameters": {"a": 1', {"tool_choice": "required"}),
    "named but a list": ("[1]", {"tool_name": "f"}),
    "named, cut": ('{"a": 1', {"tool_name": "f"}),
}
ALL = {name: case[:2] for name, case in CASES.items()} | MALFORMED
