"""`eval acceptance`: acceptance and speed-up by data set, temperature and block length."""

from __future__ import annotations

import argparse
import gc
from importlib.util import find_spec
from pathlib import Path

from dflash_jax.base.errors import ConfigError
from dflash_jax.eval import datasets, options, report
from dflash_jax.eval.compare import Cell, Sampling, compile_programs, measure_engine
from dflash_jax.loading import find_models, load_llm
from dflash_jax.progress import phase
from dflash_jax.text.renderer import Renderer

HELP = "measure a drafter: acceptance length, acceptance of each draft and speed-up against plain decoding"
add_arguments = options.add_arguments


def run(args: argparse.Namespace) -> int:
    """Measure, print, write and plot; returns 0, or 1 if a greedy float32 answer changed with the drafter.

    Raises:
        DFlashError: an option or a data set is wrong, the models cannot be loaded, or a completion failed.
    """
    options.check(args)
    if not args.no_plots and find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib, which is not installed; run pip install matplotlib, or add --no-plots."
        )
    folder, draft_folder = find_models(args)
    if draft_folder is None:
        raise ConfigError(f"--model {args.model} has no drafter to measure; give --draft-model.")
    with phase("loading the tokenizer"):
        tokenizer = Renderer(folder).tokenizer
    selection = datasets.Selection(args.num_prompts, args.prompt_len, args.seed)
    samples = {}
    for name in args.dataset:
        with phase(f"reading {name}"):
            samples[name] = datasets.load(name, selection, tokenizer)
    make_folder(args.output)
    sampling = Sampling(args.max_tokens, args.seed, args.prompt_style)
    cells: list[Cell] = []
    for block in args.num_speculative_tokens:
        drafts = None if block == options.AUTO else block
        note = f" for {block} drafts"
        llm = load_llm(args, (folder, draft_folder), note=note, seed=args.seed, num_speculative_tokens=drafts)
        if args.compile_at_start is None:
            with phase(f"preparing{note}") as now:
                compile_programs(llm, samples, args.temperature, sampling, plain=not args.no_plain, within=now.within)
        for cell in measure_engine(llm, block, samples, args.temperature, sampling, plain=not args.no_plain):
            cells.append(cell)
            result = report.build_result(args, llm.config, cells)
            report.write(result, args.output / "results.json")  # after each: an interrupted run keeps them
        del llm
        gc.collect()  # the next engine needs the memory of this one
    return report.finish(result, args.output, plots=not args.no_plots)


def make_folder(folder: Path) -> None:
    """Make the folder of the results if it is absent.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be made ({error.strerror}); give another folder.") from error
