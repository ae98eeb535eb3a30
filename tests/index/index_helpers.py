"""Short ways to fill an index in tests: a sequence is a namespace and a list of page contents."""

from __future__ import annotations

from collections.abc import Sequence

from plain_model import PAGE_SIZE, namespace_key, tokens_of

from kvtier.index import NO_SLOT, Cursor, Lease, LruPolicy, Match, PageIndex, PageRun, RadixTree
from kvtier.index.pool import SlotArray
from kvtier.pages.chain import Extras, chain_keys


def new_index(num_device: int = 24, num_host: int = 12) -> PageIndex:
    return PageIndex(PAGE_SIZE, num_device, num_host, LruPolicy())


def root(tree: RadixTree, namespace: str = "a") -> Cursor:
    return tree.root(namespace, namespace_key(namespace))


def add(tree: RadixTree, start: Cursor, contents: Sequence[int], extras: Extras | None = None) -> Cursor:
    """Adds pages behind `start`, the end of a node; returns the cursor behind them."""
    tokens = tokens_of(*contents)
    keys = chain_keys(tree.parent_key(start), tokens, PAGE_SIZE, extras or {}, start.depth)
    segments = tree.extend(start, tokens, keys, extras or {})
    return Cursor(segments[-1].node, start.depth + len(contents))


def find(tree: RadixTree, contents: Sequence[int], extras: Extras | None = None, namespace: str = "a") -> Match:
    """Looks a sequence up from its start."""
    return tree.match(root(tree, namespace), tokens_of(*contents), extras or {})


def reserve(index: PageIndex, lease: Lease, count: int) -> SlotArray:
    slots = index.device.allocate(count)
    lease.reserved.update(slots.tolist())
    return slots


def commit(
    index: PageIndex, lease: Lease, slots: SlotArray, contents: Sequence[int], extras: Extras | None = None
) -> int:
    """Commits pages behind the end of a lease; returns the number of duplicates."""
    tokens = tokens_of(*contents)
    keys = chain_keys(index.tree.parent_key(lease.end), tokens, PAGE_SIZE, extras or {}, lease.end.depth)
    return index.commit(lease, tokens, keys, extras or {}, slots)


def compute(
    index: PageIndex, contents: Sequence[int], extras: Extras | None = None, namespace: str = "a", session: int = 1
) -> Lease:
    """A lease on a sequence: what is known is held (it must be on the device), the rest is reserved and committed."""
    known = find(index.tree, contents, extras, namespace)
    lease = index.leases.open(session, namespace, known.end, [known.device_slots()])
    index.touch(known.end)
    rest = contents[known.num_pages :]
    if rest:
        commit(index, lease, reserve(index, lease, len(rest)), rest, extras)
    return lease


def fill(index: PageIndex, contents: Sequence[int], extras: Extras | None = None, namespace: str = "a") -> SlotArray:
    """Puts a sequence on the device, with nothing that holds it; returns its device slots."""
    index.leases.release(compute(index, contents, extras, namespace))
    return find(index.tree, contents, extras, namespace).device_slots()


def spill(index: PageIndex, count: int) -> list[list[int]]:
    """Moves victims to host memory; returns the device slots of each run."""
    runs = index.take_device_victims(count)
    for run in runs:
        index.host.free(index.set_host(run, index.host.allocate(run.num_pages)))
        index.device.release(run.device)
        assert index.drop_device(run) == run.num_pages
    return [run.device.tolist() for run in runs]


def mirror(index: PageIndex, contents: list[int], first_page: int = 0) -> PageRun:
    """Gives pages of a sequence that are on the device a host copy."""
    run = index.run(find(index.tree, contents).end, first_page)
    index.host.free(index.set_host(run, index.host.allocate(run.num_pages)))
    return run


def on_host(index: PageIndex, contents: list[int]) -> list[bool]:
    """For each page of a sequence, whether it is in host memory."""
    return (find(index.tree, contents).host_slots() != NO_SLOT).tolist()
