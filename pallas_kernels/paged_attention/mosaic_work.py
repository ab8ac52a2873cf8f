"""The order of the Mosaic kernel's work: the items of a CTA, and the pages of an item."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.arguments import page_range
from pallas_kernels.paged_attention.rows import Place


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut up.

    Attributes:
        splits: of the keys.
        consumers: warpgroups of a CTA that attend.
        stages: pages of the TMA ring of each consumer; consumers that share pages share the ring, too.
        wide: slots of converted values of each consumer, likewise, for fp8 and 4-bit pages; 0 for others.
        converters: what each warpgroup that converts has: "v", "k", or both.
        is_packed: whether pages have 4 bits.
        is_shared: whether each consumer has a block of rows of its own, and all read each page; else they take pages in
            turn, for one block.
    """

    splits: int
    consumers: int
    stages: int
    wide: int
    converters: tuple[str, ...] = ()
    is_packed: bool = False
    is_shared: bool = False

    @property
    def converts_keys(self) -> bool:
        """Whether keys are converted, too."""
        return "k" in "".join(self.converters)

    @property
    def splits_queries(self) -> bool:
        """Whether queries become a sum of terms in fp8, for products with keys as they are."""
        return self.wide > 0 and not self.converts_keys

    @property
    def merges(self) -> bool:
        """Whether consumers have sums of the same rows."""
        return self.consumers > 1 and not self.is_shared

    @property
    def blocks(self) -> int:
        """Blocks of rows of an item, and consumers that read each page."""
        return self.consumers if self.is_shared else 1

    @property
    def turns(self) -> int:
        """Consumers that take pages in turn."""
        return 1 if self.is_shared else self.consumers


@dataclasses.dataclass(frozen=True)
class Shape:
    """The properties that all items of a call share. An item is one split of the keys that its blocks of rows see.

    Attributes:
        config: of the call.
        page_size: tokens a page.
        kv_heads: K.
        head_size: H.
        row_items: items along the rows of a kv head.
        group: query heads of a kv head.
        tokens: rows of a query head in q and in the result.
        items: of the call.
        ctas: of the call.
    """

    config: Config
    page_size: int
    kv_heads: int
    head_size: int
    row_items: int
    group: int
    tokens: int
    items: int
    ctas: int

    def locate(self, item: Any) -> tuple[Any, Any, Any, Any]:
        """Rank of the sequence, of the item along the rows, of the split and of the kv head.

        The head varies fastest, since the heads of a page are neighbours in memory.
        """
        head, rest = lax.rem(item, self.kv_heads), lax.div(item, self.kv_heads)
        split, rest = lax.rem(rest, self.config.splits), lax.div(rest, self.config.splits)
        return lax.div(rest, self.row_items), lax.rem(rest, self.row_items), split, head

    def count(self, cta: Any) -> Any:
        """The number of items of a CTA; items left over go to the CTAs that are first in the next round."""
        rounds, rest = divmod(self.items, self.ctas)
        return rounds + jnp.where(self.turn(cta, rounds) < rest, 1, 0)

    def turn(self, cta: Any, n: Any) -> Any:
        """Rank of a CTA in round n; odd rounds are reversed, so that the longest item is followed by the shortest."""
        return jnp.where(lax.rem(n, 2) > 0, self.ctas - 1 - cta, cta)


@dataclasses.dataclass(frozen=True)
class Work:
    """An item of a CTA; numbers are traced scalars.

    Pages go to the consumers in turn, across items too, or to all of them, and to the slots of a ring in turn.

    Attributes:
        place: its rows; its ``block`` counts items, of which each may have several blocks.
        split: of the keys.
        first: entry of the page table with its first page.
        count: of its pages.
        edges: union of its rows' intervals and their intersection, each as first and past the last position.
        before: pages of the CTA's earlier items.
        shape: of all items.
    """

    place: Place
    split: Any
    first: Any
    count: Any
    edges: tuple[Any, ...]
    before: Any
    shape: Shape

    def slot(self, i: Any, slots: int) -> tuple[Any, Any]:
        """The slot of page i in a ring of ``slots`` slots a consumer, and the number of its earlier uses.

        Consumers that take pages in turn have slots of their own, since a warpgroup that waits for a barrier must wait
        for every use of it.
        """
        consumers = self.shape.config.turns
        turn = lax.div(self.before + i, consumers)
        return lax.rem(self.before + i, consumers) * slots + lax.rem(turn, slots), lax.div(turn, slots)

    def begin(self, me: Any) -> Any:
        """The first page of consumer ``me``, which takes every ``turns``-th page from there."""
        consumers = self.shape.config.turns
        return lax.rem(me + consumers - lax.rem(self.before, consumers), consumers)

    def turns(self, me: Any) -> Any:
        """The number of pages of consumer ``me``."""
        consumers = self.shape.config.turns
        return lax.div(self.count - self.begin(me) + consumers - 1, consumers)

    def plain(self, i: Any) -> Any:
        """Whether every row sees every key of page i."""
        return self._within(i, *self.edges[2:])

    def seen(self, i: Any) -> Any:
        """Whether the union of the rows' intervals holds all of page i; else some of its values may be NaN."""
        return self._within(i, *self.edges[:2])

    def _within(self, i: Any, low: Any, high: Any) -> Any:
        start = (self.first + i) * self.shape.page_size
        return (start >= low) & (start + self.shape.page_size <= high)


def for_items(cta: Any, block_bounds: Any, shape: Shape, step: Callable[[Any, Work], None]) -> None:
    """Call ``step`` with the number and the work of every item of a CTA, in a loop.

    The bounds of the next item are loaded before the step of this one, since the latency is long.
    """
    count = shape.count(cta)

    def locate(n: Any) -> tuple[Any, Any, Any, Any]:
        return shape.locate(n * shape.ctas + shape.turn(cta, n))

    def bounds(n: Any) -> tuple[Any, ...]:
        rank, block, _, _ = locate(n)
        return tuple(block_bounds[rank, block, i] for i in range(5))

    def body(n: Any, carry: Any) -> Any:
        before, (*edges, b) = carry
        following = bounds(jnp.minimum(n + 1, count - 1))
        _, block, split, head = locate(n)
        place = Place(b, head, block, shape.group, shape.tokens)
        begin, end = page_range(edges[0], edges[1], shape.page_size)
        pages = pl.cdiv(end - begin, shape.config.splits)
        first = begin + split * pages
        work = Work(place, split, first, jnp.maximum(jnp.minimum(pages, end - first), 0), tuple(edges), before, shape)
        step(n, work)
        return before + work.count, following

    lax.fori_loop(0, count, body, (jnp.int32(0), bounds(jnp.int32(0))))
