"""Committing and publishing pages: which slots the tree takes, duplicates, recency."""

from __future__ import annotations

import numpy as np
import pytest
from index_helpers import commit, compute, fill, find, new_index, reserve, root, spill
from plain_model import PAGE_SIZE, namespace_key, tokens_of

from kvtier.index import NO_SLOT, Cursor, PageIndex
from kvtier.index.pool import SlotArray, slot_array
from kvtier.pages.chain import chain_keys

ADAPTER = b"a" * 32


def publish_on_host(
    index: PageIndex, start: Cursor, contents: list[int], slots: SlotArray
) -> tuple[list[bool], Cursor]:
    """Publishes pages that came from Redis; returns which slots were taken, and the end."""
    tokens = tokens_of(*contents)
    keys = chain_keys(index.tree.parent_key(start), tokens, PAGE_SIZE, {}, start.depth)
    published = index.publish(start, tokens, keys, {}, host=slots, stored=True)
    index.host.free(slots[~published.taken])
    return published.taken.tolist(), published.end


# --- commit ----------------------------------------------------------------------------------------------------------


def test_committed_pages_are_found_with_the_slots_they_were_written_to() -> None:
    index = new_index()
    lease = index.leases.open(1, "a", root(index.tree), [])
    slots = reserve(index, lease, 4)
    assert commit(index, lease, slots[[2, 0, 3]], [1, 2, 3]) == 0
    match = find(index.tree, [1, 2, 3, 4])
    assert match.device_slots().tolist() == slots[[2, 0, 3]].tolist()
    assert match.host_slots().tolist() == [NO_SLOT] * 3
    assert (lease.reserved, lease.duplicates, lease.end.depth) == ({int(slots[1])}, [], 3)
    index.check_integrity()


def test_pages_committed_one_by_one_stay_in_one_node() -> None:
    index = new_index()
    lease = index.leases.open(1, "a", root(index.tree), [])
    slots = reserve(index, lease, 5)
    for page in range(5):
        commit(index, lease, slots[page : page + 1], [page])
    match = find(index.tree, [0, 1, 2, 3, 4])
    assert (index.tree.num_nodes, len(match.segments), match.device_slots().tolist()) == (1, 1, slots.tolist())
    assert (index.device.num_held, lease.end.depth) == (5, 5)
    index.check_integrity()


def test_of_two_leases_with_the_same_tokens_the_second_keeps_duplicates() -> None:
    index = new_index()
    one, two = (index.leases.open(session, "a", root(index.tree), []) for session in (1, 2))
    ours, theirs = reserve(index, one, 2), reserve(index, two, 3)
    assert commit(index, one, ours, [1, 2]) == 0
    assert commit(index, two, theirs, [1, 2, 3]) == 2
    assert find(index.tree, [1, 2, 3]).device_slots().tolist() == [*ours.tolist(), int(theirs[2])]
    assert (two.duplicates, two.reserved, two.end.depth) == (theirs[:2].tolist(), set(), 3)
    index.check_integrity()
    index.leases.release(one)
    # The second lease holds the tree's pages, though it reads its own copies.
    assert index.device.is_held(ours).tolist() == [True, True]
    assert index.take_device_victims(3) == []
    index.leases.release(two)
    assert index.device.num_free == 24 - 3
    index.check_integrity()


def test_a_commit_in_the_middle_of_a_run_branches_there() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    compute(index, [1, 2, 8, 9])
    assert [find(index.tree, [1, 2, *rest]).num_pages for rest in ([3, 4], [8, 9], [8, 4])] == [4, 4, 3]
    assert index.tree.num_nodes == 3
    index.check_integrity()


def test_a_commit_of_known_and_new_pages_keeps_the_known_ones_and_branches() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4])
    lease = index.leases.open(1, "a", root(index.tree), [])
    own = reserve(index, lease, 3)
    assert commit(index, lease, own, [1, 2, 8]) == 2
    assert find(index.tree, [1, 2, 8]).device_slots().tolist() == [*slots[:2].tolist(), int(own[2])]
    assert find(index.tree, [1, 2, 3, 4]).device_slots().tolist() == slots.tolist()
    assert index.device.is_held(slots).tolist() == [True, True, False, False]
    index.check_integrity()


def test_a_commit_behind_the_end_of_two_leases_branches_there() -> None:
    index = new_index()
    one, two = compute(index, [1, 2]), compute(index, [1, 2], session=2)
    commit(index, one, reserve(index, one, 2), [3, 4])
    commit(index, two, reserve(index, two, 1), [8])
    assert [find(index.tree, [1, 2, *rest]).num_pages for rest in ([3, 4], [8])] == [4, 3]
    index.check_integrity()


def test_pages_that_are_in_host_memory_alone_get_the_device_slots_of_a_commit() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    spill(index, 2)
    lease = index.leases.open(1, "a", Cursor(find(index.tree, [1]).end.node, 1), [find(index.tree, [1]).device_slots()])
    slots = reserve(index, lease, 1)
    assert commit(index, lease, slots, [2]) == 0
    match = find(index.tree, [1, 2, 3])
    assert match.device_slots().tolist()[1:] == [int(slots[0]), NO_SLOT]
    assert (match.host_slots() != NO_SLOT).tolist() == [False, True, True]
    index.check_integrity()


def test_commits_with_extra_keys_stay_apart() -> None:
    index = new_index()
    plain, adapted = fill(index, [1, 2, 3]), fill(index, [1, 2, 3], {1: ADAPTER})
    assert find(index.tree, [1, 2, 3]).device_slots().tolist() == plain.tolist()
    assert find(index.tree, [1, 2, 3], {1: ADAPTER}).device_slots().tolist() == adapted.tolist()
    assert (plain[0] == adapted[0], set(plain[1:].tolist()) & set(adapted[1:].tolist())) == (True, set())
    index.check_integrity()


# --- publish ---------------------------------------------------------------------------------------------------------


def test_promoted_pages_take_device_slots_and_keep_their_host_slots() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    spill(index, 3)
    known = find(index.tree, [1, 2, 3, 4])
    host = known.host_slots()
    slots = index.device.allocate(2)
    start = Cursor(known.end.node, 1)
    keys = index.run(Cursor(known.end.node, 3), 1).keys
    published = index.publish(start, tokens_of(2, 3), keys, {}, device=slots)
    assert (published.taken.tolist(), published.end.depth) == ([True, True], 3)
    match = find(index.tree, [1, 2, 3, 4])
    assert match.device_slots().tolist()[1:] == [*slots.tolist(), NO_SLOT]
    assert match.host_slots().tolist() == host.tolist()
    index.check_integrity()
    again = index.publish(start, tokens_of(2), keys[:1], {}, device=index.device.allocate(1))
    assert again.taken.tolist() == [False]
    assert find(index.tree, [1, 2]).device_slots().tolist() == match.device_slots().tolist()[:2]


def test_fetched_pages_arrive_in_host_memory_behind_what_is_known() -> None:
    index = new_index()
    fill(index, [1, 2])
    slots = index.host.allocate(3)
    taken, end = publish_on_host(index, Cursor(find(index.tree, [1, 2]).end.node, 1), [2, 3, 4], slots)
    assert (taken, end.depth) == ([True] * 3, 4)
    match = find(index.tree, [1, 2, 3, 4])
    assert match.host_slots().tolist() == [NO_SLOT, *slots.tolist()]
    assert (match.device_slots() != NO_SLOT).tolist() == [True, True, False, False]
    assert index.run(end, 0).stored.tolist() == [False, True, True, True]
    index.check_integrity()
    assert publish_on_host(index, Cursor(end.node, 2), [3, 4], index.host.allocate(2))[0] == [False, False]
    assert find(index.tree, [1, 2, 3, 4]).host_slots().tolist() == match.host_slots().tolist()
    index.check_integrity()


def test_a_run_tells_slots_keys_and_what_redis_has() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4, 5])
    index.touch(find(index.tree, [1, 2, 3]).end)  # cuts the run
    end = find(index.tree, [1, 2, 3, 4, 5]).end
    run = index.run(Cursor(end.node, 4), 1)
    index.set_host(run, index.host.allocate(2))
    index.set_stored(run, np.array([True, False, True]))
    run = index.run(end, 1)
    assert (run.num_pages, run.first_page, run.namespace) == (4, 1, "a")
    assert run.device.tolist() == slots[1:].tolist()
    assert run.host.tolist() == [0, 1, NO_SLOT, NO_SLOT]
    assert run.stored.tolist() == [True, False, True, False]
    assert run.keys == chain_keys(namespace_key("a"), tokens_of(1, 2, 3, 4, 5), PAGE_SIZE, {})[1:]
    index.set_stored(run, np.array([False, True, False, False]))
    assert index.run(end, 1).stored.tolist() == [False, True, False, False]  # Redis drops pages, too


def test_host_slots_of_pages_that_have_one_are_given_back() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    run = index.run(find(index.tree, [1, 2, 3]).end, 0)
    assert index.set_host(index.run(find(index.tree, [1, 2]).end, 1), slot_array([7])).tolist() == []
    assert index.set_host(run, slot_array([4, 5, 6])).tolist() == [5]
    assert find(index.tree, [1, 2, 3]).host_slots().tolist() == [4, 7, 6]


# --- recency ---------------------------------------------------------------------------------------------------------


def test_a_touch_counts_for_the_path_and_nothing_behind_it() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    assert [(node.num_pages, node.last_access, node.hits) for node in index.tree.nodes()] == [(4, 2, 1)]
    index.touch(find(index.tree, [1, 2]).end)
    assert [(node.num_pages, node.last_access, node.hits) for node in index.tree.nodes()] == [(2, 3, 2), (2, 2, 1)]
    index.touch(find(index.tree, [1, 2, 3, 4]).end)
    assert [(node.num_pages, node.last_access, node.hits) for node in index.tree.nodes()] == [(2, 4, 3), (2, 4, 2)]
    index.touch(root(index.tree))
    assert index.tree.num_nodes == 2
    index.check_integrity()


def test_a_match_read_after_a_touch_still_names_its_own_pages() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4])
    match = find(index.tree, [1, 2])
    index.touch(match.end)
    assert match.device_slots().tolist() == slots[:2].tolist()


# --- integrity -------------------------------------------------------------------------------------------------------


def test_slots_in_transit_must_be_declared() -> None:
    index = new_index()
    device, host = index.device.allocate(2), index.host.allocate(1)
    with pytest.raises(AssertionError, match="a slot has no owner"):
        index.check_integrity(host_in_transit=host)
    with pytest.raises(AssertionError, match="a slot has no owner"):
        index.check_integrity(device_in_transit=device)
    index.check_integrity(device, host)


def test_integrity_check_finds_a_slot_with_two_owners() -> None:
    index = new_index()
    lease = compute(index, [1, 2])
    lease.reserved.add(int(find(index.tree, [1]).device_slots()[0]))
    with pytest.raises(AssertionError, match="a slot has two owners"):
        index.check_integrity()


def test_integrity_check_finds_a_hole_in_the_device_prefix() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    fill(index, [1, 2, 8])
    spill(index, 2)
    child = next(node for node in index.tree.nodes() if node.first_page == 2)
    spill(index, 1)
    child.device[0], child.num_device = index.device.allocate(1)[0], 1
    assert child.parent is not None
    child.parent.device_children += 1
    with pytest.raises(AssertionError, match="the page before it is not"):
        index.check_integrity()


def test_integrity_check_finds_a_leased_page_without_hold() -> None:
    index = new_index()
    compute(index, [1, 2])
    index.device.release(find(index.tree, [1, 2]).device_slots())
    with pytest.raises(AssertionError, match="a leased page is not held"):
        index.check_integrity()
