"""Prompts: read from files, without duplicates, and tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import ConfigError, RequestError
from dflash_jax.base.values import Prompt
from dflash_jax.engine.host.request import tokenize
from dflash_jax.frontend import Frontend
from dflash_jax.progress import phase
from dflash_jax.train.data.files import json_lines, read_bytes

KINDS = ("messages", "prompt", "prompt_token_ids")


@dataclass(frozen=True)
class SourcePrompt:
    """A prompt of a file.

    Attributes:
        kind: one of `KINDS`.
        content: messages that do not end in an answer, a text, or token ids.
        source: name of the file.
        where: file and line, for errors.
    """

    kind: str
    content: Any
    source: str
    where: str


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids, and the name of its file."""

    token_ids: list[int]
    source: str


def read_prompts(paths: Iterable[Path]) -> list[SourcePrompt]:
    """Read every prompt of JSONL files.

    A line holds one of `messages` (an answer at the end is left out), `prompt` and `prompt_token_ids`; other fields are
    ignored.

    Raises:
        ConfigError: a file cannot be read, or a line of it is no prompt.
    """
    return [prompt for path in paths for prompt in parse_prompts(read_bytes(path), str(path), path.name)]


def parse_prompts(content: bytes, name: str, source: str) -> list[SourcePrompt]:
    """Every prompt in the content of a JSONL file.

    Raises:
        ConfigError: a line is no prompt.
    """
    return [_prompt_of(fields, where, source) for where, fields in json_lines(content, name)]


def _prompt_of(fields: Mapping[str, Any], where: str, source: str) -> SourcePrompt:
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        names = " and ".join(map(repr, kinds)) or f"only {', '.join(map(repr, fields)) or 'nothing'}"
        raise ConfigError(f"{where} holds {names}; give exactly one of {', '.join(map(repr, KINDS))}.")
    (kind,) = kinds
    content = fields[kind]
    if kind == "prompt":
        if not isinstance(content, str) or not content.strip():
            raise ConfigError(f"{where}: 'prompt' must be a text that is not blank.")
    elif kind == "messages":
        content = without_answer(checked_messages(content, where))
        if not content:
            raise ConfigError(f"{where}: 'messages' must hold a message before the assistant's.")
    elif not isinstance(content, list) or not content:
        raise ConfigError(f"{where}: 'prompt_token_ids' must be a list of token ids that is not empty.")
    return SourcePrompt(kind, content, source, where)


def checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Check messages of a file.

    Raises:
        ConfigError: they are not a list of objects that each have a role.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ConfigError(f"{where}: 'messages' must be a list of objects that each have a 'role'.")
    return messages


def without_answer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without those of the assistant at the end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return list(messages[:end])


def key_of(prompt: SourcePrompt) -> bytes:
    """A hash that is equal for prompts which differ in white space only."""
    return blake2b(json.dumps([prompt.kind, _normalized(prompt.content)]).encode(), digest_size=16).digest()


def _normalized(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, list):
        return [_normalized(part) for part in value]
    if isinstance(value, dict):
        return {name: _normalized(value[name]) for name in sorted(value)}
    return value


def drop_duplicates(prompts: Iterable[SourcePrompt]) -> list[SourcePrompt]:
    """The first of each set of prompts that differ in white space only, in order."""
    unique: dict[bytes, SourcePrompt] = {}
    for prompt in prompts:
        unique.setdefault(key_of(prompt), prompt)
    return list(unique.values())


def tokenize_prompts(
    prompts: Sequence[SourcePrompt],
    frontend: Frontend,
    *,
    max_prompts: int | None,
    chat_template_kwargs: Mapping[str, Any],
) -> tuple[list[TokenizedPrompt], dict[str, int]]:
    """Tokenise prompts, and keep those that leave room for an answer.

    Args:
        prompts: to tokenise, in order.
        frontend: of the engine that will answer.
        max_prompts: limit of prompts to keep; None keeps all.
        chat_template_kwargs: further variables of the chat template.

    Returns:
        The prompts, and counts of those that are too long and of those not looked at.

    Raises:
        ConfigError: the chat template or the tokenizer refuses a prompt.
    """
    looked_at = 0
    kept: list[TokenizedPrompt] = []
    limit = len(prompts) if max_prompts is None else min(max_prompts, len(prompts))
    with phase("tokenising the prompts", limit) as now:
        for prompt in prompts:
            if len(kept) == max_prompts:
                break
            looked_at += 1
            token_ids = _token_ids(prompt, frontend, chat_template_kwargs)
            if len(token_ids) < frontend.config.max_model_len:
                kept.append(TokenizedPrompt(token_ids, prompt.source))
                now.advance()
    return kept, {"prompts_too_long": looked_at - len(kept), "prompts_unused": len(prompts) - looked_at}


def _token_ids(prompt: SourcePrompt, frontend: Frontend, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    try:
        request: Prompt
        if prompt.kind == "messages":
            request = frontend.chat_prompt(prompt.content, chat_template_kwargs=chat_template_kwargs)
        else:
            request = prompt.content if prompt.kind == "prompt" else {"prompt_token_ids": prompt.content}
        return tokenize(request, frontend.tokenizer, vocab_size=frontend.vocab_size)[1]
    except RequestError as error:
        raise ConfigError(f"{prompt.where}: {error}") from error
