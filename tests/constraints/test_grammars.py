"""Constraints: what the masks of a block allow, against fresh matchers token by token and against the definitions."""

import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import SamplingParams, StructuredOutputsParams
from dflash_jax.engine.host.constraints import (
    Constraint,
    Constraints,
    GrammarConstraint,
    Vocabulary,
    fill_masks,
    llguidance_grammar,
)
from tests.constraints.rows import allowed, blank
from tests.pairs import EOS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
LARK = """
start: sum
sum: NUMBER ("+" NUMBER)*
NUMBER: /[1-9][0-9]{0,2}/
"""
GBNF = """
root   ::= number ("+" number)*
number ::= [1-9] [0-9]{0,2}
"""
CHOICES = ["red", "green", "grün", 'say "no"\\', "😀"]


def obeys_schema(text):
    value = json.loads(text)
    assert list(value) == ["name", "tags", "age"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "b"}
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150


def matches(pattern):
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(f"{text!r} is no {pattern}")


STRUCTURES = {
    "json": (StructuredOutputsParams(json=SCHEMA), obeys_schema),
    "json_object": (StructuredOutputsParams(json_object=True), lambda text: dict(json.loads(text))),
    "regex": (StructuredOutputsParams(regex=r"(ab?|c{2,4})+\.[0-9]{3}"), matches(r"(ab?|c{2,4})+\.[0-9]{3}")),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.index),
    "lark": (StructuredOutputsParams(grammar=LARK), matches(r"[1-9]\d{0,2}(\+[1-9]\d{0,2})*")),
    "gbnf": (StructuredOutputsParams(grammar=GBNF), matches(r"[1-9]\d{0,2}(\+[1-9]\d{0,2})*")),
}


def asked(**params):
    return SamplingParams(structured_outputs=StructuredOutputsParams(**params))


def one_by_one(model, structured, tokens):
    """What llguidance itself allows after each prefix of a text, by a fresh matcher that never saw a draft.

    The model's other ends are allowed where its first is, and nowhere else.
    """
    tokenizer, vocab_size, (end, *others) = model
    ll = from_tokenizer(tokenizer.hf, n_vocab=max(vocab_size, len(tokenizer.hf)), eos_token=end)
    matcher = LLMatcher(ll, llguidance_grammar(structured))
    found = []
    for token in [*tokens, None]:
        mask = set(allowed(np.frombuffer(matcher.compute_bitmask(), np.uint8))) - set(others)
        ends = others if end in mask else ()
        found.append(sorted(t for t in (*mask, *ends) if t < vocab_size))
        assert token is None or matcher.consume_token(end if token in others else token)
    return found


def round_of(rng, structure, vocab_size, block):
    """One round as the engine makes it: drafts good and bad, masks, and a choice in every row that is reached."""
    probe = structure.grammar.matcher.deep_copy()
    drafts = []
    for _ in range(block - 1):
        good = [t for t in allowed(np.frombuffer(probe.compute_bitmask(), np.uint8)) if t < vocab_size]
        drafts.append(int(rng.choice(good) if rng.random() < 0.8 else rng.integers(vocab_size)))
        if drafts[-1] not in good:
            break
        probe.consume_token(drafts[-1])
    drafts += rng.integers(-1, vocab_size + 40, block - 1 - len(drafts)).tolist()  # a drafter may say anything
    rows = blank(block, vocab_size)
    structure.fill(rows, drafts)
    seen, emitted = [], []
    for row, draft in zip(rows, [*drafts, -1], strict=True):
        seen.append(allowed(row))
        follows = draft in seen[-1] and rng.random() < 0.8
        emitted.append(draft if follows else int(rng.choice(seen[-1])))
        if emitted[-1] != draft:
            break
    return seen, emitted


@pytest.mark.parametrize("model", ["padded", "exact", "short"])
@pytest.mark.parametrize("kind", STRUCTURES)
@settings(deadline=None, max_examples=6, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), block=st.sampled_from([1, 2, 6, 16]))
def test_rounds_of_drafts_are_masked_as_single_tokens_are(models, constraints, kind, model, seed, block):
    """Every row that is reached allows what a fresh matcher allows there, and the text comes out in the form."""
    rng = np.random.default_rng(seed)
    tokenizer, vocab_size, ends = models[model]
    structured, check = STRUCTURES[kind]
    structure = constraints[model].of(SamplingParams(structured_outputs=structured))
    tokens, masks = [], []
    while len(tokens) < 400 and not set(tokens) & set(ends):
        seen, emitted = round_of(rng, structure, vocab_size, block)
        emitted = emitted[: next((i + 1 for i, token in enumerate(emitted) if token in ends), len(emitted))]
        structure.accept(emitted)
        tokens += emitted
        masks += seen[: len(emitted)]
        assert structure.error is None
    assert masks == one_by_one(models[model], structured, tokens)[: len(masks)]
    if tokens[-1] in ends:
        assert structure.is_complete
        check(tokenizer.decode(tokens[:-1]))


OPENS, CLOSES = 900, 901  # tokens that the grammar below never allows


def masks_token_by_token(constraint, tokens, vocab_size):
    found = []
    for token in tokens:
        row = blank(1, vocab_size)
        constraint.fill(row, [])
        found.append(row[0])
        constraint.accept([token])
    return found


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    thoughts=st.none() | st.lists(st.sampled_from([OPENS, 5, 7]), max_size=6),
    starts_open=st.booleans(),
    block=st.integers(1, 8),
)
def test_reasoning_is_left_alone(models, constraints, thoughts, starts_open, block):
    """Whatever is thought, up to its end; then the grammar, wherever blocks cut."""
    tokenizer, vocab_size, _ = models["exact"]
    structured = StructuredOutputsParams(choice=["ab", "ba"])
    reasoning = (None if starts_open else OPENS, CLOSES)
    params = SamplingParams(structured_outputs=structured, reasoning_token_ids=reasoning)
    answer = tokenizer.hf.encode("ab", add_special_tokens=False)
    if thoughts is None and not starts_open:
        before = []
    else:
        before = [*([] if starts_open else [OPENS]), *(thoughts or []), CLOSES]
    text = [*before, *answer]

    ruled = masks_token_by_token(constraints["exact"].of(asked(choice=["ab", "ba"])), answer, vocab_size)
    expected = [blank(1, vocab_size)[0] for _ in before] + ruled
    if not starts_open:  # where reasoning or the answer may begin, nothing else may
        expected[0] = ruled[0].copy()
        expected[0][OPENS // 32] |= np.uint32(1 << OPENS % 32)
    single = constraints["exact"].of(params)
    np.testing.assert_array_equal(masks_token_by_token(single, text, vocab_size), expected)
    assert single.is_complete

    constraint = constraints["exact"].of(params)
    for start in range(0, len(text), block):
        drafts = text[start : start + block]
        rows = blank(block + 1, vocab_size)
        constraint.fill(rows, drafts)
        constraint.accept(drafts)
        np.testing.assert_array_equal(rows[: len(drafts)], expected[start : start + block])
    assert constraint.error is None
    assert constraint.is_complete


@pytest.mark.parametrize("model", ["padded", "exact", "short"])
def test_every_end_and_no_padding(models, constraints, model):
    tokenizer, vocab_size, ends = models[model]
    structure = constraints[model].of(asked(regex="(?s:.*)"))
    rows = blank(1, vocab_size)
    structure.fill(rows, [])
    anything = allowed(rows[0])
    assert {end for end in ends if end < vocab_size} <= set(anything)
    assert max(anything) < min(vocab_size, len(tokenizer.hf))
    structure = constraints[model].of(asked(regex="ab"))
    assert not structure.is_complete
    structure.accept(tokenizer.encode("ab"))
    rows = blank(1, vocab_size)
    structure.fill(rows, [])
    assert structure.is_complete
    assert allowed(rows[0]) == sorted(end for end in ends if end < vocab_size)


def test_an_end_that_is_text_is_no_text_in_a_grammar(byte_tokenizer, constraints):
    """Token 7 is "(" to this tokenizer and ends the model's texts: inside a form it would break it off."""
    assert byte_tokenizer.encode("(") == [7]
    structure = constraints["padded"].of(asked(regex=r"\(?[()]!"))
    rows = blank(3, 300)
    structure.fill(rows, byte_tokenizer.encode(")!"))
    assert [allowed(row) for row in rows] == [byte_tokenizer.encode(")"), byte_tokenizer.encode("!"), [7, EOS]]
    structure.accept([*byte_tokenizer.encode(")!"), 7])
    assert (structure.is_complete, structure.error) == (True, None)


def test_what_follows_the_end_is_no_text(byte_tokenizer, constraints):
    structure = constraints["padded"].of(asked(regex="ab+"))
    structure.accept([*byte_tokenizer.encode("abb"), EOS, 3])
    structure.accept([EOS, EOS])
    rows = blank(4, 300)
    structure.fill(rows, [EOS, 3, 299])
    assert (structure.is_complete, structure.error) == (True, None)
    assert allowed(rows[0]) == [7, EOS]


def test_filling_only_clears(constraints, byte_tokenizer):
    structure = constraints["padded"].of(asked(regex="[a-e]x"))
    rows = blank(2, 300)
    only = byte_tokenizer.encode("cdz")
    rows[0] = 0
    for token in only:
        rows[0, token // 32] |= np.uint32(1 << token % 32)
    structure.fill(rows, only[:1])
    assert allowed(rows[0]) == only[:2]
    assert allowed(rows[1]) == byte_tokenizer.encode("x")


def test_drafts_beyond_the_rows_are_left_out(byte_tokenizer, constraints):
    """Llguidance writes a row a draft, into the next sequence's rows if they are not its own."""
    first, second = (constraints["padded"].of(asked(regex=text)) for text in ("abcdef", "xyz"))
    rows = blank(6, 300)
    fill_masks([(first, rows[:2], byte_tokenizer.encode("abcde")), (second, rows[2:], byte_tokenizer.encode("!"))])
    assert [allowed(row) for row in rows[:3]] == [[token] for token in byte_tokenizer.encode("abx")]
    assert all(len(allowed(row)) == 300 for row in rows[3:])  # behind a draft that is none


def test_many_sequences_in_one_call(models, constraints):
    """Filled together or alone, with any number of rows each, sequences get the same."""
    rng = np.random.default_rng(0)
    batch, alone = [], []
    for kind, (structured, _) in STRUCTURES.items():
        structure = constraints["exact"].of(SamplingParams(structured_outputs=structured, bad_words=["a", "red"]))
        vocab_size = models["exact"][1]
        drafts = rng.integers(0, vocab_size, len(kind)).tolist()
        rows = blank(len(kind) + 1, vocab_size)
        structure.fill(rows, drafts)
        alone.append(rows)
        batch.append((structure, blank(len(rows), vocab_size), drafts))
    batch.append((constraints["exact"].of(SamplingParams(bad_words=["a"])), blank(1, vocab_size), []))
    fill_masks(batch)
    for (_, together, _), rows in zip(batch, alone, strict=False):
        np.testing.assert_array_equal(together, rows)
    a, spaced = (models["exact"][0].hf.encode(text, add_special_tokens=False)[0] for text in ("a", " a"))
    assert set(range(vocab_size)) - set(allowed(batch[-1][1][0])) == {a, spaced}
    fill_masks([])


def test_completions_do_not_share_their_place(byte_tokenizer, constraints):
    first, second = (constraints["padded"].of(asked(regex="ab")) for _ in range(2))
    first.accept(byte_tokenizer.encode("a"))
    rows = blank(2, 300)
    fill_masks([(first, rows[:1], []), (second, rows[1:], [])])
    assert [allowed(row) for row in rows] == [byte_tokenizer.encode("b"), byte_tokenizer.encode("a")]


def test_a_token_out_of_place_is_an_error(byte_tokenizer, constraints):
    structure = constraints["padded"].of(asked(regex="ab"))
    structure.accept(byte_tokenizer.encode("b"))
    assert "grammar" in structure.error
    assert not re.search("<|\n", structure.error)  # the text and the grammar are not for logs
    assert constraints["padded"].of(asked(regex="ab")).error is None


def test_a_text_too_hard_to_follow_is_an_error(byte_tokenizer, models):
    tokenizer, vocab_size, _ = models["padded"]
    limits = LLParserLimits(step_lexer_fuel=1, step_max_items=1, verbose_errors=False)
    ll = from_tokenizer(tokenizer.hf, n_vocab=vocab_size, eos_token=EOS)
    matcher = LLMatcher(ll, llguidance_grammar(STRUCTURES["json"][0]), limits=limits, log_level=0)
    structure = Constraint(GrammarConstraint(matcher, Vocabulary(vocab_size, vocab_size, EOS, ())), None)
    rows = blank(3, vocab_size)
    for token in byte_tokenizer.encode('{"name":"x","tags":['):
        structure.fill(rows, [])
        structure.accept([token])
    assert structure.error
    structure.fill(blank(1, vocab_size), [])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a("}, "structured_outputs.regex .*unclosed group.*correct it"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex cannot be served"),
        ({"json": {"type": "foo"}}, "structured_outputs.json .*foo"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "structured_outputs.json"),
        ({"grammar": "start: <[7]>"}, "allows no text"),  # the end of a text is not for grammars to name
        ({"grammar": "start: x"}, "structured_outputs.grammar .*unknown name"),
        ({"grammar": "root ::= x"}, "'x' not found"),
        ({"grammar": 'rule ::= "x"'}, "root"),
        ({"grammar": "root ::= " + "(" * 10_000}, "structured_outputs.grammar"),
        ({"grammar": "\ud800"}, "grammar="),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(constraints, given, words):
    with pytest.raises(RequestError, match=words) as error:
        constraints["padded"].of(asked(**given))
    assert len(str(error.value)) < 350
    assert "\n" not in str(error.value)


def test_grammars_need_an_end(byte_tokenizer):
    for ends in ((), (7,), (400,)):  # none, one that is text, one that the model has not
        with pytest.raises(RequestError, match="end-of-sequence"):
            Constraints(byte_tokenizer, 300, ends).of(asked(regex="a"))


def test_no_constraint_unless_asked(constraints):
    assert constraints["padded"].of(SamplingParams()) is None


def test_time_to_fill(models, constraints, capsys):
    """A round of 64 sequences; printed, as times depend on the machine."""
    vocab_size = models["exact"][1]
    batch = []
    for i in range(64):
        structure = constraints["exact"].of(SamplingParams(structured_outputs=list(STRUCTURES.values())[i % 6][0]))
        probe, drafts = structure.grammar.matcher.deep_copy(), []
        for _ in range(15):
            drafts.append(allowed(np.frombuffer(probe.compute_bitmask(), np.uint8))[0])
            probe.consume_token(drafts[-1])
        batch.append((structure, blank(16, vocab_size), drafts))
    start = time.perf_counter()
    fill_masks(batch)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n64 sequences of 16 rows over {vocab_size} tokens: {1e3 * seconds:.1f} ms")
    assert all(len(allowed(rows[0])) < vocab_size for _, rows, _ in batch)
