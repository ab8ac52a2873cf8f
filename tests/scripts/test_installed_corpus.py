"""The corpus of installed packages: permissive ones, without those held out."""

from importlib import metadata

import installed_corpus
import pytest


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
