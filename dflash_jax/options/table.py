"""The README's table of the options of engine commands."""

from __future__ import annotations

from dflash_jax.options.engine_args import EngineArgs
from dflash_jax.options.flags import ABSENT_IN_COMMANDS, MODELS
from dflash_jax.options.kinds import Choice
from dflash_jax.options.option import default_of, flag_names, options_of, words_without
from dflash_jax.options.serve_args import ServeArgs


def options_table() -> str:
    """A Markdown table with a row for each flag of `add_engine_arguments`: flag, default and meaning."""
    rows = [_row(ServeArgs, name) for name in MODELS]
    rows += [_row(EngineArgs, name) for name in options_of(EngineArgs) if name not in ABSENT_IN_COMMANDS]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows, ""])


def _row(owner: type, name: str) -> str:
    """The row of one option."""
    about = options_of(owner)[name]
    default = words_without(about, default_of(owner, name))
    choices = f": `{'`, `'.join(about.kind.names)}`" if isinstance(about.kind, Choice) else ""
    return f"| `{flag_names(name, about)[0]}` | {default} | {about.help}{choices} |"
