"""Readers of flags: each returns what a text means, or raises argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from dflash_jax.options.kinds import Number, plain_text

PARSER_ALIASES = {"qwen": "hermes", "qwen25": "hermes", "qwen3-thinking": "qwen3"}  # SGLang's names of our parsers


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} must be a JSON object such as {{"name": "value"}}')
    return value


def names(text: str) -> list[str]:
    """A JSON list of strings, as vLLM takes it, or the one string."""
    try:
        listed = json.loads(text) if text.startswith("[") else [text]
    except (ValueError, RecursionError):
        listed = None
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise argparse.ArgumentTypeError(f"{text!r} must be a string that is not empty, or a JSON list of such strings")
    return listed


def readable_file(path: str) -> str:
    """The path, if its file can be read."""
    _read(path)
    return path


def text_of(path: str) -> str:
    """The content of a file of UTF-8 text."""
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path!r} is not a file of UTF-8 text") from None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path holds a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read ({reason})") from None


def template(text: str) -> str:
    """A chat template: the text itself if it has a brace or a second line, otherwise the content of that file."""
    return plain_text(text if any(c in text for c in "{}\n") else text_of(text))


def api_key(key: str) -> str:
    """An API key that fits in an HTTP header; errors do not show it."""
    if not key or not all("!" <= c <= "~" for c in key):
        raise argparse.ArgumentTypeError("a key must be of visible ASCII characters, without spaces, and not empty")
    return key


def api_keys(path: str) -> list[str]:
    """The API keys in a file, one a line; `#` begins a comment. A file without keys is refused: it protects nothing."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    keys = [api_key(line) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise argparse.ArgumentTypeError(f"{path!r} holds no key; write one a line")
    return keys


def generation_config(text: str) -> str:
    """The text, if it is "auto", "vllm" or a folder that has a generation_config.json."""
    if text not in ("auto", "vllm") and not (Path(text) / "generation_config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be auto, vllm or a folder that has a generation_config.json")
    return text


def folder(path: str) -> str:
    """The path of a folder that exists or can be made."""
    if Path(plain_text(path)).exists() and not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path!r} is not a folder; give another path")
    return path


def socket_path(path: str) -> str:
    """The path of a socket, whose folder exists."""
    if not Path(plain_text(path)).parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {path!r} does not exist; make it first")
    return path


def root_path(text: str) -> str:
    """The beginning of a URL's path, such as /llm."""
    if not text.startswith("/") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} must begin with a slash and end without one, as in /llm")
    return text


def metrics_prefix(text: str) -> str:
    """The prefix of Prometheus names, such as vllm: (letters, digits, _ and :)."""
    if not re.fullmatch("[a-zA-Z_:]([a-zA-Z0-9_:]*[_:])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be letters, digits, _ and :, and end in _ or :, as in vllm:")
    return text


def parser_name(name: str) -> str:
    """The parser's name here; SGLang has other names for some."""
    return PARSER_ALIASES.get(name, name)


def dflash(method: str) -> str:
    """The only method of speculation, "dflash"; case does not matter."""
    if method.lower() != "dflash":
        raise argparse.ArgumentTypeError(f"{method!r} is not supported; the method is dflash")
    return "dflash"


def drafts_of_block(text: str) -> int:
    """Drafts of a round, from SGLang's count of the round's tokens, which includes the target's own token."""
    return Number(2)(text) - 1
