"""The cache of one model: look up, acquire, extend, commit, release.

All methods run on the daemon's event loop. They check their arguments before they change anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.cache.promoter import Promoter, Promotion, Wanted
from kvtier.cache.reclaimer import Reclaimer
from kvtier.cache.writer import WritePolicy, Writer
from kvtier.errors import CacheFullError, CacheUnknownError, InvalidRequestError
from kvtier.index import NO_SLOT, Cursor, Lease, LruPolicy, PageIndex, Removed
from kvtier.index.leases import PIN_SESSION
from kvtier.index.pool import SlotArray, slot_array
from kvtier.metrics import Metrics
from kvtier.pages.chain import TOKEN_BYTES, Extras, chain_keys, check_namespace, check_tokens, root_key
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.results import CommitResult, TokensByTier
from kvtier.tiers.base import Tier
from kvtier.tiers.mover import Mover

_log = logging.getLogger(__name__)

_GUARD_SESSION = -1  # promotions hold pages under a lease that belongs to no worker
_HASH_ON_LOOP_BYTES = 64 << 10  # more tokens than these are hashed in a thread
_MAX_PINNED_SHARE = 2  # of the device pool at most half can be pinned


class Acquired(NamedTuple):
    """What a worker got: `matched` and `reserved` are page numbers, the rest is where the prefix was."""

    lease: Lease
    matched: SlotArray
    reserved: SlotArray
    found: TokensByTier
    left: TokensByTier


class Drained(NamedTuple):
    """Pages that Redis has after a drain, and those it lacks."""

    stored_pages: int
    unstored_pages: int


@dataclass(frozen=True)
class Prompt:
    """Tokens of a namespace (little-endian uint32), with extra keys by page counted from the start of the sequence."""

    namespace: str
    tokens: bytes
    extras: Extras = field(default_factory=dict)
    prefill_tokens_per_second: float = 0.0


class Wait(NamedTuple):
    """How long an acquire waits for pages of lower tiers: `seconds`, or until `gone`, when nobody wants them now."""

    seconds: float
    gone: asyncio.Future[None]


class PrefixCache:
    """Pages of one model on this host: one tree, and the pools of every tensor-parallel rank.

    Args:
        identity: of rank 0.
        mover: has the pools, and copies between them and to Redis; the cache closes it and them.
        write_policy, after_hits: when pages are written below the device.
        metrics: the daemon's.

    Attributes:
        pool_id: names its pools; a cache that is closed and opened again has others.
    """

    def __init__(
        self,
        identity: CacheIdentity,
        mover: Mover,
        write_policy: WritePolicy,
        after_hits: int,
        metrics: Metrics,
    ) -> None:
        self.identity = identity
        self.pool_id = uuid.uuid4().hex
        self.ranks = mover.ranks
        num_device = self.ranks[0].device.num_pages
        self.index = PageIndex(identity.layout.page_size, num_device, self._num_host_pages, LruPolicy())
        self.tokens_asked = 0
        self.tokens_found = TokensByTier()
        self._mover = mover
        self._metrics = metrics
        self._page_size = identity.layout.page_size
        self._reclaimer = Reclaimer(self.index, mover, metrics)
        self._promoter = Promoter(identity, self.index, mover, self._reclaimer)
        self.writer = Writer(write_policy, after_hits, self.index, self._reclaimer, metrics, mover.has_redis)
        self._promotions: dict[asyncio.Task[None], str] = {}
        self._is_closed = False

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _wanted(self, prompt: Prompt, parent: Lease | None = None) -> Wanted:
        """The whole pages of a prompt behind its parent, checked."""
        check_namespace(prompt.namespace)
        check_tokens(prompt.tokens, self.identity.vocab_size)
        if parent is not None and parent.namespace != prompt.namespace:
            raise InvalidRequestError(
                f"the parent lease is of namespace {parent.namespace!r}, the request of {prompt.namespace!r}; "
                "a sequence stays in its namespace"
            )
        start = parent.end if parent else self._root(prompt.namespace)
        whole = len(prompt.tokens) // self.index.tree.stride * self.index.tree.stride
        tokens = prompt.tokens if whole == len(prompt.tokens) else prompt.tokens[:whole]
        return Wanted(prompt.namespace, start, tokens, prompt.extras, prompt.prefill_tokens_per_second)

    def _root(self, namespace: str) -> Cursor:
        return self.index.tree.root(namespace, root_key(self.identity.fingerprint, namespace))

    async def lookup(self, prompt: Prompt) -> TokensByTier:
        """Where the longest cached prefix of a prompt is. Changes nothing."""
        wanted = self._wanted(prompt)
        known = self.index.tree.match(wanted.start, wanted.tokens, wanted.extras)
        on_device = int(np.count_nonzero(known.device_slots() != NO_SLOT))
        promotion = Promotion(wanted, known.num_pages)
        await self._promoter.count_in_redis(promotion)
        return self._tokens(on_device, known.num_pages - on_device, promotion.num_known - known.num_pages)

    def _tokens(self, device: int, host: int, redis: int) -> TokensByTier:
        return TokensByTier(device * self._page_size, host * self._page_size, redis * self._page_size)

    # --- leases ------------------------------------------------------------------------------------------------------

    async def acquire(
        self, session_id: int, prompt: Prompt, parent: Lease | None, reserve_pages: int, wait: Wait
    ) -> Acquired:
        """A lease on the cached prefix of a prompt, with pages to write what follows.

        Pages in lower tiers are brought up in the time of `wait`; what comes later stays for the next time.
        Raises `CacheFullError` when the pages to reserve cannot be had; then nothing is leased.
        """
        wanted = self._wanted(prompt, parent)
        inherited = list(parent.held) if parent else []
        lease = self.index.leases.open(session_id, prompt.namespace, wanted.start, inherited)
        known, on_device = self.index.hold_device_prefix(lease, wanted.start, wanted.tokens, wanted.extras)
        promotion = Promotion(wanted, known.num_pages)
        if wait.seconds > 0 and on_device < len(wanted.tokens) // self.index.tree.stride:
            await self._promote_for(lease, promotion, wait)
        num_host = known.num_pages - on_device
        num_redis = max(0, promotion.num_known - known.num_pages)
        arrived = lease.end.depth - wanted.start.depth - on_device
        from_host = min(arrived, num_host)
        from_redis = min(arrived - from_host, num_redis)
        try:
            reserved = await self.extend(lease, reserve_pages)
        except BaseException:
            self.release(lease)
            raise
        self.index.touch(lease.end)
        self.writer.used(lease.end)
        matched = np.concatenate([slot_array([]), *lease.held[len(inherited) :]])
        # What is neither from host memory nor from Redis was on the device, or was committed by others in the meantime.
        found = self._tokens(matched.size - from_host - from_redis, from_host, from_redis)
        left = self._tokens(0, num_host - from_host, num_redis - from_redis)
        self._count(len(prompt.tokens) // TOKEN_BYTES, found, left)
        return Acquired(lease, matched, reserved, found, left)

    async def _promote_for(self, lease: Lease, promotion: Promotion, wait: Wait) -> None:
        """Promotes a prefix and lets `lease` hold what arrives in time; the rest goes on in the background."""
        task, guard = self._start_promotion(promotion, lease.end, lease.held)
        await asyncio.wait({task, wait.gone}, timeout=wait.seconds, return_when=asyncio.FIRST_COMPLETED)
        wanted = promotion.wanted
        self.index.hold_device_prefix(lease, wanted.start, wanted.tokens, wanted.extras)
        # NOTE: The guard goes after the lease holds the pages, so that nothing evicts them in between.
        if task.done():
            self.index.leases.release(guard)
        else:
            task.add_done_callback(lambda _: self.index.leases.release(guard))

    def _start_promotion(
        self, promotion: Promotion, end: Cursor, held: list[SlotArray]
    ) -> tuple[asyncio.Task[None], Lease]:
        """A promotion under way, and the lease that holds its pages: `held`, up to `end`, and what arrives."""
        if self._is_closed:
            raise CacheUnknownError(f"the cache of {self.identity.model} was closed in the meantime; attach again")
        guard = self.index.leases.open(_GUARD_SESSION, promotion.wanted.namespace, end, list(held))
        task = asyncio.create_task(self._promoter.promote(promotion, guard), name="promotion")
        self._promotions[task] = promotion.wanted.namespace
        task.add_done_callback(self._promotion_ended)
        return task, guard

    def _promotion_ended(self, task: asyncio.Task[None]) -> None:
        del self._promotions[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a promotion failed", exc_info=error)
            self._metrics.transfer_pages.labels("promotion", "failed").inc()

    async def extend(self, lease: Lease, num_pages: int) -> SlotArray:
        """Reserves more pages for a lease; raises `CacheFullError`."""
        if num_pages == 0:
            return slot_array([])
        slots = await self._reclaimer.allocate_device(num_pages)
        lease.reserved.update(slots.tolist())
        return slots

    async def commit(self, lease: Lease, tokens: bytes, extras: Extras, pages: SlotArray) -> CommitResult:
        """Makes reserved pages of a lease visible to everybody. Their bytes must be complete and never change again."""
        num_tokens = check_tokens(tokens, self.identity.vocab_size)
        if num_tokens == 0 or num_tokens != pages.size * self._page_size:
            raise InvalidRequestError(
                f"{num_tokens} tokens do not fill {pages.size} pages of {self._page_size}; commit one or more, whole"
            )
        lease.check_reserved(pages)
        first_page = lease.end.depth
        parent = self.index.tree.parent_key(lease.end)
        if len(tokens) > _HASH_ON_LOOP_BYTES:
            keys = await asyncio.to_thread(chain_keys, parent, tokens, self._page_size, extras, first_page)
        else:
            keys = chain_keys(parent, tokens, self._page_size, extras, first_page)
        duplicates = self.index.commit(lease, tokens, keys, extras, pages)
        self.writer.committed(lease.end, first_page)
        self._metrics.committed_pages.labels("new").inc(pages.size - duplicates)
        self._metrics.committed_pages.labels("duplicate").inc(duplicates)
        return CommitResult(lease.end.depth * self._page_size, duplicates)

    def release(self, lease: Lease) -> None:
        """Ends a lease."""
        self.index.leases.release(lease)

    def lose_session(self, session_id: int, free_at: float) -> int:
        """Ends the leases of a session that broke off; see `LeaseTable.lose`."""
        return self.index.leases.lose(session_id, free_at)

    # --- tools and operators -----------------------------------------------------------------------------------------

    async def prefetch(self, prompt: Prompt) -> int:
        """Starts bringing a prefix to the device; returns the tokens on their way.

        Raises `CacheUnknownError` when the cache is closed while Redis says what it has.
        """
        wanted = self._wanted(prompt)
        known = self.index.tree.match(wanted.start, wanted.tokens, wanted.extras)
        promotion = Promotion(wanted, known.num_pages)
        await self._promoter.count_in_redis(promotion)
        task, guard = self._start_promotion(promotion, wanted.start, [])
        task.add_done_callback(lambda _: self.release(guard))
        on_device = int(np.count_nonzero(known.device_slots() != NO_SLOT))
        return (promotion.num_known - on_device) * self._page_size

    def pin(self, prompt: Prompt, expires_at: float) -> tuple[int, int]:
        """Holds the part of a prefix that is on the device; returns its lease id and the tokens pinned."""
        wanted = self._wanted(prompt)
        known = self.index.tree.match(wanted.start, wanted.tokens, wanted.extras)
        on_device = int(np.count_nonzero(known.device_slots() != NO_SLOT))
        pins = [lease for lease in self.index.leases if lease.session_id == PIN_SESSION]
        pinned = sum(slots.size for pin in pins for slots in pin.held)
        if pinned + on_device > self.index.device.num_slots // _MAX_PINNED_SHARE:
            raise CacheFullError(
                f"{on_device} more pages would pin over half of the {self.index.device.num_slots} on the device "
                f"({pinned} are pinned); unpin something first"
            )
        lease = self.index.leases.open(PIN_SESSION, prompt.namespace, wanted.start, [])
        lease.expires_at = expires_at
        self.index.hold_device_prefix(lease, wanted.start, wanted.tokens, wanted.extras)
        self.index.touch(lease.end)
        return lease.lease_id, on_device * self._page_size

    def unpin(self, lease_id: int) -> None:
        """Ends a pin; raises `LeaseUnknownError` when it has run out."""
        self.release(self.index.leases.get(lease_id, PIN_SESSION))

    def has_pin(self, lease_id: int) -> bool:
        """Whether a pin is in force."""
        return any(lease.lease_id == lease_id for lease in self.index.leases if lease.session_id == PIN_SESSION)

    @property
    def num_pins(self) -> int:
        return sum(lease.session_id == PIN_SESSION for lease in list(self.index.leases))

    @property
    def num_leases(self) -> int:
        """Leases of workers."""
        return sum(lease.session_id > PIN_SESSION for lease in list(self.index.leases))

    def num_held(self, tier: Tier) -> int:
        """Pages of a pool that leases, pins, the grace time and transfers keep where they are."""
        if tier is Tier.DEVICE:
            return self.index.device.num_held + self.index.leases.num_owned
        return self.index.host.num_held

    async def flush(self, namespace: str) -> Removed:
        """Removes what nothing holds from device and host memory; what stays counts as not in Redis."""
        check_namespace(namespace)
        self.writer.forget(namespace)
        if promotions := {task for task, owner in self._promotions.items() if owner == namespace}:
            await asyncio.wait(promotions)
        # Whoever writes to Redis has its turn here: no page that goes now is written later.
        async with self.writer.turn, self._reclaimer.host_turn:
            self.index.forget_stored(namespace)
            return self.index.remove_namespace(namespace)

    async def drain(self, timeout_s: float) -> Drained:
        """Writes what Redis lacks, for at most `timeout_s` seconds and the batch under way then."""
        if not self._mover.has_redis:
            return Drained(0, self.index.tree.num_pages)
        deadline = time.monotonic() + timeout_s
        while await self._write_all(deadline, recheck=False):
            pass  # once more, for what was committed, or split off, meanwhile; unless Redis takes nothing
        await self._write_all(deadline, recheck=True)  # last, since it takes long and finds little
        num_unstored = sum(int(np.count_nonzero(~node.stored)) for node in self.index.tree.nodes())
        return Drained(self.index.tree.num_pages - num_unstored, num_unstored)

    async def _write_all(self, deadline: float, *, recheck: bool) -> int:
        nodes = list(self.index.tree.nodes())
        return sum([await self.writer.write_all(node, deadline, recheck=recheck) for node in nodes])

    @property
    def _num_host_pages(self) -> int:
        """That every rank has by now: host pools grow."""
        return min(rank.host.ready_pages for rank in self.ranks)

    def sweep(self, now: float) -> None:
        """Frees what has run out, quarantined pages and pins, and takes the host pages that are new.

        Called every second or so.
        """
        self.index.leases.sweep(now)
        self.index.host.grow(self._num_host_pages)

    def _count(self, num_tokens: int, found: TokensByTier, left: TokensByTier) -> None:
        self.tokens_asked += num_tokens
        self.tokens_found = TokensByTier(*(a + b for a, b in zip(self.tokens_found, found, strict=True)))
        self._metrics.tokens_asked.inc(num_tokens)
        for tier, num_found, num_left in zip(Tier, found, left, strict=True):
            self._metrics.tokens_found.labels(tier).inc(num_found)
            self._metrics.tokens_left.labels(tier).inc(num_left)

    async def close(self) -> None:
        """Breaks promotions and drains off, waits for running copies, and gives the memory back."""
        self._is_closed = True
        for task in self._promotions:
            task.cancel()
        if self._promotions:
            await asyncio.wait(set(self._promotions))
        await self.writer.close()
        await asyncio.to_thread(self._give_memory_back)

    def _give_memory_back(self) -> None:
        """Takes a while for pools of many gigabytes: not on the event loop."""
        with contextlib.ExitStack() as stack:  # each of them, whatever happens to the others
            for rank in self.ranks:
                stack.callback(rank.host.close)
                stack.callback(rank.device.close)
            stack.callback(self._mover.close)
