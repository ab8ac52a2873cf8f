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


class IntegrityError(RuntimeError):
    """The books of a page pool or of the slots contradict each other: a bug of this package."""


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

    def known_end(self, hashes: Sequence[PageHash]) -> list[int]:
        """Pages of the longest known end of a chain of hashes; owns none of them."""
        pages = []
        for page_hash in reversed(hashes):
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages[::-1]

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
        """Check that every page is owned as often as it stands in these tables, and that none is lost.

        Takes time in proportion to all pages: 3 ms where 27,000 are cached.

        Args:
            tables: pages of each running sequence.

        Raises:
            IntegrityError: the counts disagree.
        """
        owned = Counter(page for table in tables for page in table if page != NO_PAGE)
        lost = self.num_pages - len(self._free) - len(owned)
        if owned != self._owners:
            wrong = sorted(page for page in owned | self._owners if owned[page] != self._owners[page])
            raise IntegrityError(f"pages {wrong[:8]} of {self.num_pages} are owned more or less often than counted")
        if not owned.keys().isdisjoint(self._free):
            raise IntegrityError(f"owned pages are free: {sorted(owned.keys() & self._free.keys())[:8]}")
        if lost:
            raise IntegrityError(f"{lost} of {self.num_pages} pages are lost: neither owned nor free")
        if {page: page_hash for page_hash, page in self._page_of.items()} != self._hash_of:
            raise IntegrityError("the prefix cache knows a page by another hash than the page itself")

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
