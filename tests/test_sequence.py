"""How a completion ends, and what its text is, however its tokens come in."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import SamplingParams
from dflash_jax.base.outputs import CompletionOutput, Logprob
from dflash_jax.engine.host.sequence import Sequence
from dflash_jax.text.tokenizer import Detokenizer, Tokenizer
from tests.pairs import EOS, write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def sequence(tokenizer, *, max_new_tokens=1000, **params):
    params = SamplingParams(max_tokens=max_new_tokens, **params)
    return Sequence(
        prompt_token_ids=tokenizer.encode("Say: "),
        params=params,
        seed=0,
        eos_token_ids=() if params.ignore_eos else (EOS,),
        max_new_tokens=max_new_tokens,
        tokenizer=tokenizer,
        output=CompletionOutput(index=0),
    )


def feed(sequence, tokens, cuts=()):
    """Hand over tokens in rounds cut at the given places; returns the texts shown after each round."""
    shown, start = [], 0
    for end in [*sorted(set(cuts)), len(tokens)]:
        if end > start and not sequence.finished:
            sequence.extend(tokens[start:end], None)
            sequence.publish_text()
            shown.append(sequence.output.text)
            start = end
    return shown


def test_end_of_sequence_token(tokenizer):
    running = sequence(tokenizer)
    assert running.extend([*tokenizer.encode("Hi"), EOS, 65], None) == 3
    output = running.output
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", None, "Hi")
    assert output.token_ids == [*tokenizer.encode("Hi"), EOS]


def test_ignore_eos_goes_on(tokenizer):
    running = sequence(tokenizer, ignore_eos=True, max_new_tokens=4)
    feed(running, [EOS, *tokenizer.encode("abc")])
    assert (running.output.finish_reason, running.output.text) == ("length", "abc")


def test_stop_token_is_named_and_kept_out_of_the_text(tokenizer):
    (bang,) = tokenizer.encode("!")
    running = sequence(tokenizer, stop_token_ids=[bang])
    feed(running, tokenizer.encode("Hi!?"))
    assert (running.output.stop_reason, running.output.text) == (bang, "Hi")
    running = sequence(tokenizer, stop_token_ids=[bang], include_stop_str_in_output=True)
    feed(running, tokenizer.encode("Hi!?"))
    assert running.output.text == "Hi!"


def test_special_tokens_in_the_text(tokenizer):
    running = sequence(tokenizer, ignore_eos=True, skip_special_tokens=False, max_new_tokens=2)
    feed(running, [EOS, *tokenizer.encode("a")])
    assert running.output.text == "<|end|>a"


def test_min_tokens_defers_stop_strings(tokenizer):
    running = sequence(tokenizer, stop="b", min_tokens=3)
    feed(running, tokenizer.encode("abcdeb!"))
    assert running.output.text == "abcde"


TEXTS = st.text(alphabet="abcdé世🎉 ", max_size=30)


@settings(deadline=None, max_examples=150)
@given(
    text=TEXTS,
    stops=st.lists(st.text(alphabet="abé ", min_size=1, max_size=4), max_size=3),
    cuts=st.data(),
    keep=st.booleans(),
)
def test_rounds_never_change_the_text(tokenizer, text, stops, cuts, keep):
    """Wherever rounds are cut: same text, shown only in growing prefixes, never a part of a character."""
    tokens = tokenizer.encode(text)
    if not tokens:
        return
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    # the stop that is complete first wins; of those, the one that begins first
    ends = [(at + len(stop), at, stop) for at, stop in found]
    expected, reason = text, "length"
    if ends:
        _, at, stop = min(ends)
        expected, reason = text[: at + len(stop) if keep else at], "stop"
    running = sequence(tokenizer, stop=stops, max_new_tokens=len(tokens), include_stop_str_in_output=keep)
    places = cuts.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    shown = feed(running, tokens, places)
    assert (running.output.text, running.output.finish_reason) == (expected, reason)
    for partial in shown:
        assert expected.startswith(partial)


def test_unfinished_character_at_the_end(tokenizer):
    running = sequence(tokenizer, max_new_tokens=3)
    shown = feed(running, tokenizer.encode("aé")[:2], cuts=[1])
    assert shown == ["a", "a"]
    feed(running, tokenizer.encode("b"))
    assert running.output.text == tokenizer.decode(running.output.token_ids)
    running = sequence(tokenizer, max_new_tokens=2)
    feed(running, tokenizer.encode("aé")[:2])
    assert running.output.text == "a\ufffd" == tokenizer.decode(running.output.token_ids)


def test_logprobs_stop_with_the_tokens(tokenizer):
    running = sequence(tokenizer, logprobs=0)
    tokens = [65, EOS, 66]
    running.extend(tokens, [{token: Logprob(-1.5, 1)} for token in tokens])
    assert running.output.cumulative_logprob == -3.0
    assert [list(entry) for entry in running.output.logprobs] == [[65], [EOS]]


@pytest.mark.parametrize("seldom", [1, 3, 100])
def test_text_is_the_same_however_seldom_it_is_read(tokenizer, seldom):
    text = "abé世🎉 " * 20
    tokens = tokenizer.encode(text)
    running = sequence(tokenizer, max_new_tokens=len(tokens) + 1)
    for i, token in enumerate(tokens):
        running.extend([token], None)
        if i % seldom == 0:
            running.publish_text()
    running.publish_text()
    assert running.output.text == text


def test_text_of_what_was_cut_off(tokenizer):
    running = sequence(tokenizer)
    running.extend(tokenizer.encode("Hello"), None)
    running.output.finish_reason = "abort"
    running.publish_text()
    assert running.output.text == "Hello"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_completion_ends_where_its_constraint_does(tokenizer, ignore_eos):
    """Not behind it, where the drafts of the same round went on, with the end of the text for want of anything else."""
    running = sequence(tokenizer, ignore_eos=ignore_eos)
    text = tokenizer.encode("Hi!")
    running.constraint = constraint = SimpleNamespace(error=None, is_complete=False)
    constraint.accept = lambda tokens: vars(constraint).update(is_complete=text[-1] in tokens)
    assert running.extend(text[:1], None) == 1
    assert not running.finished
    assert running.extend([*text[1:], EOS], None) == 2
    output = running.output
    assert (output.finish_reason, output.text, output.token_ids) == ("stop", "Hi!", text)


def test_a_tokenizer_that_fails_costs_its_completion_alone(tokenizer, monkeypatch):
    running = sequence(tokenizer)
    running.extend(tokenizer.encode("Hello"), None)
    monkeypatch.setattr(Detokenizer, "push", lambda *_: 1 / 0)
    running.publish_text()
    assert (running.output.finish_reason, running.output.error) == ("error", "ZeroDivisionError: division by zero")
    assert running.extend(tokenizer.encode("!"), None) == 0
