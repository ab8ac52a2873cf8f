"""One declaration of an option: a field of a frozen dataclass, with metadata.

The metadata says everything about the option: what it takes, its unit, what it means, vLLM's and SGLang's names. Flags,
`--help`, refusals, suggestions, docstrings and the README's table of options are made of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import cleandoc
from textwrap import fill
from typing import Any, TypeVar

from dflash_jax.base.errors import ConfigError
from dflash_jax.options.kinds import Kind

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Flag:
    """A further flag of the server, which sets a field in a way of its own.

    Attributes:
        names: the flag and its aliases; a name without dashes is a positional argument.
        help: what the flag does.
        unset: what happens without the flag.
        arguments: arguments of `add_argument`.
    """

    names: tuple[str, ...]
    help: str
    unset: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """Everything about an option but its type and default, which the field itself has.

    Attributes:
        kind: what values are allowed, and how a flag reads them. Of a list, each item is of this kind.
        help: what the option does, units included.
        unit: the placeholder of its value in `--help`: its unit, or what it is.
        unset: what happens without the option, where the default does not say so.
        names: names of a command's flag; () takes `--` and the field's name.
        server_names: names of the server's flag, vLLM's first; () takes `--` and the field's name.
        server_group: title of the server's flags among which it stands in `--help`; "" keeps it out of the server.
        server_flags: further flags of the server that set the field.
        server_arguments: arguments of `add_argument` for the server's flag, in addition to those of the kind.
        must_agree: whether the server refuses two different values, where several flags mean the same.
        speculative_key: its key in the server's `--speculative-config`.
        nargs: argparse's "+" or "*" makes the option a list, which its field holds as a tuple.
    """

    kind: Kind
    help: str
    unit: str | None = None
    unset: str = ""
    names: tuple[str, ...] = ()
    server_names: tuple[str, ...] = ()
    server_group: str = ""
    server_flags: tuple[Flag, ...] = ()
    server_arguments: Mapping[str, Any] = field(default_factory=dict)
    must_agree: bool = False
    speculative_key: str = ""
    nargs: str | None = None


def described(kind: Kind, help: str, **about: Any) -> dict[str, Any]:
    """Metadata for a dataclass's field without a plain default; `about` are further attributes of `Option`."""
    return {"option": Option(kind, help, **about)}


def option(default: Any, kind: Kind, help: str, *, repr: bool = True, compare: bool = True, **about: Any) -> Any:
    """A field with a default that is an option.

    Args:
        default: the field's default.
        kind: what values are allowed.
        help: what the option does, units included.
        repr: whether the dataclass's repr shows the value.
        compare: whether instances with different values are unequal.
        about: further attributes of `Option`.
    """
    return field(default=default, repr=repr, compare=compare, metadata=described(kind, help, **about))


def options_of(owner: type) -> dict[str, Option]:
    """The options that a dataclass declares, by field."""
    return {f.name: f.metadata["option"] for f in fields(owner) if "option" in f.metadata}


def default_of(owner: type, name: str) -> Any:
    """The default of an option, MISSING if it is required."""
    (declared,) = (f for f in fields(owner) if f.name == name)
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def flag_of(name: str) -> str:
    """The flag of a field, unless its option has other names."""
    return "--" + name.replace("_", "-")


def flag_names(name: str, about: Option) -> tuple[str, ...]:
    """The names of a command's flag for an option."""
    return about.names or (flag_of(name),)


def check_options(options: Any, *, as_flags: bool = False) -> None:
    """Refuse what the options of a dataclass do not allow.

    Args:
        options: an instance of a dataclass of options.
        as_flags: whether the sentence names flags, not fields.

    Raises:
        ConfigError: a value is of a wrong type, unknown or out of bounds.
    """
    for name, about in options_of(type(options)).items():
        value = getattr(options, name)
        called = flag_names(name, about)[0] if as_flags else name
        none = " or None" if about.kind.or_none and not as_flags else ""
        if value is None and about.kind.or_none:
            continue
        if about.nargs and not isinstance(value, tuple):
            raise ConfigError(f"{called}={value!r} must be a tuple{none}.")
        for item in value if about.nargs else (value,):
            problem = about.kind.problem(item)
            if problem is not None:
                raise ConfigError(f"{called}={item!r} {problem}{none}.")


def unknown_option(name: str, known: Iterable[str]) -> ConfigError:
    """The refusal of a name that no option has. It suggests a name that is near, or else lists all names."""
    names = sorted(known)
    hint = near_name(name, names)
    advice = f"did you mean {hint!r}?" if hint else f"there are {', '.join(names)}."
    return ConfigError(f"there is no option {name!r}; {advice}")


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like a mistyped one, leading dashes aside; None if none is near."""
    by_word = {candidate.lstrip("-"): candidate for candidate in known}
    near = difflib.get_close_matches(name.lstrip("-"), by_word, n=1)
    return by_word[near[0]] if near else None


def no_flag(name: str, known: Iterable[str]) -> str:
    """The refusal of a flag, or of a key of a file of flags, that is none; it suggests one that is near."""
    near = near_name(name, known)
    return f"there is no {name}; " + (f"did you mean {near}?" if near else "--help lists what there is.")


def shown_default(default: Any) -> str:
    """A default as `--help` and the README show it, such as "on" for True."""
    if default is None or default is MISSING:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, tuple | list):
        return " ".join(map(str, default)) or "none"
    return str(default) if default or default == 0 else "none"


def words_without(about: Option, default: Any) -> str:
    """What happens without an option, as `--help` and the README say it."""
    return about.unset or shown_default(default)


def documented(owner: Class) -> Class:
    """Write the help of each option of a dataclass into its docstring; a decorator."""
    entries = [
        fill(f"{name}: {about.help}.", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, about in options_of(owner).items()
    ]
    owner.__doc__ = "\n".join([cleandoc(owner.__doc__ or ""), "", "Attributes:", *entries])
    return owner
