"""Prompts that an instruct model makes itself: what it generates after the header of a user's turn.

Source: Magpie, arXiv 2406.08464.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.outputs import CompletionOutput
from dflash_jax.frontend import Frontend
from dflash_jax.llm import LLM
from dflash_jax.progress import phase
from dflash_jax.train.data.complete import Advance, complete
from dflash_jax.train.data.folder import DataFolder
from dflash_jax.train.data.options import DataOptions
from dflash_jax.train.data.prompts import SourcePrompt, key_of, parse_prompts

SELF = "self"
MARK = "[the user's words]"  # stands for the words, to find where the template puts them
MOST_ATTEMPTS = 10  # attempts for each prompt asked for, before giving up
FEWEST_ATTEMPTS = 64  # attempts sampled side by side


def user_header(frontend: Frontend, system: str | None, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids of everything that the chat template writes before the user's words.

    Raises:
        ConfigError: the template writes nothing there, or changes the words.
        RequestError: the model has no tokenizer or no chat template, or the template refuses a system message.
    """
    messages = [*_system_turn(system), {"role": "user", "content": MARK}]
    text = frontend.chat_text(messages, add_generation_prompt=False, chat_template_kwargs=chat_template_kwargs)
    header, mark, _ = text.partition(MARK)
    if not mark or not header:
        what = "does not repeat a user's words" if not mark else "has no header before a user's words"
        raise ConfigError(f"the chat template {what}: the model cannot make prompts itself; give --prompts.")
    return frontend.need_tokenizer("--self-prompts").encode(header, add_special_tokens=False)


def make_prompts(llm: LLM, options: DataOptions, folder: DataFolder) -> tuple[list[SourcePrompt], dict[str, int]]:
    """Have the model make as many different prompts as asked for, or fewer if it repeats itself.

    Files of the folder hold them, so that the command can be resumed.

    Returns:
        The prompts, and counts of what became of all attempts.

    Raises:
        ConfigError: the chat template cannot be used, or no attempt was usable.
    """
    kept: dict[bytes, SourcePrompt] = {}
    counts: Counter[str] = Counter()
    wanted = options.self_prompts
    with phase("making prompts", wanted) as now:
        for number in count():
            attempts = counts["prompts_read"]
            if len(kept) >= wanted or attempts >= MOST_ATTEMPTS * wanted:
                break
            name = f"prompts-{number:05d}.jsonl"
            if name not in folder.manifest.prompts:
                size = min(options.shard_size, max((wanted - len(kept)) * 5 // 4, FEWEST_ATTEMPTS))
                lines, counted = _attempt(llm, options, range(attempts, attempts + size), kept, now.advance)
                folder.add_prompts(name, lines, counted)
            counts.update(folder.manifest.prompts[name].counts)
            new = parse_prompts(folder.read_prompts(name), str(folder.path / name), SELF)
            kept |= {key_of(prompt): prompt for prompt in new}
            now.advance(len(new))
    if not kept:
        raise ConfigError(
            f"none of {counts['prompts_read']} prompts that the model made ended within "
            f"--prompt-max-tokens={options.prompt_max_tokens}; raise it, or give --prompts."
        )
    return list(kept.values()), dict(counts)


def _attempt(
    llm: LLM, options: DataOptions, numbers: range, known: Mapping[bytes, SourcePrompt], advance: Advance
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Sample a user's turn for each number; returns the lines to keep, and counts of what became of all."""
    systems: Sequence[str | None] = options.systems or (None,)
    headers = [user_header(llm.frontend, system, options.chat_template_kwargs) for system in systems]
    outputs = complete(
        llm,
        [headers[i % len(headers)] for i in numbers],
        [options.prompt_params(i) for i in numbers],
        lambda _, tokens: advance(0, tokens),
    )
    lines: dict[bytes, dict[str, Any]] = {}
    unusable = duplicates = 0
    missing = options.self_prompts - len(known)
    for i, output in zip(numbers, outputs, strict=True):
        words = _user_words(output, llm.frontend)
        if words is None:
            unusable += 1
            continue
        messages = [*_system_turn(systems[i % len(systems)]), {"role": "user", "content": words}]
        key = key_of(SourcePrompt("messages", messages, SELF, ""))
        if key in known or key in lines:
            duplicates += 1
        else:
            lines[key] = {"messages": messages}
    kept = list(lines.values())[:missing]
    return kept, {
        "prompts_read": len(numbers),
        "prompts_unusable": unusable,
        "prompts_duplicate": duplicates,
        "prompts_unused": len(lines) - len(kept),
    }


def _user_words(output: CompletionOutput, frontend: Frontend) -> str | None:
    """The user's turn that the model made; None if it has no end, or is blank or malformed."""
    tokenizer = frontend.need_tokenizer("--self-prompts")
    words = output.token_ids[:-1]
    if output.finish_reason != "stop" or not set(words).isdisjoint(tokenizer.hf.all_special_ids):
        return None
    return tokenizer.decode(words).strip() or None


def _system_turn(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]
