"""The corpus: filters, licences, copies, and hashes of wheels."""

import email
import json
import lzma
import subprocess
import zipfile

import pytest
from python_corpus import (
    BENCHMARKS,
    HELD_OUT,
    SKIPPED,
    Document,
    Selection,
    fetch,
    flaw,
    home_page,
    stated_licence,
    without_header,
    write_documents,
)

SOURCE = "".join(f"def area_{name}(width, height):\n    return width * height + {name}\n\n\n" for name in "abcdefghij")


def selection(benchmark=(), heldout=()):
    return Selection(frozenset(benchmark), [Document("held", "held.py", text) for text in heldout])


def chosen(selection, *texts, share=1e9):
    documents = [Document("package", f"{index}.py", text) for index, text in enumerate(texts)]
    return [document.path for document in selection.choose(documents, share)]


def other(text):
    return text.replace("area", "volume").replace("width", "length").replace("height", "depth")


def test_a_good_file_is_kept():
    assert flaw(SOURCE) is None
    assert chosen(selection(), SOURCE, other(SOURCE)) == ["0.py", "1.py"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\n", "size"),
        (SOURCE * 1000, "size"),
        (SOURCE + f"x = '{'x' * 500}'\n", "long lines"),
        ("".join(f"x = {'abcdefgh ' * 3!r} + {'ijklmnop ' * 4!r}  # a comment\n" for _ in range(40)), "long lines"),
        (SOURCE + "table = [\n" + "    0.123456789, 0.987654321,\n" * 40 + "]\n", "digits"),
        (SOURCE + "# 世界世界世界世界世界世界世界世界\n" * 3, "characters"),
        (SOURCE + "print 'Python 2'\n", "does not parse"),
    ],
)
def test_bad_files_are_left_out(text, reason):
    assert flaw(text) == reason
    chooser = selection()
    assert chosen(chooser, text) == []
    assert chooser.left_out == {reason: 1}


def test_benchmarks_are_left_out():
    signature = "def area_c(width, height):"
    chooser = selection(benchmark=[signature])
    assert chosen(chooser, SOURCE, other(SOURCE)) == ["1.py"]
    assert chooser.left_out == {"benchmark": 1}


def test_copies_of_held_out_files_are_left_out():
    chooser = selection(heldout=[SOURCE])
    part = SOURCE[len(SOURCE) // 2 :]
    assert chosen(chooser, "import os\n\n\n" + part + other(SOURCE), other(SOURCE)) == ["1.py"]
    assert chooser.left_out == {"copy of a held-out file": 1}


def test_copies_are_left_out_also_when_reformatted_and_of_other_packages():
    chooser = selection()
    assert chosen(chooser, SOURCE) == ["0.py"]
    indented = "if True:\n" + "".join(f"    {line}\n" for line in SOURCE.splitlines())
    assert chosen(chooser, indented, "# Taken from elsewhere.\n" + SOURCE) == []
    assert chooser.left_out == {"copy": 2}


def test_a_package_has_its_share():
    chooser = selection()
    assert len(chosen(chooser, SOURCE, other(SOURCE), share=len(SOURCE) * 1.2)) == 1
    assert chooser.left_out == {"share of its package": 1}


def test_licences_at_the_top_are_cut_and_other_comments_stay():
    licence = "#!/usr/bin/env python\r\n# Copyright 2020 Somebody\r\n#\r\n# Licensed under the MIT licence.\r\n\r\n"
    assert without_header(licence + '"""A module."""\r\n') == '"""A module."""\n'
    assert without_header("# How this works.\n\nx = 1\n") == "# How this works.\n\nx = 1\n"


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT\nClassifier: License :: OSI Approved :: BSD License", "MIT"),
        ("Classifier: License :: OSI Approved\nClassifier: License :: OSI Approved :: BSD License", "BSD"),
        ("License: Apache 2.0 License", "Apache-2.0"),
        ("License: GPL-3.0", "GPL-3.0"),
        ("Name: nothing", ""),
    ],
)
def test_licences(metadata, licence):
    assert stated_licence(email.message_from_string(metadata)) == licence


def test_home_page():
    urls = "Project-URL: Changes, https://c.example\nProject-URL: Source, https://s.example"
    assert home_page(email.message_from_string(urls)) == "https://s.example"
    assert home_page(email.message_from_string("Name: nothing")) == ""


def test_names_that_are_skipped():
    skipped = [
        "test/a.py",
        "x/tests/a.py",
        "x/test_a.py",
        "x/_vendor/six.py",
        "x/vendored/six.py",
        "x/thirdparty/six.py",
    ]
    kept = ["x/attest/a.py", "x/latest.py", "x/testing.py", "x/vendors.py"]
    assert [path for path in skipped + kept if SKIPPED.search(path)] == skipped


def test_what_is_written_is_the_same_each_time(tmp_path):
    documents = [Document("package", "a.py", "x = 'ü'\n")]
    said = write_documents(tmp_path / "a.xz", documents)
    assert said == write_documents(tmp_path / "b.xz", documents)
    assert (said["files"], said["characters"]) == (1, 8)
    with lzma.open(tmp_path / "a.xz", "rt", encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == [{"package": "package", "path": "a.py", "text": "x = 'ü'\n"}]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The one place where pip looks for wheels: it has a held-out package, but not the wheel that was published."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tinydb-4.9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinydb-4.9.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinydb\nVersion: 4.9.0\n")
        wheel.writestr("tinydb-4.9.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_wheel_with_another_hash_is_refused(index, tmp_path, capfd):
    (pinned,) = (requirement for requirement in HELD_OUT if requirement.startswith("tinydb"))
    assert [path.name for path in fetch([pinned.split()[0]], tmp_path / "a")] == ["tinydb-4.9.0-py3-none-any.whl"]
    with pytest.raises(subprocess.CalledProcessError):
        fetch([pinned], tmp_path / "b")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert all(" --hash=sha256:" in requirement for requirement in (*HELD_OUT, *BENCHMARKS))
