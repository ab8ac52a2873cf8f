"""Checks JSON one character at a time, so that text can leave before the rest of the value has come."""

from __future__ import annotations

import json
import re

SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")


class Malformed(Exception):  # noqa: N818 - control flow between a reader and the parser, never raised to a caller
    """A character does not fit the format.

    Attributes:
        unread: number of characters at the end, this one included, that may begin something else.
    """

    def __init__(self, unread: int = 1) -> None:
        super().__init__(unread)
        self.unread = unread


class JsonScanner:
    """Checks one JSON object or array.

    `push` returns the text that has become certain: a number, a literal or an escape leaves when it is complete. Raw
    control characters in strings, which models write and JSON forbids, leave escaped.

    Attributes:
        key: key of the outermost object's member that is being read; "" before the first.
        strings: the outermost object's members that are strings, by key.
    """

    def __init__(self) -> None:
        self.key = ""
        self.strings: dict[str, str] = {}
        self._closers: list[str] = []  # the closing bracket of each open object and array
        self._state = self._value  # the method that checks the next character
        self._token = ""  # an unfinished number, literal or escape
        self._characters: list[str] = []  # of the current string, if it is at depth 1
        self._in_key = False
        self._opened = False

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._closers)

    @property
    def done(self) -> bool:
        """Whether the value is complete."""
        return self._opened and not self._closers

    @property
    def expects_value(self) -> bool:
        """Whether the value of a member or an element comes next."""
        return self._state == self._value

    def push(self, char: str) -> str:
        """Check the next character; returns the text that has become certain.

        Raises:
            Malformed: the character does not fit.
        """
        if char in SPACE and self._state not in (self._string, self._escape, self._unicode, self._scalar):
            return char
        return self._state(char)

    def _value(self, char: str) -> str:
        if char in "{[":
            self._opened = True
            self._closers.append("}" if char == "{" else "]")
            self._state = self._key_or_end if char == "{" else self._value_or_end
            return char
        if not self._opened:
            raise Malformed
        if char == '"':
            return self._open_string(in_key=False)
        if char not in "-0123456789tfn":
            raise Malformed
        self._token = char
        self._state = self._scalar
        return ""

    def _value_or_end(self, char: str) -> str:
        return self._close() if char == "]" else self._value(char)

    def _key_or_end(self, char: str) -> str:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> str:
        if char != '"':
            raise Malformed
        return self._open_string(in_key=True)

    def _colon(self, char: str) -> str:
        if char != ":":
            raise Malformed
        self._state = self._value
        return char

    def _after_value(self, char: str) -> str:
        if char == self._closers[-1]:
            return self._close()
        if char != ",":
            raise Malformed
        self._state = self._key if self._closers[-1] == "}" else self._value
        return char

    def _close(self) -> str:
        self._state = self._after_value
        return self._closers.pop()

    def _open_string(self, *, in_key: bool) -> str:
        self._in_key = in_key
        self._characters.clear()
        self._state = self._string
        return '"'

    def _string(self, char: str) -> str:
        if char == '"':
            return self._close_string()
        if char == "\\":
            self._token = char
            self._state = self._escape
            return ""
        return self._add(char if char >= " " else json.dumps(char)[1:-1])

    def _close_string(self) -> str:
        if self.depth == 1:
            text = json.loads(f'"{"".join(self._characters)}"')
            if self._in_key:
                self.key = text
            else:
                self.strings[self.key] = text
        self._state = self._colon if self._in_key else self._after_value
        return '"'

    def _escape(self, char: str) -> str:
        if char == "u":
            self._token += char
            self._state = self._unicode
            return ""
        if char not in '"\\/bfnrt':
            raise Malformed
        self._state = self._string
        return self._add(self._token + char)

    def _unicode(self, char: str) -> str:
        if char not in "0123456789abcdefABCDEF":
            raise Malformed
        self._token += char
        if len(self._token) < len("\\u0000"):
            return ""
        self._state = self._string
        return self._add(self._token)

    def _add(self, text: str) -> str:
        if self.depth == 1:
            self._characters.append(text)
        return text

    def _scalar(self, char: str) -> str:
        if char in ",]}" or char in SPACE:
            if self._token not in _LITERALS and not _NUMBER.fullmatch(self._token):
                raise Malformed
            self._state = self._after_value
            return self._token + (char if char in SPACE else self._after_value(char))
        self._token += char
        if char not in "+-.eE0123456789" and not any(literal.startswith(self._token) for literal in _LITERALS):
            raise Malformed
        return ""
