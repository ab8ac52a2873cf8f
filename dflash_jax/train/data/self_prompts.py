"""Prompts that an instruct model makes itself: what it says behind the header of a user's turn.

As in Magpie (arXiv 2406.08464).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from dflash_jax.base.errors import ConfigError
from dflash_jax.base.values import CompletionOutput
from dflash_jax.frontend import Frontend
from dflash_jax.llm import LLM
from dflash_jax.progress import phase
from dflash_jax.train.data.complete import Advance, complete
from dflash_jax.train.data.folder import DataFolder
from dflash_jax.train.data.options import DataOptions
from dflash_jax.train.data.prompts import SourcePrompt, key_of, parse_prompts

SELF = "self"
MARK = "[the user's words]"
MOST_ATTEMPTS = 10  # for each prompt that is wanted
FEWEST_ATTEMPTS = 64  # in one go


def user_header(frontend: Frontend, system: str | None, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids of all that the chat template writes before the user's words.

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
    """As many different prompts as wanted, fewer if they do not come; files of the folder hold them.

    Returns:
        Them, and counts of all attempts by what became of them.

    Raises:
        ConfigError: the chat template cannot be used, or nothing at all came.
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
                lines, found = _attempt(llm, options, range(attempts, attempts + size), kept, now.advance)
                folder.add_prompts(name, lines, found)
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
    """Sample a user's turn for each number: the lines that are worth keeping, and what became of all."""
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
    most = options.self_prompts - len(known)
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
    kept = list(lines.values())[:most]
    return kept, {
        "prompts_read": len(numbers),
        "prompts_unusable": unusable,
        "prompts_duplicate": duplicates,
        "prompts_unused": len(lines) - len(kept),
    }


def _user_words(output: CompletionOutput, frontend: Frontend) -> str | None:
    """What the model says for the user; None if it did not come to an end, or is blank or malformed."""
    tokenizer = frontend.need_tokenizer("--self-prompts")
    words = output.token_ids[:-1]
    if output.finish_reason != "stop" or not set(words).isdisjoint(tokenizer.hf.all_special_ids):
        return None
    return tokenizer.decode(words).strip() or None


def _system_turn(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]
