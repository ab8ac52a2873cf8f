"""Rows of a mask: what they allow."""

import numpy as np


def blank(rows, vocab_size):
    return np.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)


def allowed(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
