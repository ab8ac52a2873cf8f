"""The command line of `python -m dflash_jax.serve`, and its file of flags, checked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.absent import ABSENT
from dflash_jax.options.flag_values import json_object
from dflash_jax.options.kinds import Number
from dflash_jax.options.option import flag_of, no_flag, options_of
from dflash_jax.options.serve_args import PARTS, SERVER_ENGINE, Limits, ServeArgs
from dflash_jax.options.serve_flags import Parser, build_parser

FLAG = re.compile(r"-[^\d\s][^\s]*")  # what argparse would never take as a value

# Field, another that it needs, and what the other is for.
NEEDS = (
    ("ssl_keyfile", "ssl_certfile", "the certificate of the key"),
    ("ssl_ca_certs", "ssl_certfile", "the server's own certificate"),
    ("ssl_ca_certs", "ssl_cert_reqs", "1 or 2, without which no client is checked"),
    ("ssl_cert_reqs", "ssl_ca_certs", "the authorities that are trusted"),
    ("allow_credentials", "allowed_origins", "the pages that may send them"),
    ("allowed_methods", "allowed_origins", "the pages that may use them"),
    ("allowed_headers", "allowed_origins", "the pages that may send them"),
)


def parse_args(arguments: list[str] | None = None) -> ServeArgs:
    """The options of a command line, by default the process's.

    Raises:
        SystemExit: with status 2, after one sentence, if an argument is unknown, impossible or contradicts another;
            with status 0 after `--help`.
    """
    parser = build_parser()
    try:
        return _read(parser, sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def read_args(arguments: Iterable[str]) -> ServeArgs:
    """The options of a command line, for a caller that is no command.

    Raises:
        ConfigError: an argument is unknown, impossible or contradicts another.
    """
    return _read(build_parser(), arguments)


def _read(parser: Parser, arguments: Iterable[str]) -> ServeArgs:
    options = _parse(parser, arguments)
    path = options.pop("config", None)
    return _build(options if path is None else _from_file(parser, path) | options)


def _parse(parser: Parser, arguments: Iterable[str]) -> dict[str, Any]:
    """The fields that arguments set, by name.

    Raises:
        ConfigError: an argument is unknown or impossible.
    """
    arguments = [_dashed(argument) for argument in arguments]
    for argument in takewhile(lambda a: a != "--", arguments):
        name = argument.partition("=")[0]
        if FLAG.fullmatch(name) and name not in (*parser.flags, "-h", "--help"):
            raise _unknown(name, parser.flags)
    namespace, rest = parser.parse_known_args(arguments)
    if rest:
        raise ConfigError(f"{rest[0]!r} is one argument too many; give one model, and flags.")
    return vars(namespace)


def _dashed(argument: str) -> str:
    """The argument with dashes in its flag's name: vLLM's flags may have underscores."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if FLAG.fullmatch(name) else argument


def _unknown(name: str, known: Iterable[str]) -> ConfigError:
    """The refusal of an unknown flag, or of an unknown key of a file."""
    reason = ABSENT.get(name.lstrip("-").removeprefix("no-"))
    if reason is not None:
        return ConfigError(f"{name} is not supported: {reason}.")
    return ConfigError(no_flag(name, known))


def _from_file(parser: Parser, path: str) -> dict[str, Any]:
    """The fields that a YAML file sets, by name; its keys are names of flags.

    Raises:
        ConfigError: the file cannot be read, or a key or value is unknown or impossible.
    """
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"--config={path!r} cannot be read ({reason}); give a file of YAML.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must be a mapping of flags to values such as 'port: 8000'.")
    known = [flag.removeprefix("--") for flag in parser.flags if flag.startswith("--") and flag != "--config"]
    arguments: list[str] = []
    try:
        for key, value in config.items():
            name = str(key).replace("_", "-")
            if name not in known:
                raise _unknown(name, known)
            arguments += _arguments(parser, name, value)
        return _parse(parser, arguments)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _arguments(parser: Parser, name: str, value: Any) -> list[str]:
    """A key of a file and its value, as arguments of the command line.

    Raises:
        ConfigError: the value is not of a type that the flag takes.
    """
    action = parser.flags[f"--{name}"]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be true or false.")
        opposite = [f"--no-{name}"] if f"--no-{name}" in parser.flags else []
        return [f"--{name}"] if value else opposite
    is_list = isinstance(value, list) and isinstance(parser.defaults.get(action.dest), tuple)
    texts = []
    for item in value if is_list else [value]:
        if isinstance(item, Mapping) and action.type is json_object:
            texts.append(json.dumps(item, default=str))
        elif isinstance(item, str) or (isinstance(action.type, Number) and type(item) in (int, float)):
            texts.append(str(item))
        else:
            what = "empty" if item is None else f"of type {type(item).__name__}"  # not the value: it may be a secret
            takes = action.metavar or " | ".join(action.choices or ())
            raise ConfigError(f"{name} is {what}, but takes {takes}; put text in quotes, or leave the key out.")
    return [f"--{name}={text}" for text in texts]


def _build(options: dict[str, Any]) -> ServeArgs:
    """The options that were given, by field, and the defaults of the others.

    Raises:
        ConfigError: they cannot go together.
    """
    _check(options)
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    serve, engine, limits = ({name: options[name] for name in options_of(part) if name in options} for part in PARTS)
    if "model" in serve:
        serve = {"served_model_name": (serve["model"],)} | serve
    return ServeArgs(**serve, engine=replace(SERVER_ENGINE, **engine), limits=Limits(**limits))


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that cannot go together.

    Raises:
        ConfigError: names two of them.
    """
    used = {name for name, value in options.items() if value}
    for name, needed, reason in NEEDS:
        if name in used and needed not in used:
            raise ConfigError(f"{flag_of(name)} needs {flag_of(needed)}, {reason}; give both or neither.")
    if "allow_credentials" in used and "*" in options["allowed_origins"]:
        raise ConfigError("--allow-credentials does not go with --allowed-origins=*; name the origins.")
    if "uds" in used and {"host", "port"} & options.keys():
        raise ConfigError("--uds does not go with --host or --port; keep the one or the others.")
