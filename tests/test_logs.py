"""The log of a server's processes."""

import logging

from dflash_jax.base.logs import OneLineFormatter


def test_what_clients_send_makes_no_line_of_its_own():
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s: 日本", ("x\nINFO forged\x1b[31m",), None)
    line = OneLineFormatter("%(levelname)s %(message)s").format(record)
    assert line == r"INFO x\nINFO forged\x1b[31m: 日本"


def test_tracebacks_keep_their_lines():
    try:
        raise ValueError("a")
    except ValueError as error:
        record = logging.LogRecord("a", logging.INFO, "", 0, "b", (), (type(error), error, error.__traceback__))
    first, *others = OneLineFormatter("%(message)s").format(record).splitlines()
    assert (first, others[-1]) == ("b", "ValueError: a")
    assert len(others) > 2
