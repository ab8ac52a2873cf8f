"""Prompts made of code: where they are cut, and that their text is unchanged."""

import ast
import json
import lzma
from itertools import islice

import code_prompts
import numpy as np
import pytest
import train_embedded

FUNCTION = '''def clamp(value, low, high):
    """Return the value, or the bound that it exceeds.

    The bounds belong to what is allowed.
    """
    if value < low:
        return low
    return high if value > high else value
'''
METHOD = "class Numbers:\n" + "".join(f"    {line}\n" if line else "\n" for line in FUNCTION.split("\n"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("text", [FUNCTION, METHOD])
def test_functions_are_found_and_dedented(text):
    (function,) = code_prompts.functions(text)
    assert function.name == "clamp"
    assert f"{function.head}\n{function.body}\n" == FUNCTION
    assert function.summary == "Return the value, or the bound that it exceeds."


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "def f():\n    return 1\n",
        FUNCTION.replace("clamp", "__call__"),
        METHOD.replace("        The bounds", "The bounds"),  # cannot be dedented
    ],
)
def test_other_functions_are_left_alone(text):
    assert code_prompts.functions(text) == []


def test_sources_remain_python(rng):
    (function,) = code_prompts.functions(METHOD)
    bare = code_prompts.without_docstring(function)
    assert "bound" not in bare
    assert bare.startswith("def clamp(value, low, high):")
    bugs = {code_prompts.with_bug(function, rng) for _ in range(20)}
    assert len(bugs) == 2  # < and >
    assert all(ast.parse(bug) and bug != FUNCTION.rstrip("\n") for bug in bugs)


def test_every_phrase_holds_the_function(rng):
    (function,) = code_prompts.functions(FUNCTION)
    for phrase in code_prompts.PHRASES:
        prompt = phrase(function, rng)
        assert "clamp" in prompt or function.docstring in prompt


def test_prompts_are_cut_at_ends_of_lines_and_in_bounds(rng):
    texts = [f"import os\n\n\n{METHOD.replace('clamp', name)}" * 3 for name in ("first", "second", "third")]
    tokenizer = train_embedded.train_tokenizer(iter(texts), 300)
    prompts = list(islice(code_prompts.file_prompts(texts, tokenizer, rng), 30))
    assert len(set(prompts)) == 30
    for prompt in prompts:
        (text,) = (text for text in texts if prompt in text)
        assert prompt.lstrip().startswith(("import os", "class Numbers:", "def "))
        assert prompt.endswith("\n") or text[text.index(prompt) + len(prompt)] == "\n"
        assert 32 <= len(tokenizer.encode(prompt).ids) <= 512
    assert any(prompt.endswith("\n") for prompt in prompts)
    assert any(not prompt.endswith("\n") for prompt in prompts)


def test_pieces_make_up_the_files_but_for_what_is_cut_at_their_ends(rng):
    texts = ["".join(f"{name} {i}\n" for i in range(2000)) for name in ("one", "two")]
    pieces = list(code_prompts.file_pieces(texts, rng))
    shortest, longest = code_prompts.PIECE
    assert all(shortest <= len(piece) <= longest and piece[:3] in ("one", "two") for piece in pieces)
    assert [piece[:3] for piece in pieces] != sorted(piece[:3] for piece in pieces)
    for text in texts:
        mine = [piece for piece in pieces if piece[:3] == text[:3]]
        assert all(text.count(piece) == 1 for piece in mine)
        assert sum(map(len, mine)) > len(text) - shortest - 12 * len(mine)


def test_the_command(tmp_path):
    with lzma.open(tmp_path / "train.jsonl.xz", "wt") as file:
        file.write(json.dumps({"text": METHOD}) + "\n")
    code_prompts.main(["chat", "--corpus", str(tmp_path), "--out", str(tmp_path / "chat.jsonl")])
    (line,) = (tmp_path / "chat.jsonl").read_text().splitlines()
    ((message,),) = json.loads(line).values()
    assert message["role"] == "user"
