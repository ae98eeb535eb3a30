"""A `PageIndex` with simulated pools beside the plain model, and the comparison of both.

Whatever the index says, the slots that it names must contain the very pages that were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant
from plain_model import PAGE_SIZE, Path, PlainModel, namespace_key, page_tokens, prefixes, tokens_of
from simulated_pool import SimulatedPool

from kvtier.index import NO_SLOT, Cursor, Lease, LruPolicy, Match, Node, PageIndex, PageRun
from kvtier.index.pool import SlotArray, slot_array
from kvtier.pages.chain import TOKEN_BYTES, Extras

NUM_DEVICE, NUM_HOST = 24, 12
STRIDE = PAGE_SIZE * TOKEN_BYTES


@dataclass(eq=False)
class HeldLease:
    """What the model knows of a lease: its end, and the pages that it holds."""

    lease: Lease
    end: Path
    held: list[Path]


class Whole(NamedTuple):
    """How the index is told which pages are meant."""

    tokens: bytes
    keys: list[bytes]
    extras: Extras


class Found(NamedTuple):
    """A match, the known pages, and how many of them are on the device."""

    match: Match
    paths: list[Path]
    num_device: int


class SimulatedIndex(RuleBasedStateMachine):
    """State of the machine, and what must hold after every step. The rules are in its subclasses."""

    num_checks = 0
    num_examples = 0

    def __init__(self) -> None:
        super().__init__()
        SimulatedIndex.num_examples += 1
        self.index = PageIndex(PAGE_SIZE, NUM_DEVICE, NUM_HOST, LruPolicy())
        self.model = PlainModel()
        self.device = SimulatedPool(self.index.device, self.model.device_holds)
        self.host = SimulatedPool(self.index.host, self.model.host_holds)
        self.leases: list[HeldLease] = []
        self.quarantined: list[tuple[float, int]] = []  # when they are free, how many slots
        self.now = 0.0

    # --- asking ------------------------------------------------------------------------------------------------------

    def root(self, namespace: str) -> Cursor:
        return self.index.tree.root(namespace, namespace_key(namespace))

    def whole(self, start: Path, end: Path) -> Whole:
        """The pages behind `start`, up to and with `end`."""
        paths = prefixes(start, end)
        extras = {len(path) - 2: path[-1][0] for path in paths if path[-1][0]}
        return Whole(tokens_of(*(path[-1][1] for path in paths)), [self.model.key(path) for path in paths], extras)

    def match(self, cursor: Cursor, start: Path, end: Path) -> Found:
        """Looks up the pages behind `start` on the way to `end`, and compares the answer."""
        tokens, _, extras = self.whole(start, end)
        match = self.index.tree.match(cursor, tokens, extras)
        known = self.model.known(start, end)
        assert match.num_pages == len(known) and match.end.depth == cursor.depth + len(known)
        on_device = [path for path in known if self.model.pages[path].on_device]
        device, host = match.device_slots(), match.host_slots()
        assert self.device.read(device[: len(on_device)]) == on_device == known[: len(on_device)]
        assert (device[: len(on_device)] >= 0).all() and (device[len(on_device) :] == NO_SLOT).all()
        on_host = [path for path in known if self.model.pages[path].on_host]
        assert self.host.read(host[host != NO_SLOT]) == on_host
        return Found(match, known, len(on_device))

    def paths_of(self, run: PageRun, pages: SimulatedPool, slots: SlotArray) -> list[Path]:
        """The pages of a run by what its slots contain; checks that the run describes them rightly."""
        paths = [path for path in pages.read(slots) if path is not None]
        assert prefixes(paths[0][:-1], paths[-1]) == paths
        assert (run.namespace, run.cursor.depth, run.num_pages) == (paths[0][0], len(paths[-1]) - 1, len(paths))
        assert [self.model.key(path) for path in paths] == run.keys
        assert [self.model.pages[path].stored for path in paths] == run.stored.tolist()
        assert [self.model.pages[path].on_host for path in paths] == (run.host != NO_SLOT).tolist()
        return paths

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        SimulatedIndex.num_checks += 1
        self.index.check_integrity(self.device.in_transit, self.host.in_transit)
        columns = self.columns()
        assert len(columns) == len(self.model.pages) == self.index.tree.num_pages
        paths, device, host = zip(*columns, strict=True) if columns else ((), (), ())
        self._check_pool(self.device, paths, device, [self.model.pages[path].on_device for path in paths])
        self._check_pool(self.host, paths, host, [self.model.pages[path].on_host for path in paths])
        num_own = sum(len(held.lease.reserved) + len(held.lease.duplicates) for held in self.leases)
        num_own += sum(count for _, count in self.quarantined)
        assert self.index.leases.num_owned == num_own
        num_in_tree = sum(slot != NO_SLOT for slot in device)
        assert self.index.device.num_free == NUM_DEVICE - num_in_tree - num_own - self.device.in_transit.size
        assert len(self.index.leases) == len(self.leases)

    def columns(self) -> list[tuple[Path, int, int]]:
        """Path, device slot and host slot of every page in the tree; checks what else the tree says of it."""
        ends: dict[Node, Path] = {}
        columns: list[tuple[Path, int, int]] = []
        for node in self.index.tree.nodes():
            assert node.parent is not None
            path: Path = ends.get(node.parent, (node.namespace,))
            for page in range(node.num_pages):
                path = (*path, self._page_kind(node, page))
                expected = self.model.pages[path]
                assert node.key_of(page) == self.model.key(path)
                assert (bool(node.stored[page]), node.last_access) == (expected.stored, expected.last_access)
                columns.append((path, int(node.device[page]), int(node.host[page])))
            ends[node] = path
        return columns

    def _page_kind(self, node: Node, page: int) -> tuple[bytes, int]:
        tokens = node.tokens[page * STRIDE : (page + 1) * STRIDE]
        content = tokens[-TOKEN_BYTES]
        assert tokens == page_tokens(content)
        return (b"" if page else node.extra, content)

    def _check_pool(
        self, pages: SimulatedPool, paths: tuple[Path, ...], slots: tuple[int, ...], is_there: list[bool]
    ) -> None:
        there = [(path, slot) for path, slot in zip(paths, slots, strict=True) if slot != NO_SLOT]
        assert [slot != NO_SLOT for slot in slots] == is_there
        used = slot_array([slot for _, slot in there])
        assert pages.read(used) == [path for path, _ in there], "a slot contains another page"
        assert pages.pool.is_held(used).tolist() == [pages.holds[path] > 0 for path, _ in there]
        assert pages.pool.num_held == np.count_nonzero(pages.pool.is_held(used))
