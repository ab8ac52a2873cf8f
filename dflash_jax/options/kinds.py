"""The kinds of values that options take: what is allowed, in code and in words, and how a flag reads it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Protocol

from dflash_jax.base.values import is_int

# What the suffixes of integers multiply by: small letters are powers of 1000, capitals powers of 1024.
MULTIPLES = {s: 1000**i for i, s in enumerate("kmgt", 1)} | {s: 1024**i for i, s in enumerate("KMGT", 1)}


class Kind(Protocol):
    """What an option takes."""

    @property
    def or_none(self) -> bool:
        """Whether None is allowed, too."""

    def problem(self, value: Any) -> str | None:
        """What a value that is not None must be, in words that follow it; None if the value is allowed."""

    def plain_flag(self) -> dict[str, Any]:
        """Arguments of `add_argument` for a flag whose value is checked later, with the other options."""

    def strict_flag(self) -> dict[str, Any]:
        """Arguments of `add_argument` for a flag that refuses a value at once, and reads suffixes and "none"."""


@dataclass(frozen=True)
class Number:
    """A number within limits.

    Attributes:
        low: the lowest value; None bounds nothing.
        high: the highest value; None bounds nothing.
        is_whole: whether it is an integer. A strict flag then reads suffixes: 32k is 32,000 and 1M is 1,048,576.
        is_open: whether `low` itself is not allowed.
        or_infinite: whether infinity is allowed.
        or_none: whether None is allowed; a strict flag reads "none".
    """

    low: int | None = None
    high: int | None = None
    is_whole: bool = True
    is_open: bool = False
    or_infinite: bool = False
    or_none: bool = False

    def problem(self, value: Any) -> str | None:
        is_number = is_int(value) if self.is_whole else isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or value != value:  # NaN is no number
            return f"must be {self}"
        return None if self._is_inside(value) else f"must be {self._bounds()}"

    def plain_flag(self) -> dict[str, Any]:
        return {"type": int if self.is_whole else float}

    def strict_flag(self) -> dict[str, Any]:
        return {"type": self}

    def __call__(self, text: str) -> Any:
        """The number that the text of a strict flag means.

        Raises:
            argparse.ArgumentTypeError: it means none, or one outside the limits.
        """
        if self.or_none and text.lower() == "none":
            return None
        value: float
        try:
            value = _whole(text) if self.is_whole else float(text)
        except ValueError:
            value = math.nan
        if self._is_inside(value):
            return value
        raise argparse.ArgumentTypeError(f"{text!r} must be {self._readable()}")

    def _is_inside(self, value: Any) -> bool:
        """Whether a number is within the limits; NaN never is. Integers too large for a float are compared exactly."""
        if not (-math.inf < value < math.inf or (self.or_infinite and value == math.inf)):
            return False
        is_enough = self.low is None or (value > self.low if self.is_open else value >= self.low)
        return is_enough and (self.high is None or value <= self.high)

    def _bounds(self) -> str:
        """The limits in words, such as "at least 1"."""
        low = None if self.low is None else f"{'above' if self.is_open else 'at least'} {self.low}"
        high = None if self.high is None else f"at most {self.high}"
        return " and ".join(filter(None, [low, high])) or "finite"

    def _readable(self) -> str:
        """What the text of a strict flag may be."""
        return f"{self} or none" if self.or_none else str(self)

    def __str__(self) -> str:
        noun, bounds = "an integer" if self.is_whole else "a number", self._bounds()
        return noun if bounds == "finite" else f"{noun} {'' if self.is_open else 'of '}{bounds}"


@dataclass(frozen=True)
class Bytes(Number):
    """A number of bytes. Flags read units, too: 23.0GiB is a power of 1024, 24GB one of 1000."""

    def plain_flag(self) -> dict[str, Any]:
        return {"type": self}

    def __call__(self, text: str) -> Any:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text.strip(), re.IGNORECASE)
        if match is None:
            return super().__call__(text)
        base = 1024 if match[3] else 1000
        return super().__call__(str(int(Decimal(match[1]) * base ** (1 + "KMGT".index(match[2].upper())))))

    def _readable(self) -> str:
        none = ", or none" if self.or_none else ""
        return f"a size such as 23.0GiB, 24GB or a number of bytes of {self._bounds()}{none}"


def plain_text(text: str) -> str:
    """The text of a flag.

    Raises:
        argparse.ArgumentTypeError: it is blank.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a value or leave it out")
    return text


def _whole(text: str) -> int:
    """The integer of a text with or without a suffix.

    Raises:
        ValueError: the text is no integer.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    value = Decimal(match[1]) * MULTIPLES[match[2]]
    if value != int(value):
        raise ValueError
    return int(value)


@dataclass(frozen=True)
class Choice:
    """One of several names.

    Attributes:
        names: the names.
        read: what a strict flag makes of a text before it looks among the names.
        or_none: whether None is allowed.
    """

    names: tuple[str, ...]
    read: Callable[[str], str] | None = None
    or_none: bool = False

    def problem(self, value: Any) -> str | None:
        return None if value in self.names else f"is unknown; choose one of {', '.join(self.names)}"

    def plain_flag(self) -> dict[str, Any]:
        return {"choices": self.names, "type": str}

    def strict_flag(self) -> dict[str, Any]:
        return {"choices": self.names, "type": self.read}

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True)
class Switch:
    """On or off.

    Attributes:
        action: argparse's. By default `--name` switches on and `--no-name` off; "store_true" and "store_false" make a
            flag that only sets its field to that value.
        or_none: whether None is allowed.
    """

    action: Any = argparse.BooleanOptionalAction
    or_none: bool = False

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, bool) else "must be True or False"

    def plain_flag(self) -> dict[str, Any]:
        return {"action": self.action}

    def strict_flag(self) -> dict[str, Any]:
        return {"action": self.action}


@dataclass(frozen=True)
class Text:
    """A text that is not blank.

    Attributes:
        words: what the text must be.
        or_none: whether None is allowed.
    """

    words: str = "text that is not empty"
    or_none: bool = False

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, str) and value.strip() else f"must be {self.words}"

    def plain_flag(self) -> dict[str, Any]:
        return {"type": str}

    def strict_flag(self) -> dict[str, Any]:
        return {"type": plain_text}

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Read:
    """What a function makes of a flag's text; values from Python are not checked.

    Attributes:
        read: returns the value, or raises argparse.ArgumentTypeError.
        or_none: whether None is allowed.
    """

    read: Callable[[str], Any]
    or_none: bool = False

    def problem(self, value: Any) -> str | None:
        return None

    def plain_flag(self) -> dict[str, Any]:
        return {"type": self.read}

    def strict_flag(self) -> dict[str, Any]:
        return {"type": self.read}
