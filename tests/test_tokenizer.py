"""The tokenizer against transformers' own, and the bound on a text's tokens that is found without tokenising it."""

import json
import shutil
import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from dflash_jax.text.tokenizer import NFC_SHRINKS, Tokenizer
from tests.pairs import RECITER

FOLDER = RECITER / "target"
LICENCE = "You may reproduce and distribute copies of the Work\n\n" + " " * 40 + "日本 🌊 é ᾂ <|endoftext|>"
COMPOSED = ("\u1f82", "\u1e69", "\uac01")  # each is 3 or 4 characters before NFC


def changed(folder, **settings):
    """The tokenizer with other settings in its tokenizer.json."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(FOLDER)


@pytest.fixture(scope="module")
def composing(tmp_path_factory):
    """A tokenizer that normalises as Qwen's do."""
    return changed(tmp_path_factory.mktemp("nfc"), normalizer={"type": "NFC"})


@pytest.mark.parametrize("special", [True, False])
def test_token_ids_are_those_of_transformers(tokenizer, special):
    for text in ("", " ", "a", LICENCE, LICENCE * 50):
        assert tokenizer.encode(text, add_special_tokens=special) == tokenizer.hf.encode(
            text, add_special_tokens=special
        )


def test_a_limit_in_the_tokenizers_file_cuts_no_prompt(tmp_path, tokenizer):
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    limited = changed(tmp_path, truncation=limit, padding=padding)
    assert limited.encode(LICENCE) == tokenizer.encode(LICENCE)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text", "qwen3"])
def test_text_is_cut_as_the_file_says_whatever_class_is_named(tmp_path, model_type):
    """Qwen3.5's files name Qwen2's class, which parts letters from their marks."""
    text, rule = "हिन्दी किताब", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|\s+"
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(rule), "isolated")
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, ByteLevel(use_regex=False)])
    trainer = BpeTrainer(initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|im_end|>"], show_progress=False)
    trained.train_from_iterator([text] * 9, trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode(text) == trained.encode(text).ids
    assert len(tokenizer.encode(text)) == 2
    assert tokenizer.eos_token_id == 0


def test_ids_of_single_tokens(tokenizer):
    assert tokenizer.token_id("<|endoftext|>") == tokenizer.hf.get_vocab()["<|endoftext|>"]
    assert tokenizer.token_id("no such token") is None


PIECES = [*"a .\n-", " " * 30, "-" * 30, "é", "日", "🌊", "\u0301", "<|endoftext|>", *COMPOSED]


@given(st.lists(st.sampled_from(PIECES), max_size=100).map("".join), st.integers(1, 40))
def test_a_text_never_has_fewer_tokens_than_its_bound(tokenizer, composing, text, repeats):
    for text_ in (text * repeats, unicodedata.normalize("NFD", text) * repeats):
        for tokens in (tokenizer, composing):
            assert tokens.least_tokens(text_) <= len(tokens.encode(text_, add_special_tokens=False))


def test_a_token_may_stand_for_more_characters_than_it_shows(tmp_path):
    """One of fifty letters that NFC has joined out of four characters each."""
    word = COMPOSED[0] * 50
    added = {"id": 1024, "content": word, "special": False, "normalized": True, "single_word": False, "lstrip": False,
             "rstrip": False}  # fmt: skip
    tokenizer = changed(tmp_path, normalizer={"type": "NFC"}, added_tokens=[added])
    decomposed = unicodedata.normalize("NFD", word)
    assert tokenizer.encode(decomposed, add_special_tokens=False) == [1024]
    assert (len(decomposed), tokenizer.least_tokens(decomposed)) == (200, 1)


def test_the_bound_grows_with_the_text(tokenizer, composing):
    longest = max(map(len, tokenizer.hf.get_vocab()))
    for tokens in (tokenizer, composing):
        assert tokens.least_tokens("") == 0
        assert tokens.least_tokens("a" * longest * 1000) == 1000
    assert tokenizer.least_tokens("é" * longest * 1000) == 1000
    assert composing.least_tokens("é" * longest * 1000) == 1000 // NFC_SHRINKS


@pytest.mark.parametrize(
    "settings",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}},
        {"pre_tokenizer": None},
    ],
)  # fmt: skip
def test_there_is_no_bound_where_a_tokenizer_may_drop_text(tmp_path, settings):
    assert changed(tmp_path, **settings).least_tokens("a" * 10_000) == 0
