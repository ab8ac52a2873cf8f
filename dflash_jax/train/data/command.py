"""Flags of `python -m dflash_jax.train.data`, and the command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import DFlashError
from dflash_jax.loading import find_models, load_llm
from dflash_jax.options.flags import HelpFormatter, add_engine_arguments
from dflash_jax.progress import phase
from dflash_jax.train.data.folder import DataFolder
from dflash_jax.train.data.options import DataOptions
from dflash_jax.train.data.run import fingerprint, make_data

NUMERIC = ("dtype", "kv_cache_dtype", "max_model_len")  # options of the engine that responses depend on
MOST_SEQUENCES = 128  # default of --max-num-seqs: only throughput counts here, not the time to the first token


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.train.data",
        description="Have a target answer prompts, as training data for its drafter. The same command resumes.",
        formatter_class=HelpFormatter,
    )
    # No prefix cache: pages of earlier prompts would make a resumed run differ from one that never stopped.
    add_engine_arguments(parser, without=("enable_prefix_caching",), max_num_seqs=MOST_SEQUENCES, compile_at_start=None)
    _add_prompts(parser.add_argument_group("prompts"))
    _add_answers(parser.add_argument_group("responses"))
    return parser.parse_args(arguments)


def _add_prompts(group: Any) -> None:
    default, add = DataOptions(self_prompts=1), group.add_argument
    add("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="JSONL of messages or prompts")
    add("--max-prompts", type=int, help="most prompts to take from the files")
    add("--self-prompts", type=int, default=0, metavar="N", help="have the model make this many prompts itself")
    add("--system", dest="systems", nargs="+", default=[], metavar="TEXT", help="system messages for these, in turn")
    add("--prompt-top-p", type=float, default=default.prompt_top_p, help="probability mass to make these from")
    add("--prompt-max-tokens", type=int, default=default.prompt_max_tokens, help="most tokens of one of these")
    add("--chat-template-kwargs", type=_json_object, default={}, metavar="JSON", help="variables of the template")


def _add_answers(group: Any) -> None:
    default, add = DataOptions(self_prompts=1), group.add_argument
    add("--out", type=Path, required=True, help="folder to make, or to go on with")
    add(
        "--temperature",
        dest="temperatures",
        type=float,
        nargs="+",
        default=list(default.temperatures),
        help="each prompt is answered once at each",
    )
    add("--top-p", type=float, default=default.top_p, help="probability mass to keep")
    add("--max-tokens", type=int, default=default.max_tokens, help="most tokens of a response")
    add("--min-tokens", type=int, default=default.min_tokens, help="drop responses with fewer")
    add("--max-repetition", type=float, help="drop responses with a larger share of repeated 8-grams")
    add("--seed", type=int, default=default.seed, help="of everything that is sampled")
    add("--shard-size", type=int, default=default.shard_size, help="responses asked for between two writes")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"enable_thinking": false}}')
    return value


def options_of(args: argparse.Namespace) -> DataOptions:
    """The options of the data in a command line.

    Raises:
        DFlashError: an option is out of range.
    """
    options = {field.name: getattr(args, field.name) for field in fields(DataOptions)}
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    return DataOptions(**values)


def run(args: argparse.Namespace) -> DataFolder:
    """Make the data, or resume; returns the complete folder.

    Raises:
        DFlashError: an option is wrong, the model cannot be loaded, or a prompt cannot be served.
    """
    options = options_of(args)
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
    """Print what became of all prompts and responses."""
    if counts["prompts"] < wanted:
        print(f"warning: the model made {counts['prompts']} of {wanted} prompts; see the counts", file=sys.stderr)
    print("\n".join(f"{name.replace('_', ' '):18} {value:>14,}" for name, value in counts.items()))
