"""How the Mosaic kernel's work is cut up: into items, which a CTA does one after the other, and pages of an item."""

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
    """How a call is cut up: splits of the keys, consumer warpgroups of a CTA, pages in flight.

    Each consumer has its own ``stages`` pages of the TMA ring and, over fp8 pages, ``wide`` slots of converted values.
    """

    splits: int
    consumers: int
    stages: int
    wide: int

    @property
    def converters(self) -> int:
        return min(self.wide, 1)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What all items of a call have in common. An item is a split of what a block of rows of a kv head sees."""

    config: Config
    page_size: int
    kv_heads: int
    blocks: int
    group: int
    tokens: int  # of a query head, as rows of q and of the result
    items: int  # of the whole call
    ctas: int

    def locate(self, item: Any) -> tuple[Any, Any, Any, Any]:
        """Place among the sequences, block, split and head of an item.

        Neighbours are heads, since those of a page lie side by side.
        """
        head, left = lax.rem(item, self.kv_heads), lax.div(item, self.kv_heads)
        split, left = lax.rem(left, self.config.splits), lax.div(left, self.config.splits)
        return lax.div(left, self.blocks), lax.rem(left, self.blocks), split, head

    def count(self, cta: Any) -> Any:
        """How many items a CTA has: the rest goes to those whose turn is next."""
        rounds, rest = divmod(self.items, self.ctas)
        return rounds + jnp.where(self.turn(cta, rounds) < rest, 1, 0)

    def turn(self, cta: Any, n: Any) -> Any:
        """The place of a CTA in round n: to and fro, so that who has the longest item of one has the shortest next."""
        return jnp.where(lax.rem(n, 2) > 0, self.ctas - 1 - cta, cta)


@dataclasses.dataclass(frozen=True)
class Work:
    """An item of a CTA: ``count`` pages from ``first``, and the bounds of its rows (traced scalars).

    ``before`` is how many pages the CTA's items before this one had. Pages go to the consumers in turns, also from one
    item to the next, and to the slots of a consumer in turns.
    """

    place: Place
    split: Any
    first: Any
    count: Any
    edges: tuple[Any, ...]
    before: Any
    shape: Shape

    def slot(self, i: Any, each: int) -> tuple[Any, Any]:
        """The slot of page i in a ring of ``each`` slots a consumer, and how often it was used before.

        A consumer has slots of its own, since who awaits a barrier must await every use of it.
        """
        consumers = self.shape.config.consumers
        turn = lax.div(self.before + i, consumers)
        return lax.rem(self.before + i, consumers) * each + lax.rem(turn, each), lax.div(turn, each)

    def begin(self, me: Any) -> Any:
        """The first page of consumer ``me``, which has every ``consumers``-th from there."""
        consumers = self.shape.config.consumers
        return lax.rem(me + consumers - lax.rem(self.before, consumers), consumers)

    def turns(self, me: Any) -> Any:
        """How many pages consumer ``me`` has."""
        consumers = self.shape.config.consumers
        return lax.div(self.count - self.begin(me) + consumers - 1, consumers)

    def plain(self, i: Any) -> Any:
        """Whether every row sees every key of page i."""
        return self._within(i, *self.edges[2:])

    def seen(self, i: Any) -> Any:
        """Whether some row sees every key of page i; else its values may be NaN in places."""
        return self._within(i, *self.edges[:2])

    def _within(self, i: Any, low: Any, high: Any) -> Any:
        start = (self.first + i) * self.shape.page_size
        return (start >= low) & (start + self.shape.page_size <= high)


def for_items(cta: Any, block_bounds: Any, shape: Shape, step: Callable[[Any, Work], None]) -> None:
    """Calls ``step`` with every item of a CTA and its number, in a loop.

    The bounds of the next item are asked for before the step of this one: a read takes long.
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
        each = pl.cdiv(end - begin, shape.config.splits)
        first = begin + split * each
        work = Work(place, split, first, jnp.maximum(jnp.minimum(each, end - first), 0), tuple(edges), before, shape)
        step(n, work)
        return before + work.count, following

    lax.fori_loop(0, count, body, (jnp.int32(0), bounds(jnp.int32(0))))
