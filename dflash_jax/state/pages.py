"""Who owns which page: allocation, reference counts and the prefix cache. Pure host code; a page is a number here.

A pool belongs to one KV group (layers that keep the same tokens). Pages that nobody owns are free; those that hold a
whole page of some prompt keep their hash and can be taken up again until they are needed for something else, the
least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

NO_PAGE = -1  # in a page table: nothing is kept here, writes are skipped
PageHash = bytes


class PagePool:
    """The pages of one KV group."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._owners: Counter[int] = Counter()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))  # oldest first
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be taken now, remembered ones included."""
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """Own that many pages of unknown content, those free for longest first.

        Raises:
            KeyError: there are fewer; ask `num_free` or `has_room` first.
        """
        pages = []
        for _ in range(number):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._owners[page] = 1
            pages.append(page)
        return pages

    def known(self, hashes: Iterable[PageHash]) -> list[int]:
        """Pages of the longest known beginning of a chain of hashes; owns none of them."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def has_room(self, known: Iterable[int], number: int) -> bool:
        """Whether these known pages and so many others can be owned at once."""
        return number <= len(self._free) - sum(page in self._free for page in known)

    def share(self, known: Iterable[int]) -> None:
        """Own pages that `known` has named; others may own them too."""
        for page in known:
            self._free.pop(page, None)
            self._owners[page] += 1

    def remember(self, page: int, page_hash: PageHash) -> None:
        """Say what an owned page holds; the first page of a hash stays the known one."""
        if page_hash not in self._page_of and page not in self._hash_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash

    def forget_all(self) -> None:
        """Let nobody take up any page that is known now."""
        self._page_of.clear()
        self._hash_of.clear()

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody share these pages from now on."""
        for page in pages:
            self._forget(page)

    def give_back(self, pages: Iterable[int]) -> None:
        """Stop owning pages. The last is reused first: chains lose their end, not their beginning."""
        for page in reversed(list(pages)):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                self._free[page] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Every page is owned as often as it stands in the tables of running sequences, and none is lost.

        Raises:
            AssertionError: the counts disagree.
        """
        owned = Counter(page for table in tables for page in table if page != NO_PAGE)
        assert owned == self._owners, f"pages owned {owned} but counted {self._owners}"
        assert set(self._free).isdisjoint(owned), "an owned page is free"
        assert len(self._free) + len(owned) == self.num_pages, (
            f"{self.num_pages - len(self._free) - len(owned)} pages lost"
        )
        assert {page: h for h, page in self._page_of.items()} == self._hash_of, "the prefix cache contradicts itself"

    def _forget(self, page: int) -> None:
        page_hash = self._hash_of.pop(page, None)
        if page_hash is not None:
            del self._page_of[page_hash]


def extend_hashes(hashes: list[PageHash], token_ids: Sequence[int], page_size: int, salt: bytes = b"") -> None:
    """Append the hashes of the whole pages that come next in a text.

    A page's hash stands for everything up to its end, and for the salt: texts of different salts share nothing.

    Args:
        hashes: of the pages before.
        token_ids: of the text behind these pages.
        page_size: tokens a page.
        salt: of the text.
    """
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = np.asarray(token_ids[start : start + page_size], np.int32).tobytes()
        before = hashes[-1] if hashes else hashlib.blake2b(salt, digest_size=16).digest()
        hashes.append(hashlib.blake2b(before + page, digest_size=16).digest())
