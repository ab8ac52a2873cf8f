"""The flags of `python -m dflash_jax.serve`, made of the options of server, engine and limits.

A flag's destination is the field that it sets. The parser returns only what was given, so that a file of flags can lie
between the command line and the defaults. Names are vLLM's; SGLang's are aliases.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.engine_args import SPECULATION
from dflash_jax.options.flag_values import json_object
from dflash_jax.options.option import Flag, Option, flag_of, options_of, shown_default
from dflash_jax.options.serve_args import GROUPS, PARTS, SERVER, SERVER_ENGINE, Limits, ServeArgs

OPTIONS: Mapping[str, Option] = {name: about for part in PARTS for name, about in options_of(part).items()}
SPECULATIVE_KEYS = {about.speculative_key: name for name, about in OPTIONS.items() if about.speculative_key}


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, in one sentence, where argparse would print and leave.

    Attributes:
        defaults: of the fields that flags set, by name.
        flags: the action of each flag, by each of its names.
    """

    def __init__(self, defaults: Mapping[str, Any]):
        super().__init__(
            prog="python -m dflash_jax.serve",
            usage="%(prog)s [MODEL] [flags]",
            description="Serve a model with DFlash speculative decoding over OpenAI's API. Integers may end in k, m, g "
            "or t (powers of 1000) or K, M, G or T (powers of 1024).",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self.defaults = defaults
        self.flags: dict[str, argparse.Action] = {}

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.")


class Agreed(argparse.Action):
    """Stores a value, and refuses another one than was given before: several flags mean the same thing."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        self.put(namespace, self.dest, value)

    def put(self, namespace: argparse.Namespace, dest: str, value: Any) -> None:
        """Set a field.

        Raises:
            argparse.ArgumentError: it is set to something else.
        """
        before = getattr(namespace, dest, value)
        if before != value:
            reason = f"means {dest}={value!r}, but {before!r} was given before; keep one of them"
            raise argparse.ArgumentError(self, reason)
        setattr(namespace, dest, value)


class SpeculativeConfig(Agreed):
    """Stores the keys of vLLM's JSON in the fields that they mean."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        for key, item in value.items():
            if key not in SPECULATIVE_KEYS:
                known = ", ".join(SPECULATIVE_KEYS)
                raise argparse.ArgumentError(
                    self, f"the key {key!r} is not supported; leave it out (there are {known})"
                )
            dest = SPECULATIVE_KEYS[key]
            problem = OPTIONS[dest].kind.problem(item)
            if problem is not None:
                raise argparse.ArgumentError(self, f"{key}={item!r} {problem}")
            self.put(namespace, dest, item)


EXTRA_FLAGS = {  # by title of their group: flags that set no field, or several
    SPECULATION: Flag(
        ("--speculative-config",),
        f"vLLM's object of {', '.join(SPECULATIVE_KEYS)}",
        unset="none",
        arguments={"type": json_object, "action": SpeculativeConfig, "metavar": "JSON"},
    ),
    SERVER: Flag(
        ("--config",),
        "YAML file of flags by name, with dashes or underscores; the command line wins over it",
        unset="none",
        arguments={"metavar": "FILE"},
    ),
}


def build_parser() -> Parser:
    """The parser of all flags."""
    instances = (ServeArgs(), SERVER_ENGINE, Limits())
    parser = Parser({name: getattr(part, name) for part in instances for name in options_of(type(part))})
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for name, about in OPTIONS.items():
            if about.server_group == title:
                _add_option(parser, group, name, about)
        if title in EXTRA_FLAGS:
            _add(parser, group, EXTRA_FLAGS[title], {})
    return parser


def _add_option(parser: Parser, group: Any, name: str, about: Option) -> None:
    """Add all flags that set one field."""
    arguments = about.kind.strict_flag()
    if "action" not in arguments:
        arguments |= {"metavar": about.unit, "nargs": about.nargs}
    shared = {"dest": name, "action": Agreed} if about.must_agree else {"dest": name}
    main = Flag(about.server_names or (flag_of(name),), about.help, about.unset, about.server_arguments)
    _add(parser, group, main, shared | arguments)
    for flag in about.server_flags:
        _add(parser, group, flag, shared if flag.names[0].startswith("-") else {"action": Agreed})


def _add(parser: Parser, group: Any, flag: Flag, arguments: dict[str, Any]) -> None:
    """Add a flag. Its help ends with what happens without it: its field's default, unless the flag says otherwise."""
    action = group.add_argument(*flag.names, **{**arguments, **flag.arguments})
    words = flag.unset or shown_default(parser.defaults[action.dest])
    action.help = f"{flag.help} (default: {words})".replace("%", "%%")
    parser.flags |= dict.fromkeys(action.option_strings, action)
