"""Bad words: what they rule out in a block, against their definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.base.errors import RequestError
from dflash_jax.base.values import SamplingParams, StructuredOutputsParams
from dflash_jax.engine.host.constraints import BadWords, Constraints
from tests.constraints.rows import allowed, blank
from tests.pairs import EOS


@settings(deadline=None, max_examples=100)
@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=5),
    drafts=st.lists(st.integers(0, 3), max_size=5),
)
def test_bad_words_against_their_definition(words, steps, drafts):
    constraint, output = BadWords(words), []
    for tokens in steps:
        constraint.accept(tokens)
        output += tokens
    rows = blank(len(drafts) + 1, 40)
    constraint.fill(rows, drafts)
    for j, row in enumerate(rows):
        text = (*output, *drafts[:j])
        bad = {token for token in range(4) for word in words if (*text, token)[-len(word) :] == word}
        assert allowed(row) == [token for token in range(64) if token not in bad]


def test_bad_words_are_of_the_output(byte_tokenizer, constraints):
    """Words begin in the output, at its beginning or after a space; the prompt is not looked at."""
    first, last, space = byte_tokenizer.encode("no ")
    structure = constraints["padded"].of(SamplingParams(bad_words=[" no", "x"]))
    structure.accept([space])
    rows = blank(3, 300)
    structure.fill(rows, [first, last])
    x = byte_tokenizer.encode("x")[0]
    assert [set(range(320)) - set(allowed(row)) for row in rows] == [{x}, {x, last}, {x}]
    assert not structure.is_complete
    assert structure.error is None


def test_words_after_a_space_are_other_tokens(models, constraints):
    """A merged tokenizer has a token of its own for a word behind a space: both are ruled out."""
    tokenizer, vocab_size, _ = models["exact"]
    plain, spaced = (tokenizer.hf.encode(text, add_special_tokens=False) for text in ("of", " of"))
    assert len(plain) == len(spaced) == 1
    rows = blank(1, vocab_size)
    constraints["exact"].of(SamplingParams(bad_words=["of"])).fill(rows, [])
    assert set(range(vocab_size)) - set(allowed(rows[0])) == {*plain, *spaced}


def test_words_after_a_space_of_another_length(models, constraints):
    """VLLM leaves them out: " the" may follow where "the" may not."""
    tokenizer, vocab_size, _ = models["exact"]
    (first, last), (spaced,) = (tokenizer.hf.encode(text, add_special_tokens=False) for text in ("the", " the"))
    rows = blank(2, vocab_size)
    constraints["exact"].of(SamplingParams(bad_words=["the"])).fill(rows, [first])
    assert [set(range(vocab_size)) - set(allowed(row)) for row in rows] == [set(), {last}]
    assert spaced != last


def test_bad_words_that_rule_out_nothing(byte_tokenizer):
    with pytest.raises(RequestError, match="bad_words holds '  '"):
        Constraints(byte_tokenizer, 300, (EOS,)).of(SamplingParams(bad_words=["  "]))
    beyond = Constraints(byte_tokenizer, 60, (7,))  # the model has no logits of letters
    assert beyond.of(SamplingParams(bad_words=["x"])) is None


def test_grammars_have_the_last_word(byte_tokenizer, constraints):
    """Bad words choose among what the grammar allows; where they would leave nothing, the grammar is followed."""
    a, b = byte_tokenizer.encode("ab")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]b"), bad_words=["b"])
    structure = constraints["padded"].of(params)
    rows = blank(2, 300)
    structure.fill(rows, [a])
    assert [allowed(row) for row in rows] == [[a], [b]]
