"""The command line of `python -m dflash_jax.train.data`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from dflash_jax.base.errors import DFlashError
from dflash_jax.loading import find_models, load_llm
from dflash_jax.options.flags import CommandParser, HelpFormatter, add_engine_arguments, add_options, options_from
from dflash_jax.options.option import options_of
from dflash_jax.progress import phase
from dflash_jax.train.data.folder import DataFolder
from dflash_jax.train.data.options import DataOptions
from dflash_jax.train.data.run import fingerprint, make_data

NUMERIC = ("dtype", "kv_cache_dtype", "max_model_len")  # options of the engine that responses depend on
MOST_SEQUENCES = 128  # default of max_num_seqs: nobody waits for a first token here
PROMPTS = (
    "prompts",
    "max_prompts",
    "self_prompts",
    "systems",
    "prompt_top_p",
    "prompt_max_tokens",
    "chat_template_kwargs",
)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(
        prog="python -m dflash_jax.train.data",
        description="Have a target answer prompts, as training data for its drafter. The same command resumes.",
        formatter_class=HelpFormatter,
    )
    # No prefix cache: pages of past prompts would make a run that is resumed differ from one that never stopped.
    add_engine_arguments(parser, without=("enable_prefix_caching",), max_num_seqs=MOST_SEQUENCES, compile_at_start=None)
    answers = [name for name in options_of(DataOptions) if name not in PROMPTS]
    add_options(parser.add_argument_group("prompts"), DataOptions, without=answers)
    group = parser.add_argument_group("responses")
    group.add_argument("--out", type=Path, required=True, help="folder to make, or to go on with")
    add_options(group, DataOptions, without=PROMPTS)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> DataFolder:
    """Make the data, or the part that is missing; returns the finished folder.

    Raises:
        DFlashError: an option is wrong, the model cannot be loaded, or a prompt cannot be served.
    """
    options = options_from(args, DataOptions)
    folders = find_models(args)
    with phase(f"checking {args.out}"):
        numeric = {name: getattr(args, name) for name in NUMERIC}
        arguments = {**options.arguments(), **numeric, **fingerprint(folders[0])}
        folder = DataFolder(args.out, model=args.model or "the embedded pair", arguments=arguments)
    if not folder.manifest.complete:
        llm = load_llm(args, folders, enable_prefix_caching=False)
        if args.compile_at_start is None and llm.engine.mesh.is_accelerator:
            llm.engine.compile()
        make_data(llm, options, folder)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 2 after an error, 130 when interrupted."""
    args = parse_args(arguments)
    try:
        folder = run(args)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with {args.out}", file=sys.stderr)
        return 130
    _print(folder.manifest.counts, args.self_prompts)
    return 0


def _print(counts: Mapping[str, int], wanted: int) -> None:
    """Print how many prompts and responses were kept and dropped."""
    if counts["prompts"] < wanted:
        print(f"warning: the model made {counts['prompts']} of {wanted} prompts; see the counts", file=sys.stderr)
    print("\n".join(f"{name.replace('_', ' '):18} {value:>14,}" for name, value in counts.items()))
