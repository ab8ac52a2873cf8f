"""The installed command `dflash-jax`: `dflash-jax NAME ...` does what `python -m dflash_jax.NAME ...` does.

Nothing here imports JAX. The module of a command is imported when the command is called, so that it can say that it has
started before it imports JAX, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dflash_jax.progress import importing

COMMANDS = {
    "serve": "serve a model over OpenAI's API",
    "generate": "complete one prompt",
    "bench": "measure the speed of a server or of the engine",
    "train": "train a drafter",
    "train.data": "make the samples that a drafter is trained on",
    "eval": "measure how many drafts a drafter gets right",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the name of the command and its own arguments; None takes those of the process.

    Returns:
        The exit status of the command; 2 for a name that is none.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"error: {name!r} is not a command; use one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return main_of(name, rest)(rest)


def main_of(name: str, rest: list[str]) -> Callable[[list[str]], int]:
    """Import the function that runs a command; `rest` are the arguments of the command."""
    match name:
        case "serve":
            from dflash_jax.serve.server import main
        case "generate":
            with importing(rest):
                from dflash_jax.generate import main
        case "bench":
            from dflash_jax.bench.__main__ import main
        case "train":
            from dflash_jax.train.__main__ import main
        case "train.data":
            from dflash_jax.train.data.__main__ import main
        case _:
            from dflash_jax.eval.__main__ import main
    return main


def usage() -> str:
    """The commands, a line each."""
    lines = [f"  {name:<12} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: dflash-jax COMMAND ...", "", *lines, "", "dflash-jax COMMAND --help lists its options."])
