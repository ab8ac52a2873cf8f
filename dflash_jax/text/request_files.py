"""Files of prompts: a line of JSON for each request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request of a workload.

    Attributes:
        prompt: text, token ids or messages.
        output_len: limit of the answer, tokens.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages."""
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)

    @property
    def is_text(self) -> bool:
        """Whether the prompt is text."""
        return isinstance(self.prompt, str)


def read_jsonl(path: Path, default_output_len: int) -> list[SampleRequest]:
    """Read one request a line: `prompt` (text or token ids) or `messages`, and perhaps `output_tokens`.

    Args:
        path: a JSONL file in UTF-8; empty lines are skipped.
        default_output_len: `output_len` of lines without `output_tokens`.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not such a request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a JSONL file in UTF-8.") from error
    requests = [
        _request_of(line, default_output_len, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise ConfigError(f"{path} holds no request; give one JSON object a line.")
    return requests


def _request_of(line: str, default_output_len: int, where: str) -> SampleRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); give one JSON object a line.") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ConfigError(f"{where} needs exactly one of 'prompt' and 'messages'.")
    name = "prompt" if "prompt" in fields else "messages"
    prompt, kind = fields[name], dict if name == "messages" else int
    is_list = isinstance(prompt, list) and len(prompt) > 0 and all(type(part) is kind for part in prompt)
    if not is_list and not (name == "prompt" and isinstance(prompt, str) and prompt):
        allowed = "a list of messages" if name == "messages" else "text or a list of token ids"
        raise ConfigError(f"{where}: {name!r} must be {allowed}, not empty.")
    output_len = fields.get("output_tokens", default_output_len)
    if type(output_len) is not int or output_len < 1:
        raise ConfigError(f"{where}: output_tokens={output_len!r} must be an integer of at least 1.")
    return SampleRequest(prompt, output_len)
