"""The index of one cache: which pages are known, where they are, who holds them, and which may go.

Everything here is synchronous and moves no bytes. Transfers are done around it in three steps: take slots (held, so
that nobody else frees them), copy, publish or drop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtier.index.leases import Lease, LeaseTable
from kvtier.index.policy import EvictionPolicy, VictimQueue
from kvtier.index.pool import NO_SLOT, SlotArray, SlotPool, slot_array
from kvtier.index.radix import BoolArray, Cursor, Match, Node, RadixTree, Segment
from kvtier.pages.chain import Extras


class PageRun(NamedTuple):
    """Consecutive pages `first_page` to `cursor.depth` of a path, chosen for a move, with their slots at that time."""

    cursor: Cursor
    first_page: int
    device: SlotArray
    host: SlotArray
    keys: list[bytes]
    stored: BoolArray

    @property
    def num_pages(self) -> int:
        return self.cursor.depth - self.first_page

    @property
    def namespace(self) -> str:
        return self.cursor.node.namespace


class Published(NamedTuple):
    """What became of slots that were offered to the tree: `taken` marks those it owns now."""

    end: Cursor
    taken: BoolArray
    segments: list[Segment]


class Removed(NamedTuple):
    """Numbers of pages: freed on the device and in host memory, and kept because they are held or precede held ones."""

    device: int
    host: int
    kept: int


class PageIndex:
    """Tree, slots of both pools, leases and eviction candidates of one cache."""

    def __init__(self, page_size: int, num_device: int, num_host: int, policy: EvictionPolicy) -> None:
        self.tree = RadixTree(page_size)
        self.device = SlotPool(num_device)
        self.host = SlotPool(num_host)
        self.leases = LeaseTable(self.device)
        self._clock = 0
        self._device_queue = VictimQueue("device", policy, _ends_on_device)
        self._mirror_queue = VictimQueue("mirror", policy, _has_mirror)
        self._leaf_queue = VictimQueue("leaf", policy, _ends_on_host)

    # --- recency -----------------------------------------------------------------------------------------------------

    def touch(self, end: Cursor) -> None:
        """Marks the path to `end` as used now, and only it: a node that goes on behind `end` is cut there."""
        self._clock += 1
        node, offset = self.tree.locate(end)
        if 0 < offset < node.num_pages:
            node = self._split(node, offset)
        step: Node | None = node
        while step is not None:
            step.last_access = self._clock
            step.hits += 1
            step = step.parent

    def _split(self, node: Node, offset: int) -> Node:
        upper = self.tree.split(node, offset)
        self._enqueue(upper)
        return upper

    def _enqueue(self, node: Node) -> None:
        self._device_queue.push(node)
        self._mirror_queue.push(node)
        self._leaf_queue.push(node)

    # --- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self,
        start: Cursor,
        tokens: bytes,
        keys: list[bytes],
        extras: Extras,
        *,
        device: SlotArray | None = None,
        host: SlotArray | None = None,
        stored: bool = False,
    ) -> Published:
        """Makes whole pages behind `start` visible, with their slots on the device or in host memory.

        A page that the tree knows takes a slot only where it has none. For `device`, all pages before `start` must be
        on the device and held.
        """
        known = self.tree.match(start, tokens, extras)
        segments = known.segments
        if known.num_pages < len(keys):
            node, offset = self.tree.locate(known.end)
            if 0 < offset < node.num_pages:
                known = known._replace(end=Cursor(self._split(node, offset), known.end.depth))
                segments = self.tree.path(known.end, start.depth)
            rest = tokens[known.num_pages * self.tree.stride :]
            segments = segments + self.tree.extend(known.end, rest, keys[known.num_pages :], extras)
        taken = np.zeros(len(keys), dtype=np.bool_)
        position = 0
        for node, first, last in segments:
            part = slice(position, position + last - first)
            if device is not None:
                taken[part] = _fill(node.device, first, last, device[part])
                self._device_changed(node)
            if host is not None:
                taken[part] = _fill(node.host, first, last, host[part])
            if stored:
                node.stored[first:last] = True
            self._enqueue(node)
            position += last - first
        node, last_page = segments[-1].node, start.depth + len(keys)
        return Published(Cursor(node, last_page), taken, segments)

    def commit(self, lease: Lease, tokens: bytes, keys: list[bytes], extras: Extras, slots: SlotArray) -> int:
        """Moves reserved pages of a lease into the tree; returns how many of them the tree had already."""
        published = self.publish(lease.end, tokens, keys, extras, device=slots)
        lease.reserved.difference_update(slots.tolist())
        lease.duplicates.extend(slots[~published.taken].tolist())
        # NOTE: The lease holds the tree's own pages, also where it keeps a duplicate: the pages it commits next need
        # all pages before them on the device.
        self.leases.hold(lease, np.concatenate([node.device[first:last] for node, first, last in published.segments]))
        lease.end = published.end
        self.touch(lease.end)
        return int(np.count_nonzero(~published.taken))

    def hold_device_prefix(self, lease: Lease, start: Cursor, tokens: bytes, extras: Extras) -> tuple[Match, int]:
        """Lets a lease, which begins at `start`, hold the pages of a prefix that are on the device by now.

        Returns what the tree knows of the prefix, and how many of these pages are on the device.
        """
        known = self.tree.match(start, tokens, extras)
        slots = known.device_slots()
        on_device = int(np.count_nonzero(slots != NO_SLOT))
        held = lease.end.depth - start.depth
        if on_device > held:
            self.leases.hold(lease, slots[held:on_device])
            lease.end = Cursor(known.end.node, start.depth + on_device)
        return known, on_device

    def _device_changed(self, node: Node) -> None:
        """Brings the counts in line with the node's device column."""
        was = node.num_device
        node.num_device = int(np.count_nonzero(node.device != NO_SLOT))
        parent = node.parent
        assert parent is not None
        if (was > 0) != (node.num_device > 0):
            parent.device_children += 1 if node.num_device else -1
            if parent.parent is not None:
                self._enqueue(parent)

    # --- taking runs -------------------------------------------------------------------------------------------------

    def run(self, end: Cursor, first_page: int) -> PageRun:
        """The pages from `first_page` to `end` with their present slots."""
        segments = self.tree.path(end, first_page)
        empty = np.empty(0, dtype=np.int32)
        return PageRun(
            end,
            first_page,
            np.concatenate([empty, *(node.device[a:b] for node, a, b in segments)]),
            np.concatenate([empty, *(node.host[a:b] for node, a, b in segments)]),
            [node.key_of(index) for node, a, b in segments for index in range(a, b)],
            np.concatenate([np.empty(0, dtype=np.bool_), *(node.stored[a:b] for node, a, b in segments)]),
        )

    def take_device_victims(self, count: int) -> list[PageRun]:
        """Up to `count` pages that may leave the device, leaves first; their device slots are held for the caller."""
        runs: list[PageRun] = []
        popped: list[Node] = []
        while count > 0 and (node := self._device_queue.pop()) is not None:
            popped.append(node)
            num_pages = min(count, _trailing(~self.device.is_held(node.device[: node.num_device])))
            if num_pages:
                depth = node.first_page + node.num_device
                run = self.run(Cursor(node, depth), depth - num_pages)
                self.device.hold(run.device)
                runs.append(run)
                count -= num_pages
        for node in popped:
            self._device_queue.push(node)
        return runs

    def take_host_victims(self, count: int) -> list[PageRun]:
        """Up to `count` pages that are in host memory alone and may leave it; their host slots are held."""
        runs: list[PageRun] = []
        popped: list[Node] = []
        while count > 0 and (node := self._leaf_queue.pop()) is not None:
            popped.append(node)
            num_pages = min(count, _trailing(~self.host.is_held(node.host[node.num_device :])))
            if num_pages:
                run = self.run(Cursor(node, node.end_page), node.end_page - num_pages)
                self.host.hold(run.host)
                runs.append(run)
                count -= num_pages
        for node in popped:
            self._leaf_queue.push(node)
        return runs

    # --- giving slots up ---------------------------------------------------------------------------------------------

    def drop_mirrors(self, count: int) -> int:
        """Frees up to `count` host slots of pages that are on the device as well; returns how many."""
        freed = 0
        popped: list[Node] = []
        while freed < count and (node := self._mirror_queue.pop()) is not None:
            popped.append(node)
            mirrored = node.host[: node.num_device]
            indices = np.flatnonzero(mirrored != NO_SLOT)
            indices = indices[~self.host.is_held(mirrored[indices])][::-1][: count - freed]
            self.host.free(mirrored[indices])
            mirrored[indices] = NO_SLOT
            freed += indices.size
        for node in popped:
            self._mirror_queue.push(node)
        return freed

    def set_host(self, run: PageRun, slots: SlotArray) -> SlotArray:
        """Publishes host copies of the first pages of a run; returns the slots that were not needed after all."""
        unused: list[SlotArray] = []
        position = 0
        for node, first, last in self.tree.path(run.cursor, run.first_page):
            part = slots[position : position + last - first]
            unused.append(part[~_fill(node.host, first, first + part.size, part)])
            self._enqueue(node)
            position += last - first
        return np.concatenate(unused) if unused else slot_array([])

    def set_stored(self, run: PageRun, stored: BoolArray) -> None:
        """Marks the pages of a run that Redis has now."""
        position = 0
        for node, first, last in self.tree.path(run.cursor, run.first_page):
            node.stored[first:last] |= stored[position : position + last - first]
            position += last - first

    def drop_device(self, run: PageRun) -> int:
        """Takes the pages of a run off the device, last first, and frees their slots; returns how many went.

        Stops at a page that is held, has a page on the device behind it, or has no other copy while pages in host
        memory follow it. A page without any other copy leaves the tree.
        """
        freed = 0
        for node, first, last in reversed(self.tree.path(run.cursor, run.first_page)):
            if node.device_children or node.num_device != last:
                break
            num_free = _trailing(~self.device.is_held(node.device[first:last]))
            copied = node.host[last - num_free : last] != NO_SLOT
            lone = _trailing(~copied) if last == node.num_pages and not node.children else 0
            num_pages = lone + _trailing(copied[: num_free - lone])
            self.device.free(node.device[last - num_pages : last])
            node.device[last - num_pages : last] = NO_SLOT
            node.num_device = last - num_pages
            if lone:
                self._trim(node, last - lone)
            self._settle(node, last)
            freed += num_pages
            if num_pages < last - first:
                break
        return freed

    def drop_host(self, run: PageRun) -> int:
        """Takes the pages of a run, in host memory alone, out of the tree, last first; returns how many went."""
        freed = 0
        for node, first, last in reversed(self.tree.path(run.cursor, run.first_page)):
            if node.children or node.num_pages != last:
                break
            first = max(first, node.num_device)
            num_pages = min(last - first, _trailing(~self.host.is_held(node.host[first:last])))
            self.host.free(node.host[last - num_pages : last])
            self._trim(node, last - num_pages)
            self._enqueue(node)
            freed += num_pages
            if node.num_pages:
                break
        return freed

    def remove_namespace(self, namespace: str) -> Removed:
        """Takes all pages of a namespace out of the tree, but for held ones and what lies before them."""
        device = host = kept = 0
        for node in reversed(list(self.tree.nodes(namespace))):
            free = ~(self._is_held(self.device, node.device) | self._is_held(self.host, node.host))
            num_pages = 0 if node.children else _trailing(free)
            first, was = node.num_pages - num_pages, node.num_device
            for pool, column in ((self.device, node.device[first:]), (self.host, node.host[first:])):
                pool.free(column[column != NO_SLOT])
            device += int(np.count_nonzero(node.device[first:] != NO_SLOT))
            host += int(np.count_nonzero(node.host[first:] != NO_SLOT))
            kept += first
            node.num_device = min(was, first)
            if num_pages:
                self._trim(node, first)
            self._settle(node, was)
        return Removed(device, host, kept)

    @staticmethod
    def _is_held(pool: SlotPool, column: SlotArray) -> BoolArray:
        return (column != NO_SLOT) & pool.is_held(column)

    def _settle(self, node: Node, was: int) -> None:
        """After `num_device` fell from `was`: tells the parent, and queues the node again."""
        parent = node.parent
        assert parent is not None
        if was and not node.num_device:
            parent.device_children -= 1
            self._enqueue(parent)
        self._enqueue(node)

    def _trim(self, node: Node, num_pages: int) -> None:
        self.tree.trim(node, num_pages)
        if num_pages == 0 and node.parent is not None:
            self._enqueue(node.parent)

    # --- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(
        self, device_in_transit: SlotArray | None = None, host_in_transit: SlotArray | None = None
    ) -> None:
        """Raises `AssertionError` unless every slot has one owner and every count is right.

        `*_in_transit` are allocated slots that a transfer has not published yet.
        """
        self.tree.check_integrity()
        self.device.check_integrity()
        self.host.check_integrity()
        nodes = list(self.tree.nodes())
        empty = slot_array([])
        for name, pool, column, outside in (
            ("device", self.device, [node.device for node in nodes], [self.leases.owned_slots(), device_in_transit]),
            ("host", self.host, [node.host for node in nodes], [host_in_transit]),
        ):
            owned = np.concatenate([empty, *column, *(slots for slots in outside if slots is not None)])
            owned = owned[owned != NO_SLOT]
            assert np.unique(owned).size == owned.size, f"a {name} slot has two owners"
            assert np.array_equal(np.sort(owned), pool.allocated()), f"a {name} slot has no owner, or is free and owned"
        for node in nodes:
            assert ((node.device != NO_SLOT) | (node.host != NO_SLOT)).all(), "a page in the tree is nowhere"
            parent = node.parent
            assert parent is not None
            whole = parent.parent is None or parent.num_device == parent.num_pages
            assert not node.num_device or whole, "a page is on the device, but the page before it is not"
            in_device = sum(child.num_device > 0 for child in node.children.values())
            assert node.device_children == in_device, "the count of children on the device is off"
            assert not _ends_on_device(node) or "device" in node.queued_in, "a device victim is not queued"
            assert not _ends_on_host(node) or "leaf" in node.queued_in, "a host victim is not queued"
            assert not _has_mirror(node) or "mirror" in node.queued_in, "a mirror is not queued"
        held = np.zeros(self.device.num_slots, dtype=np.int64)
        for lease in self.leases:
            for slots in lease.held:
                held[slots] += 1
        assert (self.device.is_held(np.flatnonzero(held).astype(np.int32))).all(), "a leased page is not held"


def _fill(column: SlotArray, first: int, last: int, slots: SlotArray) -> BoolArray:
    """Puts `slots` where the column has none; returns which were put."""
    part = column[first:last]
    empty: BoolArray = part == NO_SLOT
    part[empty] = slots[empty]
    return empty


def _ends_on_device(node: Node) -> bool:
    return node.num_device > 0 and not node.device_children


def _ends_on_host(node: Node) -> bool:
    return node.num_device < node.num_pages and not node.children


def _has_mirror(node: Node) -> bool:
    return bool((node.host[: node.num_device] != NO_SLOT).any())


def _trailing(mask: BoolArray) -> int:
    """How many of the last entries are all true."""
    false = np.flatnonzero(~mask)
    return int(mask.size - (false[-1] + 1 if false.size else 0))
