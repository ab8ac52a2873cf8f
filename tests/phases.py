"""What a command has said of its progress where standard error is no terminal."""

import re

LINE = re.compile(r"\[\d+:\d\d:\d\d\] (.+)")


def lines(stderr):
    """The lines of progress, without their times."""
    return [match[1] for line in stderr.splitlines() if (match := LINE.fullmatch(line))]


def phases(stderr):
    """What the command did, in order, each thing once."""
    return list(dict.fromkeys(line.split(": ")[0] for line in lines(stderr)))
