"""The values that flags take: each reader returns what a text means, or raises argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

# SGLang's names of parsers, and ours.
PARSER_ALIASES = {"qwen": "hermes", "qwen25": "hermes", "qwen3-thinking": "qwen3"}
MULTIPLES = {s: 1000**i for i, s in enumerate("kmgt", 1)} | {s: 1024**i for i, s in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Number:
    """Reads a number within limits.

    Attributes:
        least: the lowest that is allowed.
        most: the highest; None bounds nothing.
        is_whole: whether it is an integer, which may end in a suffix: 32k is 32,000 and 1M is 1,048,576.
        is_open: whether `least` itself is not allowed.
        or_none: whether "none" is allowed, and means None.
    """

    least: int
    most: int | None = None
    is_whole: bool = True
    is_open: bool = False
    or_none: bool = False

    def __call__(self, text: str) -> Any:
        if self.or_none and text.lower() == "none":
            return None
        value: float
        try:
            value = _whole(text) if self.is_whole else float(text)
        except ValueError:
            value = math.nan
        is_enough = value > self.least if self.is_open else value >= self.least  # NaN is not
        if is_enough and value < math.inf and (self.most is None or value <= self.most):
            return value
        raise argparse.ArgumentTypeError(f"{text!r} must be {self}")

    def __str__(self) -> str:
        words = "an integer" if self.is_whole else "a number"
        words += f" above {self.least}" if self.is_open else f" of at least {self.least}"
        return words + (f" and at most {self.most}" if self.most is not None else "") + " or none" * self.or_none


def _whole(text: str) -> int:
    """An integer, with or without a suffix; ValueError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    value = Decimal(match[1]) * MULTIPLES[match[2]]
    if value != int(value):
        raise ValueError
    return int(value)


def plain_text(text: str) -> str:
    """The text, which is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a value or leave it out")
    return text


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that the text is."""
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
    """The path of a file that can be read."""
    _read(path)
    return path


def text_of(path: str) -> str:
    """What the file holds, which is UTF-8."""
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path!r} is not a file of UTF-8 text") from None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # the latter of a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read ({reason})") from None


def template(text: str) -> str:
    """A chat template: the text itself if it has a brace or a second line, otherwise what that file holds."""
    return plain_text(text if any(c in text for c in "{}\n") else text_of(text))


def api_key(key: str) -> str:
    """A key that fits in a header; errors do not show it."""
    if not key or not all("!" <= c <= "~" for c in key):
        raise argparse.ArgumentTypeError("a key must be of visible ASCII characters, without spaces, and not empty")
    return key


def api_keys(path: str) -> list[str]:
    """The keys that a file holds, one a line. A file without any is refused, since it would protect nothing."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    keys = [api_key(line) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise argparse.ArgumentTypeError(f"{path!r} holds no key; write one a line")
    return keys


def generation_config(text: str) -> str:
    """The text, if it is auto, vllm or a folder with a generation_config.json."""
    if text not in ("auto", "vllm") and not (Path(text) / "generation_config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} must be auto, vllm or a folder that has a generation_config.json")
    return text


def folder(path: str) -> str:
    """A folder, or a path where one can be made."""
    if Path(plain_text(path)).exists() and not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path!r} is not a folder; give another path")
    return path


def socket_path(path: str) -> str:
    """A path in a folder that exists."""
    if not Path(plain_text(path)).parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {path!r} does not exist; make it first")
    return path


def root_path(text: str) -> str:
    """The beginning of a URL's path."""
    if not text.startswith("/") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} must begin with a slash and end without one, as in /llm")
    return text


def metrics_prefix(text: str) -> str:
    """The beginning of Prometheus names."""
    if not re.fullmatch("[a-zA-Z_:]([a-zA-Z0-9_:]*[_:])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be letters, digits, _ and :, and end in _ or :, as in vllm:")
    return text


def parser_name(name: str) -> str:
    """Our name of a parser."""
    return PARSER_ALIASES.get(name, name)


def dflash(method: str) -> str:
    """The one method of speculation there is."""
    if method.lower() != "dflash":
        raise argparse.ArgumentTypeError(f"{method!r} is not supported; the method is dflash")
    return "dflash"


def drafts_of_block(text: str) -> int:
    """Drafts of a round, from SGLang's count of its tokens: the target's own is one of them."""
    return Number(2)(text) - 1
