"""The script that makes packed vectors says which package it lacks: none of them is installed for the suite."""

import sys

import make_packed_vectors
import pytest


def test_help_needs_no_package(capsys):
    with pytest.raises(SystemExit) as exit_:
        make_packed_vectors.main(["--help"])
    assert exit_.value.code == 0
    assert "vectors" in capsys.readouterr().out


def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "auto_round_extension.torch", None)
    monkeypatch.setitem(sys.modules, "auto_round_extension", None)
    assert make_packed_vectors.main([]) == 2
    assert capsys.readouterr().err == "error: this needs auto_round; run pip install auto-round.\n"
