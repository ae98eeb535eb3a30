"""Brings pages up: from Redis to host memory, from host memory to the device, in batches.

Each batch is published when it is whole, so whoever stops waiting keeps what has arrived. A batch that is on its way
already is waited for, not moved twice. Pages that would take longer to move than to recompute are left where they are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.cache.reclaimer import Reclaimer
from kvtier.errors import CacheFullError, GpuError
from kvtier.index import Cursor, Lease, Match, PageIndex
from kvtier.pages.chain import Extras, chain_keys, next_key
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.tiers.base import Route
from kvtier.tiers.mover import Mover

_BATCH_S = 0.02  # long beside what publishing a batch costs, short enough for a caller to get what has arrived
_MIN_BATCH_BYTES = 32 << 20
_BATCHES_AT_ONCE = 2
_HOST_SHARE = 4  # a batch has at most a quarter of the host pool


class Wanted(NamedTuple):
    """A prefix to bring to the device: whole pages of `tokens` behind `start`.

    `prefill_tokens_per_second` is what the worker computes itself; 0 when unknown: then everything is promoted.
    """

    namespace: str
    start: Cursor
    tokens: bytes
    extras: Extras
    prefill_tokens_per_second: float = 0.0


@dataclass
class Promotion:
    """A prefix on its way up.

    `num_known` counts its pages, from the first, that the tree has, and once `is_counted` those behind that Redis has.
    """

    wanted: Wanted
    num_known: int
    is_counted: bool = False


class _Missing(NamedTuple):
    """What the tree knows of a prefix, how much of it is on the device, and the key of the first page that is not."""

    known: Match
    on_device: int
    key: bytes


class Promoter:
    """Promotions of one cache."""

    def __init__(self, identity: CacheIdentity, index: PageIndex, mover: Mover, reclaimer: Reclaimer) -> None:
        self._identity = identity
        self._index = index
        self._mover = mover
        self._reclaimer = reclaimer
        self._page_size = identity.layout.page_size
        self._turn = asyncio.Semaphore(_BATCHES_AT_ONCE)
        self._on_their_way: dict[bytes, asyncio.Event] = {}  # batches by the chain key of their first page

    def _batch(self, route: Route) -> int:
        """Pages that a batch may have: those that move in a moment at the rate measured of late."""
        page_s = self._mover.seconds_for(route, 1)
        of_a_moment = int(_BATCH_S / page_s) if page_s else 0
        # NOTE: Batches hold host slots while they wait for device slots, whose allocation needs host slots to spill to:
        # together they must leave it enough.
        most = max(1, self._index.host.num_slots // _HOST_SHARE)
        return min(max(_MIN_BATCH_BYTES // self._identity.layout.page_bytes, of_a_moment, 1), most)

    async def count_in_redis(self, promotion: Promotion) -> None:
        """Adds the pages behind the known ones that Redis has to `promotion.num_known`."""
        promotion.is_counted = True
        wanted = promotion.wanted
        known = self._index.tree.match(wanted.start, wanted.tokens, wanted.extras)
        promotion.num_known = known.num_pages
        if self._mover.has_redis and known.num_pages * self._index.tree.stride < len(wanted.tokens):
            keys = await self._keys_behind(wanted, known)
            promotion.num_known += await self._mover.count_stored(wanted.namespace, keys)

    async def promote(self, promotion: Promotion, guard: Lease) -> None:
        """Promotes what is worth it; `guard` holds the device part of the prefix, and what comes to it."""
        if not promotion.is_counted:
            await self.count_in_redis(promotion)
        while (missing := self._first_missing(promotion, guard)) is not None:
            if (other := self._on_their_way.get(missing.key)) is not None:
                await other.wait()
                continue
            arrived = self._on_their_way[missing.key] = asyncio.Event()
            try:
                async with self._turn:
                    moved = await self._move_batch(promotion, guard, missing.key)
            finally:
                del self._on_their_way[missing.key]
                arrived.set()
            if not moved:
                return

    def _first_missing(self, promotion: Promotion, guard: Lease) -> _Missing | None:
        wanted = promotion.wanted
        known, on_device = self._index.hold_device_prefix(guard, wanted.start, wanted.tokens, wanted.extras)
        if on_device >= max(known.num_pages, promotion.num_known):
            return None
        return _Missing(known, on_device, self._key_at(wanted, known, on_device))

    async def _move_batch(self, promotion: Promotion, guard: Lease, key: bytes) -> bool:
        """Moves the batch that begins with page `key` one tier up, if that is what is missing still.

        Returns whether going on makes sense.
        """
        missing = self._first_missing(promotion, guard)
        if missing is None or missing.key != key:
            return True
        known, on_device = missing.known, missing.on_device
        if on_device < known.num_pages:
            return await self._raise(promotion.wanted, known, on_device) > 0
        return await self._fetch(promotion.wanted, known, promotion.num_known - on_device) > 0

    async def _raise(self, wanted: Wanted, known: Match, on_device: int) -> int:
        """Host to device: a batch of the known pages behind the first `on_device`."""
        index = self._index
        num_pages = min(self._batch(Route.HOST_TO_DEVICE), self._reclaimer.num_device_available)
        host_slots = known.host_slots()[on_device : on_device + num_pages]
        if not self._is_worth_it(wanted, Route.HOST_TO_DEVICE, host_slots.size):
            return 0
        node, first_page = known.end.node, wanted.start.depth + on_device
        keys = index.run(Cursor(node, first_page + host_slots.size), first_page).keys
        index.host.hold(host_slots)
        try:
            device_slots = await self._reclaimer.allocate_device(host_slots.size)
            try:
                await self._mover.promote(host_slots, device_slots)
            except GpuError:
                index.device.free(device_slots)
                return 0
            tokens = wanted.tokens[on_device * index.tree.stride : (on_device + host_slots.size) * index.tree.stride]
            published = index.publish(Cursor(node, first_page), tokens, keys, wanted.extras, device=device_slots)
            index.device.free(device_slots[~published.taken])
        except CacheFullError:
            return 0
        finally:
            index.host.release(host_slots)
        return host_slots.size

    async def _fetch(self, wanted: Wanted, known: Match, num_pages: int) -> int:
        """Redis to host: a batch of pages right behind the known ones, up to the first that does not arrive.

        All known pages are on the device here and held by the guard, so `known.end` stays where it is.
        """
        if not self._is_worth_it(wanted, Route.REDIS_TO_HOST, num_pages):
            return 0
        host_slots = await self._reclaimer.allocate_host(min(num_pages, self._batch(Route.REDIS_TO_HOST)))
        keys = (await self._keys_behind(wanted, known))[: host_slots.size]
        arrived = await self._mover.fetch(wanted.namespace, keys, host_slots)
        whole = arrived.size if arrived.all() else int(np.argmin(arrived))
        index = self._index
        unused = host_slots[whole:]
        if whole:
            first = known.num_pages * index.tree.stride
            tokens = wanted.tokens[first : first + whole * index.tree.stride]
            extras = wanted.extras
            published = index.publish(known.end, tokens, keys[:whole], extras, host=host_slots[:whole], stored=True)
            unused = np.concatenate([unused, host_slots[:whole][~published.taken]])
            index.touch(published.end)
        index.host.free(unused)
        return whole

    def _is_worth_it(self, wanted: Wanted, route: Route, num_pages: int) -> bool:
        rate = wanted.prefill_tokens_per_second
        if num_pages == 0 or rate <= 0:
            return num_pages > 0
        return self._mover.seconds_for(route, num_pages) < num_pages * self._page_size / rate

    async def _keys_behind(self, wanted: Wanted, known: Match) -> list[bytes]:
        parent = self._index.tree.parent_key(known.end)
        rest = wanted.tokens[known.num_pages * self._index.tree.stride :]
        # Hashing 100,000 tokens takes milliseconds: not on the event loop.
        return await asyncio.to_thread(chain_keys, parent, rest, self._page_size, wanted.extras, known.end.depth)

    def _key_at(self, wanted: Wanted, known: Match, page: int) -> bytes:
        """Chain key of page `page` of `wanted`, which is known or the first that is not."""
        start = wanted.start.depth
        if page < known.num_pages:
            return self._index.tree.parent_key(Cursor(known.end.node, start + page + 1))
        stride = self._index.tree.stride
        tokens = wanted.tokens[page * stride : (page + 1) * stride]
        return next_key(self._index.tree.parent_key(known.end), tokens, wanted.extras.get(start + page, b""))
