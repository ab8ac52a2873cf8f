"""Tokenizers with models' vocabularies, and constraints over them."""

import pytest

from dflash_jax.engine.host.constraints import Constraints
from dflash_jax.text.tokenizer import Tokenizer
from tests.pairs import EOS, RECITER, write_byte_tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def models(byte_tokenizer):
    """Tokenizers with the vocabularies of their models: padded, exact, and lacking the tokenizer's last."""
    merged = Tokenizer(RECITER / "target")
    end = merged.eos_token_id
    return {
        "padded": (byte_tokenizer, 300, (EOS, 7)),
        "exact": (merged, len(merged.hf), (end,)),
        "short": (merged, 1000, (end, 300, 5000)),
    }


@pytest.fixture(scope="module")
def constraints(models):
    return {name: Constraints(*model) for name, model in models.items()}
