"""Text to reasoning, content and tool calls: the same whatever the chunks, and nothing lost."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.base.errors import ConfigError
from dflash_jax.text.parsing import Delta, OutputParser, ParsedOutput, ToolCall, collect, prompt_reasoning
from tests.serve.transcripts import ALL, CASES, CODER, HERMES, MALFORMED, NESTED, QWEN3, call, coder, hermes, out


def parser(**options) -> OutputParser:
    ids = itertools.count()
    return OutputParser(**options, new_id=lambda: f"id{next(ids)}")


def stream(chunks, **options) -> list[list[Delta]]:
    machine = parser(**options)
    return [*(machine.push(chunk) for chunk in chunks), machine.finish()]


def flat(batches) -> list[Delta]:
    return [delta for batch in batches for delta in batch]


@pytest.mark.parametrize(("text", "options", "expected"), CASES.values(), ids=CASES)
def test_whole(text, options, expected):
    machine = parser(**options)
    assert machine.parse_all(text) == expected
    assert machine.has_tool_calls == bool(expected.tool_calls)
    assert all(isinstance(json.loads(tool_call.arguments), dict) for tool_call in expected.tool_calls)


@pytest.mark.parametrize(("text", "options"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_come_back_as_text(text, options):
    machine = parser(**options)
    assert machine.parse_all(text) == out(text)
    assert not machine.has_tool_calls


@pytest.mark.parametrize(("text", "options"), ALL.values(), ids=ALL)
def test_chunks_do_not_matter(text, options):
    parsed = collect(flat(stream([text], **options)))
    assert collect(flat(stream(text, **options))) == parsed
    text = text[:400]  # of the one that is long to be deep
    parsed = collect(flat(stream([text], **options)))
    for cut in range(len(text) + 1):
        assert collect(flat(stream([text[:cut], text[cut:]], **options))) == parsed, (text[:cut], text[cut:])


@pytest.mark.parametrize("size", [1, 4, 99])
def test_arguments_of_a_named_tool_are_cut_with_the_text(size):
    """vLLM answers so, too; content could not be taken back from a stream that has begun a call."""
    text = '  {"city": "Par'
    machine = parser(tool_name="book")
    deltas = flat(machine.push(text[at : at + size]) for at in range(0, len(text), size))
    parsed = collect([*deltas, *machine.finish(is_whole=False)])
    assert parsed.content is None
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("book", '{"city": "Par')]
    before = parser(tool_name="book")
    assert collect([*before.push("  "), *before.finish(is_whole=False)]) == out("  ")


@pytest.mark.parametrize("name", ["thinks", "two calls and text", "several coder calls", "calls while thinking"])
def test_nothing_of_a_tag_leaves(name):
    text, options, expected = CASES[name]
    for cut in range(len(text) + 1):
        seen = collect(flat(stream([text[:cut]], **options)[:1]))  # what has left before the end is known
        assert (expected.content or "").startswith(seen.content or "")
        assert (expected.reasoning or "").startswith(seen.reasoning or "")
        for early, late in zip(seen.tool_calls, expected.tool_calls, strict=False):
            assert (early.id, early.name) == (late.id, late.name)
            assert late.arguments.startswith(early.arguments)


def fragments(text, **options):
    """The text of arguments that leaves with each character."""
    batches = stream(text, **options)
    return ["".join(d.tool_call.arguments for d in batch if d.tool_call is not None) for batch in batches]


def test_plain_text_leaves_at_once():
    batches = stream(["Hello ", "wor", "ld <", "3"], **QWEN3, **HERMES)
    assert [[d.content for d in batch] for batch in batches] == [["Hello"], [" wor"], ["ld"], [" <3"], []]
    assert flat(stream(["a \n", "<"], **QWEN3)[:2]) == [Delta(content="a \n"), Delta(content="<")]


def test_arguments_leave_as_they_come():
    text = hermes("f", '{"a": "xyz", "b": 12}')
    left = fragments(text, **HERMES)
    assert [piece for piece in left if piece] == [*'{"a": "xyz", "b": ', "12}"]
    assert left[text.index("y")] == "y"
    text = coder("book", city="xyz", nights=12)
    left = fragments(text, **CODER)
    assert left[text.index("xyz") + 1] == "y"
    assert [piece for piece in left if piece] == ['{"city": "', *"xyz", '"', ', "nights": ', "12", "}"]


def test_name_and_id_leave_once_and_first():
    for text, options in ((hermes("f", '{"a": 1}'), HERMES), (coder("f", a=1), CODER)):
        pieces = [delta.tool_call for delta in flat(stream(text, **options))]
        assert [(piece.id, piece.name) for piece in pieces] == [("id0", "f")] + [(None, None)] * (len(pieces) - 1)
        assert len(pieces) > 3


def test_a_call_that_breaks_after_pieces_left_is_retracted():
    broken = hermes("f", '{"a": 1, b}')
    text = f"A\n{broken} {hermes('g', '{}')}"
    batches = stream(text, **HERMES)
    pieces = [delta.tool_call for delta in flat(batches) if delta.tool_call is not None]
    assert [(piece.index, piece.retracted) for piece in pieces if piece.name or piece.retracted] == [
        (0, False),
        (0, True),
        (1, False),
    ]
    assert collect(flat(batches)) == ParsedOutput(None, f"A\n{broken}", [ToolCall("id1", "g", "{}")])


def test_text_after_a_malformed_call_is_read_again():
    good = hermes("f", "{}")
    assert parser(**HERMES).parse_all(f"<tool_call>{good}") == out("<tool_call>", call("f"))
    assert parser(**HERMES).parse_all(f'<tool_call>{{"name": {good}') == out('<tool_call>{"name":', call("f"))
    good = coder("f")
    assert parser(**CODER).parse_all(f"<tool_call><func{good}") == out("<tool_call><func", call("f"))
    # But not what it quotes.
    quoted = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>{\\"name\\"", "b": x'
    assert parser(**HERMES).parse_all(quoted) == out(quoted)


def test_finish_reports_a_truncated_call():
    batches = stream(['<tool_call>{"name": "f", "arguments": {"a": 1'], **HERMES)
    assert [delta.tool_call.retracted for delta in batches[1] if delta.tool_call] == [True]
    assert collect(batches[0]).tool_calls == [ToolCall("id0", "f", '{"a": ')]


def test_ids_are_vllms_and_differ():
    ids = [tool_call.id for tool_call in OutputParser(**HERMES).parse_all(hermes("f", "{}") * 9).tool_calls]
    assert len(set(ids)) == 9
    assert all(id_.startswith("chatcmpl-tool-") and int(id_[14:], 16) >= 0 for id_ in ids)


@pytest.mark.parametrize("options", [{"reasoning": "r1"}, {"tools": "pythonic"}])
def test_unknown_parsers(options):
    with pytest.raises(ConfigError, match="unknown; choose one of"):
        OutputParser(**options)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nso far", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>\n", True),
        ("", None),
    ],
)
def test_what_the_prompt_says_of_reasoning(prompt, expected):
    assert prompt_reasoning(prompt) is expected


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=book>", "</function>", "<parameter=city>",
    "</parameter>", "<parameter=nights>", "\n", " ", "<", "</", "x", "5", "{", "}", "[", "]", ",", '"', "\\", "é🎉",
    '{"name": "f", "arguments": {', '"a": ', '{"name": "g"}', hermes("h", NESTED), coder("book", nights=3),
]  # fmt: skip
OPTIONS = [
    {},
    QWEN3,
    HERMES,
    CODER,
    {**QWEN3, **HERMES},
    {**QWEN3, **CODER, "starts_in_reasoning": True},
    {**QWEN3, "tool_choice": "required"},
    {"tool_name": "f"},
]


@settings(deadline=None, max_examples=400)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=8), st.sampled_from(OPTIONS))
@example(["<function=book><parameter=city></think>"], OPTIONS[-3])
def test_any_chunks_of_any_text(chunks, options):
    text = "".join(chunks)
    parsed = parser(**options).parse_all(text)
    assert collect(flat(stream(chunks, **options))) == parsed
    assert collect(flat(stream(text, **options))) == parsed
    for tool_call in parsed.tool_calls:
        assert isinstance(json.loads(tool_call.arguments), dict)
    if not parsed.tool_calls:
        assert parsed == without_calls(text, **options)


def without_calls(text, reasoning=None, starts_in_reasoning=False, **_):
    """The expected answer of a text without tool calls, computed in a simpler way."""
    opened = reasoning is not None and text.lstrip().startswith("<think>")
    if opened:
        text = text.lstrip().removeprefix("<think>")
    thought, _, text = text.partition("</think>") if opened or starts_in_reasoning else ("", "", text)
    return out(text or None, reasoning=thought or None)


@given(st.text(), st.sampled_from(OPTIONS[:5]), st.data())
def test_text_without_tags_is_the_content(text, options, data):
    cut = data.draw(st.integers(0, len(text)))
    assert collect(flat(stream([text[:cut], text[cut:]], **options))) == out(text or None)


@given(st.dictionaries(st.sampled_from(["city", "note", "other"]), st.text(), max_size=3), st.data())
def test_strings_of_coder_survive(values, data):
    text = coder("book", **values)
    cut = data.draw(st.integers(0, len(text)))
    [tool_call] = collect(flat(stream([text[:cut], text[cut:]], **CODER))).tool_calls
    nulls = ("null", "None")  # which the schema of one of them allows
    expected = {key: None if key == "note" and text.strip() in nulls else text for key, text in values.items()}
    assert json.loads(tool_call.arguments) == expected
