"""Samples to train on: from shards of a folder, or from any JSONL file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dflash_jax.base.errors import ConfigError, RequestError
from dflash_jax.base.values import is_int
from dflash_jax.text.tokenizer import Tokenizer
from dflash_jax.train.data.files import json_lines, read_bytes
from dflash_jax.train.data.folder import checked_bytes, read_manifest
from dflash_jax.train.data.prompts import checked_messages


@dataclass(frozen=True)
class Sample:
    """A prompt, which may be empty, and the response to it, as token ids."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class Response(msgspec.Struct, frozen=True):
    """A line of a shard.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the response, with the token that ended it if one did.
        temperature: it was sampled at.
        finish_reason: "stop" or "length".
        source: "self" for a prompt that the model made, or the name of the prompt's file.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    temperature: float
    finish_reason: str
    source: str


def read_shards(folder: Path, *, check: bool = True) -> Iterator[Sample]:
    """Every sample of a folder that `python -m dflash_jax.train.data` has made, or is making.

    Args:
        folder: holds `manifest.json`.
        check: compare each shard with the sha256 of the manifest before its samples are used.

    Raises:
        ConfigError: there is no manifest, or a shard is missing or corrupt.
    """
    for name, entry in read_manifest(folder).shards.items():
        path = folder / name
        content = checked_bytes(path, entry) if check else read_bytes(path)
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                response = msgspec.json.decode(line, type=Response)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number} is no response ({error}); make the shard again.") from error
            yield Sample(tuple(response.prompt_token_ids), tuple(response.token_ids))


def read_jsonl(path: Path, tokenizer: Tokenizer | None) -> Iterator[Sample]:
    """Every sample of a JSONL file.

    A line holds one of these:
        `messages`, the last by the assistant: its content is the response, the others, through the chat template, the
            prompt;
        `prompt` and `response`;
        `text`: all of it is response;
        `prompt_token_ids` and `token_ids`, as in shards.
    The end-of-sequence token is added to the assistant's content and to `response`, not to `text`.

    Args:
        path: the file.
        tokenizer: the target's; None reads token ids only.

    Raises:
        ConfigError: the file cannot be read, or a line is none of these.
    """
    for where, fields in json_lines(read_bytes(path), str(path)):
        yield _sample_of(fields, tokenizer, where)


def _sample_of(fields: Mapping[str, Any], tokenizer: Tokenizer | None, where: str) -> Sample:
    if "token_ids" in fields and "prompt_token_ids" in fields:
        return Sample(_token_ids(fields, "prompt_token_ids", where), _token_ids(fields, "token_ids", where))
    try:
        if tokenizer is None:
            raise RequestError("texts need a tokenizer and the model folder has none; give token ids.")
        if "messages" in fields:
            return _sample_of_messages(checked_messages(fields["messages"], where), tokenizer, where)
        if "prompt" in fields and "response" in fields:
            prompt, response = (_text(fields[name], name, where) for name in ("prompt", "response"))
            return Sample(tuple(tokenizer.encode(prompt)), _ended(response, tokenizer))
        if "text" in fields:
            return Sample((), tuple(tokenizer.encode(_text(fields["text"], "text", where))))
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    raise ConfigError(
        f"{where} holds only {', '.join(map(repr, fields)) or 'nothing'}; give 'messages', 'prompt' and 'response', "
        "'text', or 'prompt_token_ids' and 'token_ids'."
    )


def _sample_of_messages(messages: list[dict[str, Any]], tokenizer: Tokenizer, where: str) -> Sample:
    """The prompt as the chat template renders it, and the answer as the model would write it."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ConfigError(f"{where}: the last of at least two 'messages' must be the assistant's.")
    response = _text(messages[-1].get("content"), "the assistant's content", where)
    prompt = tokenizer.encode(tokenizer.render_chat(messages[:-1]), add_special_tokens=False)
    return Sample(tuple(prompt), _ended(response, tokenizer))


def _ended(response: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return (*tokenizer.encode(response, add_special_tokens=False), *end)


def _token_ids(fields: Mapping[str, Any], name: str, where: str) -> tuple[int, ...]:
    ids = fields[name]
    if not isinstance(ids, list) or not all(is_int(i) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: {name!r} must be a list of token ids.")
    return tuple(ids)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {name!r} must be a text that is not empty.")
    return value
