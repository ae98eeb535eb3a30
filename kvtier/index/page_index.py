"""The index of one cache: which pages are known, where they are, who holds them, and which may go.

Everything here is synchronous and moves no bytes. Transfers are done around it in three steps: take slots (held, so
that nobody else frees them), copy, publish or drop.
"""

from __future__ import annotations

import numpy as np

from kvtier.index.leases import Lease, LeaseTable
from kvtier.index.node import Node
from kvtier.index.policy import EvictionPolicy, VictimQueue
from kvtier.index.pool import NO_SLOT, NO_SLOTS, SlotArray, SlotPool
from kvtier.index.radix import BoolArray, Cursor, Match, RadixTree
from kvtier.index.runs import PageRun, Published, Removed, fill, trailing
from kvtier.pages.chain import Extras


class PageIndex:
    """Tree, slots of both pools, leases and eviction candidates of one cache."""

    def __init__(self, page_size: int, num_device: int, num_host: int, policy: EvictionPolicy) -> None:
        self.tree = RadixTree(page_size)
        self.device = SlotPool(num_device)
        self.host = SlotPool(num_host)
        self.leases = LeaseTable(self.device)
        self._clock = 0
        self._device_queue = VictimQueue("device", policy, lambda node: node.ends_on_device)
        self._mirror_queue = VictimQueue("mirror", policy, lambda node: node.has_mirror)
        self._leaf_queue = VictimQueue("leaf", policy, lambda node: node.ends_on_host)

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
                taken[part] = fill(node.device[first:last], device[part])
                self._set_num_device(node, int(np.count_nonzero(node.device != NO_SLOT)))
            if host is not None:
                taken[part] = fill(node.host[first:last], host[part])
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

    def _set_num_device(self, node: Node, num_device: int) -> None:
        """Says how many pages of a node are on the device now; its parent counts the children that have any."""
        was, node.num_device = node.num_device, num_device
        parent = node.parent
        assert parent is not None
        parent.device_children += (num_device > 0) - (was > 0)
        self._enqueue(parent)
        self._enqueue(node)

    # --- taking runs -------------------------------------------------------------------------------------------------

    def run(self, end: Cursor, first_page: int) -> PageRun:
        """The pages from `first_page` to `end` with their present slots."""
        segments = self.tree.path(end, first_page)
        return PageRun(
            end,
            first_page,
            np.concatenate([NO_SLOTS, *(node.device[a:b] for node, a, b in segments)]),
            np.concatenate([NO_SLOTS, *(node.host[a:b] for node, a, b in segments)]),
            [node.key_of(index) for node, a, b in segments for index in range(a, b)],
            np.concatenate([np.empty(0, dtype=np.bool_), *(node.stored[a:b] for node, a, b in segments)]),
        )

    def take_device_victims(self, count: int) -> list[PageRun]:
        """Up to `count` pages that may leave the device, leaves first; their device slots are held for the caller."""
        runs: list[PageRun] = []
        popped: list[Node] = []
        while count > 0 and (node := self._device_queue.pop()) is not None:
            popped.append(node)
            num_pages = min(count, trailing(~self.device.is_held(node.device[: node.num_device])))
            if num_pages:
                depth = node.first_page + node.num_device
                runs.append(self.run(Cursor(node, depth), depth - num_pages))
                self.device.hold(runs[-1].device)
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
            num_pages = min(count, trailing(~self.host.is_held(node.host[node.num_device :])))
            if num_pages:
                runs.append(self.run(Cursor(node, node.end_page), node.end_page - num_pages))
                self.host.hold(runs[-1].host)
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
            unused.append(part[~fill(node.host[first : first + part.size], part)])
            self._enqueue(node)
            position += last - first
        return np.concatenate([NO_SLOTS, *unused])

    def set_stored(self, run: PageRun, stored: BoolArray) -> None:
        """Says which pages of a run Redis has now."""
        position = 0
        for node, first, last in self.tree.path(run.cursor, run.first_page):
            node.stored[first:last] = stored[position : position + last - first]
            position += last - first

    def forget_stored(self, namespace: str) -> None:
        """Marks every page of a namespace as one that Redis does not have any more."""
        for node in self.tree.nodes(namespace):
            node.stored[:] = False

    def drop_device(self, run: PageRun) -> int:
        """Takes the pages of a run off the device, last first, and frees their slots; returns how many went.

        Stops at a page that is held, has a page on the device behind it, or has no other copy while pages in host
        memory follow it. A page without any other copy leaves the tree.
        """
        freed = 0
        # NOTE: Where a page stays, its node counts among the parent's `device_children`: nothing above it goes.
        for node, first, last in reversed(self.tree.path(run.cursor, run.first_page)):
            if node.device_children or node.num_device != last:
                break
            num_free = trailing(~self.device.is_held(node.device[first:last]))
            copied = node.host[last - num_free : last] != NO_SLOT
            lone = trailing(~copied) if last == node.num_pages and not node.children else 0
            num_pages = lone + trailing(copied[: num_free - lone])
            self.device.free(node.device[last - num_pages : last])
            node.device[last - num_pages : last] = NO_SLOT
            self._set_num_device(node, last - num_pages)
            if lone:
                self._trim(node, last - lone)
            freed += num_pages
        return freed

    def drop_host(self, run: PageRun) -> int:
        """Takes the pages of a run, in host memory alone, out of the tree, last first; returns how many went."""
        freed = 0
        for node, first, last in reversed(self.tree.path(run.cursor, run.first_page)):
            if node.children or node.num_pages != last:
                break
            first = max(first, node.num_device)
            num_pages = min(last - first, trailing(~self.host.is_held(node.host[first:last])))
            self.host.free(node.host[last - num_pages : last])
            self._trim(node, last - num_pages)
            self._enqueue(node)
            freed += num_pages
        return freed

    def remove_namespace(self, namespace: str) -> Removed:
        """Takes all pages of a namespace out of the tree, but for held ones and what lies before them."""
        device = host = kept = 0
        for node in reversed(list(self.tree.nodes(namespace))):
            is_held = self.device.is_held(node.device) | self.host.is_held(node.host)
            num_pages = 0 if node.children else trailing(~is_held)
            first = node.num_pages - num_pages
            device_slots, host_slots = node.device[first : node.num_device], node.host[first:]
            host_slots = host_slots[host_slots != NO_SLOT]
            self.device.free(device_slots)
            self.host.free(host_slots)
            device, host, kept = device + device_slots.size, host + host_slots.size, kept + first
            self._set_num_device(node, min(node.num_device, first))
            if num_pages:
                self._trim(node, first)
        return Removed(device, host, kept)

    def _trim(self, node: Node, num_pages: int) -> None:
        self.tree.trim(node, num_pages)
        if num_pages == 0 and node.parent is not None:
            self._enqueue(node.parent)

    # --- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self, device_in_transit: SlotArray = NO_SLOTS, host_in_transit: SlotArray = NO_SLOTS) -> None:
        """Raises `AssertionError` unless every slot has one owner, every page is somewhere and every count is right.

        `*_in_transit` are allocated slots that a transfer has not published yet.
        """
        for part in (self.tree, self.device, self.host, self.leases):
            part.check_integrity()
        nodes = list(self.tree.nodes())
        self.device.check_owners([*(node.device for node in nodes), self.leases.owned_slots(), device_in_transit])
        self.host.check_owners([*(node.host for node in nodes), host_in_transit])
        for node in nodes:
            assert ((node.device != NO_SLOT) | (node.host != NO_SLOT)).all(), "a page in the tree is nowhere"
            assert not node.ends_on_device or "device" in node.queued_in, "a device victim is not queued"
            assert not node.ends_on_host or "leaf" in node.queued_in, "a host victim is not queued"
            assert not node.has_mirror or "mirror" in node.queued_in, "a mirror is not queued"
