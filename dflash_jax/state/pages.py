"""Which page is owned by whom: allocation, reference counts and the prefix cache. Pure host code; a page is a number.

A pool belongs to one group of layers that keep the same (`state/group.py`). Pages that nobody owns are free. A free
page that holds a whole page of some text keeps its hash, and can be shared again until it is needed for other tokens;
the least recently used page is reused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NO_PAGE = -1  # in a page table: nothing is kept here, writes are skipped
PageHash = bytes


class IntegrityError(RuntimeError):
    """The books of a page pool or of the slots contradict each other: a bug of this package."""


class PagePool:
    """The pages of one group.

    Attributes:
        num_pages: how many there are.
        num_evicted: pages of known content that were taken for other content.
    """

    def __init__(self, num_pages: int):
        self.num_pages, self.num_evicted = num_pages, 0
        self._owners: Counter[int] = Counter()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))  # oldest first
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns, those with known content included."""
        return len(self._free)

    @property
    def num_known(self) -> int:
        """Pages whose content is known, owned or not."""
        return len(self._hash_of)

    def take(self, number: int) -> list[int]:
        """Own that many pages of unknown content, those free for longest first.

        Raises:
            KeyError: there are fewer; ask `num_free` or `has_room` first.
        """
        pages = []
        for _ in range(number):
            page, _ = self._free.popitem(last=False)
            self.num_evicted += page in self._hash_of
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
        """Record the hash of an owned page; if another page has this hash already, that one stays the known one."""
        if page_hash not in self._page_of and page not in self._hash_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash

    def forget_all(self) -> None:
        """Forget the hashes of all pages, so that none is shared from now on."""
        self._page_of.clear()
        self._hash_of.clear()

    def forget(self, pages: Iterable[int]) -> None:
        """Forget the hashes of these pages, so that none is shared from now on."""
        for page in pages:
            self._forget(page)

    def discard(self, pages: Iterable[int]) -> None:
        """Forget pages that nobody owns, and reuse them first."""
        for page in pages:
            self._forget(page)
            if page in self._free:
                self._free.move_to_end(page, last=False)

    def give_back(self, pages: Iterable[int]) -> None:
        """Stop owning pages. The last is reused first, so that known texts lose their end before their beginning."""
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

    A page's hash covers the whole text up to its end and the salt: texts of different salts share nothing.

    Args:
        hashes: hashes of the pages before, extended in place.
        token_ids: tokens that follow these pages.
        page_size: S, tokens a page.
        salt: the text's salt.
    """
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = array("i", token_ids[start : start + page_size]).tobytes()  # of 32 bits; NumPy takes 1 us longer
        before = hashes[-1] if hashes else hashlib.blake2b(salt, digest_size=16).digest()
        hashes.append(hashlib.blake2b(before + page, digest_size=16).digest())
