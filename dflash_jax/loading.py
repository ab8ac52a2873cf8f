"""How commands load an engine: the phases that a user sees, and what is compiled before the work begins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dflash_jax.llm import LLM
from dflash_jax.options.flags import engine_options
from dflash_jax.progress import announce, phase
from dflash_jax.weights.folder import resolve_folders

Folders = tuple[Path, Path | None]


def find_models(args: argparse.Namespace) -> Folders:
    """The folders of target and drafter that `--model` and `--draft-model` name.

    Raises:
        CheckpointError: one is neither a folder nor a repository that can be reached.
    """
    announce("finding the models")
    return resolve_folders(args.model, args.draft_model)


def load_llm(args: argparse.Namespace, folders: Folders, *, note: str = "", **options: Any) -> LLM:
    """The engine of a command line; with `--compile-at-start` all of its programs are compiled.

    Args:
        args: parsed flags of the engine.
        folders: folders of target and drafter.
        note: text to append to the phase's name.
        options: options of `LLM` that override those of the command line.

    Raises:
        ConfigError: an option is impossible.
        CheckpointError: a model cannot be loaded.
    """
    chosen = engine_options(args) | options
    compile_at_start = chosen.pop("compile_at_start", None)
    with phase(f"loading the models{note}"):
        llm = LLM(*folders, **chosen, compile_at_start=False)
    if compile_at_start:
        llm.engine.compile()
    return llm
