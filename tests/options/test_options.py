"""An option is declared once: its refusals, suggestions and documentation follow from the declaration."""

import argparse
from dataclasses import dataclass

import pytest

from dflash_jax.base.errors import ConfigError
from dflash_jax.options import EngineArgs
from dflash_jax.options.flags import CommandParser, HelpFormatter, add_options
from dflash_jax.options.kinds import Bytes, Choice, Number, Switch, Text
from dflash_jax.options.option import check_options, documented, near_name, option, options_of
from dflash_jax.options.serve_args import PARTS, REASONING_PARSERS, TOOL_PARSERS
from dflash_jax.text import parsing


@documented
@dataclass(frozen=True)
class Sample:
    """Sample."""

    size: int = option(1, Number(1, 8), "tokens of a page")
    share: float | None = option(None, Number(0, 1, is_whole=False, is_open=True, or_none=True), "share of the memory")
    dtype: str = option("auto", Choice(("auto", "fp8")), "type of the values")
    is_on: bool = option(True, Switch(), "whether it is on")
    names: tuple[str, ...] = option((), Text(), "names of it", nargs="+")


@pytest.mark.parametrize(
    "values",
    [{}, {"size": 8}, {"share": 1}, {"share": 0.5}, {"dtype": "fp8"}, {"is_on": False}, {"names": ("a", "b")}],
)
def test_allowed_values(values):
    check_options(Sample(**values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": 0}, "size=0 must be at least 1 and at most 8."),
        ({"size": 10**400}, f"size={10**400} must be at least 1 and at most 8."),
        ({"size": 9}, "size=9 must be at least 1 and at most 8."),
        ({"size": 2.0}, "size=2.0 must be an integer of at least 1 and at most 8."),
        ({"size": True}, "size=True must be an integer of at least 1 and at most 8."),
        ({"size": None}, "size=None must be an integer of at least 1 and at most 8."),
        ({"share": 0}, "share=0 must be above 0 and at most 1 or None."),
        ({"share": float("nan")}, "share=nan must be a number above 0 and at most 1 or None."),
        ({"share": float("inf")}, "share=inf must be above 0 and at most 1 or None."),
        ({"share": "1"}, "share='1' must be a number above 0 and at most 1 or None."),
        ({"dtype": "int4"}, "dtype='int4' is unknown; choose one of auto, fp8."),
        ({"dtype": []}, "dtype=[] is unknown; choose one of auto, fp8."),
        ({"is_on": 1}, "is_on=1 must be True or False."),
        ({"names": "ab"}, "names='ab' must be a tuple."),
        ({"names": ("a", " ")}, "names=' ' must be text that is not empty."),
    ],
)
def test_refused_values(values, sentence):
    with pytest.raises(ConfigError) as error:
        check_options(Sample(**values))
    assert str(error.value) == sentence


@pytest.mark.parametrize(("or_none", "end"), [(True, ", or none"), (False, "")])
def test_what_is_no_size_is_told_the_units(or_none, end):
    read = Bytes(1, or_none=or_none)
    assert [read("23.0GiB"), read("24GB"), read("1k")] == [23 << 30, 24 * 10**9, 1000]
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read("23GiBB")
    assert str(error.value) == (
        f"'23GiBB' must be a size such as 23.0GiB, 24GB or a number of bytes of at least 1{end}"
    )


def test_flags_are_named_in_refusals_of_commands():
    with pytest.raises(ConfigError, match=r"^--is-on=1 must be True or False\.$"):
        check_options(Sample(is_on=1), as_flags=True)


def test_documentation_has_every_option():
    for owner in (Sample, *PARTS):
        words = " ".join(owner.__doc__.split())
        assert max(map(len, owner.__doc__.splitlines())) <= 120
        for name, about in options_of(owner).items():
            assert f" {name}: {about.help}." in words


@pytest.mark.parametrize(
    ("name", "near"), [("max_num_seq", "max_num_seqs"), ("kv_cache_dtyp", "kv_cache_dtype"), ("zzz", None), ("x", None)]
)
def test_only_near_names_are_suggested(name, near):
    assert near_name(name, options_of(EngineArgs)) == near
    with pytest.raises(ConfigError) as error:
        EngineArgs.of({name: 1})
    assert ("did you mean" in str(error.value)) == (near is not None)
    assert (near or "kv_cache_dtype") in str(error.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--maxtokens", "3"], "there is no --maxtokens; did you mean --max-tokens?"),
        (["--max_tokens=3"], "there is no --max_tokens; did you mean --max-tokens?"),
        (["--zzz"], "there is no --zzz; --help lists what there is."),
    ],
)
@pytest.mark.parametrize("command", [[], ["run"]])
def test_a_mistyped_flag_of_a_command_is_refused_in_a_sentence(capsys, command, words, sentence):
    parser = CommandParser()
    commands = parser.add_subparsers() if command else None
    ours = commands.add_parser("run") if commands else parser
    ours.add_argument("--max-tokens", type=int)
    ours.add_argument("--prompt", required=True)
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args([*command, *words])
    assert (exit_.value.code, capsys.readouterr().err) == (2, f"error: {sentence}\n")
    parsed = parser.parse_args([*command, "--max-tok", "3", "--prompt", "--no such flag"])
    assert (parsed.max_tokens, parsed.prompt) == (3, "--no such flag")


def test_help_says_each_default_once():
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    add_options(parser, Sample, without=("dtype",), size=4)
    parser.add_argument("--zero", default=0, help="a flag of the command's own")
    parser.add_argument("--nothing", help="a flag of the command's own")
    helps = [action.help for action in parser._actions]
    assert "tokens of a page (default: 4)" in helps
    assert "share of the memory (default: none)" in helps
    words = " ".join(parser.format_help().split())
    assert "--zero ZERO a flag of the command's own (default: 0)" in words
    assert words.endswith("--nothing NOTHING a flag of the command's own")
    assert words.count("(default: ") == 5
    assert vars(parser.parse_args([])) == {
        "size": 4,
        "share": None,
        "is_on": True,
        "names": [],
        "zero": 0,
        "nothing": None,
    }


def test_parsers_are_those_of_the_text_room():
    assert {*REASONING_PARSERS} == {*parsing.REASONING_PARSERS, "none"}
    assert {*TOOL_PARSERS} == {*parsing.TOOL_PARSERS, "none"}
