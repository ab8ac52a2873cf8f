"""The log of a server's processes."""

from __future__ import annotations

import logging


class OneLineFormatter(logging.Formatter):
    """Writes every message in one line, whatever clients have sent: line breaks of theirs could pass for lines of ours.

    Tracebacks keep their lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line of a record, in which characters that cannot be printed are written as in Python."""
        text = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log_to_stderr(level: str) -> None:
    """Log what has this level, by its name, and what is worse."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
