"""The paged KV cache on the device: pools of pages, and the tables through which a step reads and writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dflash_jax.parallel.mesh import Mesh
from dflash_jax.spec import LayerMask
from pallas_kernels import Rotary, paged_attention, write_attend, write_context, write_kv
from pallas_kernels.lib.int4_kv import Int4Pages, KeyRounding

_POOL, _HEADS, _HEAD = PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp"), PartitionSpec("tp")


class Place(NamedTuple):
    """Where a layer keeps its pages: its group, whose page table it uses, its pool, and its first page in the pool."""

    group: int
    pool: int
    first_page: int | Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKVCache:
    """A `models.layers.ContextCache` over pages, in pools that many layers share, so that steps take few arrays.

    Layers that keep the same tokens form a group and share a page table. Pools are donated to every step and written in
    place; the tables come with each step.

    Attributes:
        keys: pools [P, K, S, H], arrays or 4-bit numbers with scales; each holds the pages of its layers, one layer
            after another.
        values: pools of values, as `keys`.
        k_scale: factor from a stored key to the key, by layer and kv head; None is 1.
        v_scale: factor from a stored value to the value, as `k_scale`.
        k_rounding: how keys in 4 bits are rounded, by layer; None for others.
        tables: for each group, the page of every S positions of B sequences; a negative entry keeps nothing.
        valid_from: for each group, the first position of each sequence that is kept.
        places: where each layer keeps its pages; None for a layer without keys and values.
        offset: added to the first page of each layer; None is 0.
        mesh: devices; kv heads are split over its axis `tp` where they divide evenly.
    """

    keys: list[Float[Array, "_ K S H"] | Int4Pages]
    values: list[Float[Array, "_ K S H"] | Int4Pages]
    k_scale: Float[Array, "L K"] | None = None
    v_scale: Float[Array, "L K"] | None = None
    k_rounding: KeyRounding | None = None
    tables: tuple[Int[Array, "B M"], ...] = ()
    valid_from: tuple[Int[Array, " B"], ...] = ()
    places: tuple[Place | None, ...] = field(default=(), metadata={"static": True})
    offset: Int[Array, ""] | None = field(default=None, kw_only=True)
    mesh: Mesh = field(kw_only=True, metadata={"static": True})

    @jax.named_scope("write_kv")  # profiles tell the cache's work from that of layers by these names
    def write(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T N H"], PagedKVCache]:
        """Store keys and values at their positions, and return the queries.

        Keys and values at negative positions, or at positions without a page, are not stored.
        """
        slots = self._slots(self._place(layer), positions)
        specs = (_POOL, _POOL, _HEADS, PartitionSpec(), PartitionSpec(), _HEAD, _HEAD, _HEAD)
        write = self._per_device(_write, specs, (_HEADS, _POOL, _POOL), layer)
        q, *pools = write(*self._pools(layer), heads, slots, rotary, *self._scales_of(layer), self._rounding_of(layer))
        return q, self._with_pools(layer, *pools)

    @jax.named_scope("write_kv")
    def write_context(
        self,
        heads: Sequence[Float[Array, "B T K _ H"]],
        rotary: Rotary,
        k_norms: Sequence[Float[Array, " H"] | None],
        positions: Int[Array, "B T"],
    ) -> PagedKVCache:
        """Store keys and values of every layer at their positions, as `write` does, with one kernel a pool."""
        first_pages: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for layer in range(len(self.places)):
            place = self._place(layer)
            first_pages[place.group, place.pool][layer] = int(place.first_page)
        specs = (_POOL, _POOL, _HEADS, *[PartitionSpec()] * 3, *[PartitionSpec(None, "tp")] * 3)
        keys, values = list(self.keys), list(self.values)
        for (group, i), of_layers in first_pages.items():
            slots = self._slots(Place(group, i, 0), positions)
            function = partial(_write_context, first_pages=of_layers)
            write = self._per_device(function, specs, (_POOL, _POOL), next(iter(of_layers)))
            inputs = (heads, slots, rotary, k_norms)
            keys[i], values[i] = write(keys[i], values[i], *inputs, *self._scales(), self.k_rounding)
        return replace(self, keys=keys, values=values)

    @jax.named_scope("paged_attention")
    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> Float[Array, "B T N H"]:
        """Attention over the pages; rows of negative position give zeros. Padding must follow the real rows."""
        specs = (_HEADS, _POOL, _POOL, *[PartitionSpec()] * 4, _HEAD, _HEAD)
        attend = self._per_device(partial(_attend, mask=mask), specs, _HEADS, layer)
        tables = self._tables(layer, positions, kv_length)
        return attend(q, *self._pools(layer), *tables, *self._scales_of(layer))

    @jax.named_scope("paged_attention")
    def write_attend(
        self,
        layer: int,
        heads: Float[Array, "B T K J H"],
        rotary: Rotary,
        positions: Int[Array, "B T"],
        kv_length: Int[Array, " B"],
        mask: LayerMask,
    ) -> tuple[Float[Array, "B T N H"], PagedKVCache]:
        """`write`, then `attend` with its queries, in one kernel where that is faster."""
        slots = self._slots(self._place(layer), positions)
        specs = (_POOL, _POOL, _HEADS, *[PartitionSpec()] * 6, _HEAD, _HEAD, _HEAD)
        both = self._per_device(partial(_write_attend, mask=mask), specs, (_HEADS, _POOL, _POOL), layer)
        tables = self._tables(layer, positions, kv_length)
        scales, rounding = self._scales_of(layer), self._rounding_of(layer)
        out, *pools = both(*self._pools(layer), heads, slots, rotary, *tables, *scales, rounding)
        return out, self._with_pools(layer, *pools)

    @property
    def is_even(self) -> bool:
        """Whether all layers keep keys and values in one pool, at equal distances."""
        first, second, *_ = *self.places, None, None
        if first is None or second is None:
            return False
        step = second.first_page - first.first_page
        return all(
            place == first._replace(first_page=first.first_page + i * step) for i, place in enumerate(self.places)
        )

    def one_layer(self, layer: Int[Array, ""]) -> PagedKVCache:
        """The cache as one layer sees it, of those that lie at equal distances."""
        first, second = self._place(0), self._place(1)
        scales = (self.k_scale, self.v_scale, self.k_rounding)
        k_scale, v_scale, k_rounding = jax.tree.map(lambda array: array[layer][None], scales)
        of_layer = {"k_scale": k_scale, "v_scale": v_scale, "k_rounding": k_rounding, "places": (first,)}
        return replace(self, **of_layer, offset=layer * (second.first_page - first.first_page))

    def with_layer(self, one: PagedKVCache) -> PagedKVCache:
        """Take over the pools of `one_layer` after a step."""
        return replace(self, keys=one.keys, values=one.values)

    def of_layer(self, layer: int) -> PagedKVCache:
        """See `models.caches.DividedCache.of_layer`: the pools, and the tables of the group."""
        if self.places[layer] is None:
            nothing: dict[str, Any] = dict.fromkeys(("k_scale", "v_scale", "k_rounding"))
            nothing |= {"tables": (), "valid_from": (), "places": (None,) * len(self.places)}
            return replace(self, keys=[], values=[], **nothing)
        group, pool, first_page = self._place(layer)
        scales = (self.k_scale, self.v_scale, self.k_rounding)
        k_scale, v_scale, k_rounding = jax.tree.map(lambda array: jnp.broadcast_to(array[layer], array.shape), scales)
        return replace(
            self,
            keys=[self.keys[pool]],
            values=[self.values[pool]],
            k_scale=k_scale,
            v_scale=v_scale,
            k_rounding=k_rounding,
            tables=(self.tables[group],),
            valid_from=(self.valid_from[group],),
            places=(Place(0, 0, 0),) * len(self.places),
            offset=jnp.asarray(first_page, jnp.int32),
        )

    def with_layer_of(self, layer: int, part: PagedKVCache) -> PagedKVCache:
        """Take over the pools of `of_layer` after a step."""
        return self if self.places[layer] is None else self._with_pools(layer, part.keys[0], part.values[0])

    def _tables(self, layer: int, positions: Int[Array, "B T"], kv_length: Int[Array, " B"]) -> tuple[Array, ...]:
        """Page table, lengths of context and of queries, and first kept position of the layer's group."""
        group, _, first_page = self._place(layer)
        q_length = (positions >= 0).sum(axis=1, dtype=jnp.int32)
        return first_page + self.tables[group], kv_length.astype(jnp.int32), q_length, self.valid_from[group]

    def _place(self, layer: int) -> Place:
        place = self.places[layer]
        assert place is not None
        return place if self.offset is None else place._replace(first_page=place.first_page + self.offset)

    def _pools(self, layer: int) -> tuple[Float[Array, "_ K S H"] | Int4Pages, Float[Array, "_ K S H"] | Int4Pages]:
        """A layer's pools of keys and of values."""
        pool = self._place(layer).pool
        return self.keys[pool], self.values[pool]

    def _with_pools(self, layer: int, k_pages: Array | Int4Pages, v_pages: Array | Int4Pages) -> PagedKVCache:
        keys, values, pool = list(self.keys), list(self.values), self._place(layer).pool
        keys[pool], values[pool] = k_pages, v_pages
        return replace(self, keys=keys, values=values)

    def _slots(self, place: Place, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Index in the pool at which each position is stored; -1 for a position that is not."""
        page_size = self.keys[place.pool].shape[2]
        entry = jnp.maximum(positions, 0) // page_size
        page = jnp.take_along_axis(self.tables[place.group], entry, axis=1, mode="fill", fill_value=-1)
        slot = (place.first_page + page) * page_size + positions % page_size
        return jnp.where((positions < 0) | (page < 0), -1, slot)

    def _scales(self) -> list[Float[Array, "L K"]]:
        """Scales of keys and of values."""
        shape = len(self.places), self.keys[0].shape[1]
        return [jnp.ones(shape) if scale is None else scale for scale in (self.k_scale, self.v_scale)]

    def _scales_of(self, layer: int) -> list[Float[Array, " K"]]:
        return [scale[layer] for scale in self._scales()]

    def _rounding_of(self, layer: int) -> KeyRounding | None:
        return self.k_rounding and self.k_rounding.of_layer(layer)

    def _kv_heads(self, layer: int) -> int:
        return self._pools(layer)[0].shape[1]

    def _per_device(self, function, in_specs, out_specs, layer):
        """The function on each device's share of the kv heads, or on all of them where they do not divide evenly."""
        if self._kv_heads(layer) % self.mesh.size:
            in_specs, out_specs = jax.tree.map(lambda _: PartitionSpec(), (in_specs, out_specs))
        return self.mesh.on_each(function, in_specs, out_specs)


def _write(k_pages, v_pages, heads, slots, rotary, k_scale, v_scale, k_rounding):
    options = {"k_scale": k_scale, "v_scale": v_scale, "k_rounding": k_rounding}
    return write_kv(k_pages, v_pages, heads, slots, rotary, **options)


def _write_context(
    k_pages, v_pages, heads, slots, rotary, k_norms, k_scale, v_scale, k_rounding, *, first_pages: dict[int, int]
):
    options = {"k_scale": k_scale, "v_scale": v_scale, "k_rounding": k_rounding}
    return write_context(k_pages, v_pages, heads, slots, rotary, k_norms, first_pages, **options)


def _attend(q, k_pages, v_pages, table, kv_length, q_length, valid_from, k_scale, v_scale, *, mask: LayerMask):
    options = {"mask": mask.mask, "window": mask.window, "valid_from": valid_from}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return paged_attention(q, k_pages, v_pages, table, kv_length, q_length, **options, **scales)


def _write_attend(
    k_pages, v_pages, heads, slots, rotary, table, kv_length, q_length, valid_from, k_scale, v_scale, k_rounding, *,
    mask: LayerMask,
):  # fmt: skip
    options = {"mask": mask.mask, "window": mask.window, "valid_from": valid_from}
    scales = {"k_scale": k_scale, "v_scale": v_scale, "k_rounding": k_rounding}
    return write_attend(k_pages, v_pages, heads, slots, rotary, table, kv_length, q_length, **options, **scales)
