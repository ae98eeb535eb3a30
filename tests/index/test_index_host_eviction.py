"""Which pages leave host memory, in which order, and which never do; removal of namespaces."""

from __future__ import annotations

import numpy as np
from index_helpers import compute, fill, find, mirror, new_index, on_host, spill
from plain_model import PAGE_SIZE, tokens_of

from kvtier.index import Cursor
from kvtier.pages.chain import chain_keys

ADAPTER = b"a" * 32


def test_mirrors_of_the_least_recently_used_pages_go_first_from_their_end() -> None:
    index = new_index()
    fill(index, [1, 1, 1])
    fill(index, [2, 2, 2])
    mirror(index, [2, 2, 2])
    mirror(index, [1, 1, 1])
    assert index.drop_mirrors(2) == 2
    assert on_host(index, [1, 1, 1]) == [True, False, False]
    index.touch(find(index.tree, [1, 1, 1]).end)
    assert index.drop_mirrors(3) == 3
    assert (on_host(index, [1, 1, 1]), on_host(index, [2, 2, 2])) == ([True, False, False], [False] * 3)
    assert (index.drop_mirrors(5), index.drop_mirrors(5), index.host.num_free) == (1, 0, 12)
    index.check_integrity()


def test_a_held_mirror_and_a_page_in_host_memory_alone_are_no_mirrors_to_drop() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    spill(index, 1)
    run = mirror(index, [1, 2])
    held = index.run(run.cursor, 1).host
    index.host.hold(held)
    assert index.drop_mirrors(12) == 1
    assert on_host(index, [1, 2, 3]) == [False, True, True]
    index.host.release(held)
    assert index.drop_mirrors(12) == 1
    assert on_host(index, [1, 2, 3]) == [False, False, True]
    index.check_integrity()


def test_pages_in_host_memory_alone_leave_it_from_the_leaves_least_recently_used_first() -> None:
    index = new_index()
    for contents in ([1, 2, 3], [1, 2, 8], [5, 6]):
        fill(index, contents)
    spill(index, 24)
    spill(index, 24)
    index.touch(find(index.tree, [1, 2, 3]).end)
    runs = index.take_host_victims(2)
    assert [run.num_pages for run in runs] == [1, 1]
    slots = [run.host.tolist() for run in runs]
    assert slots == [
        find(index.tree, [1, 2, 8]).host_slots()[2:].tolist(),
        find(index.tree, [5, 6]).host_slots()[1:].tolist(),
    ]
    assert index.host.is_held(np.concatenate([run.host for run in runs])).all()
    for run in runs:
        index.host.release(run.host)
        assert index.drop_host(run) == 1
    assert [find(index.tree, contents).num_pages for contents in ([1, 2, 8], [5, 6], [1, 2, 3])] == [2, 1, 3]
    assert index.host.num_free == 12 - 4
    index.check_integrity()


def test_pages_with_a_copy_on_the_device_are_not_host_victims() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    spill(index, 2)
    mirror(index, [1, 2])
    (run,) = index.take_host_victims(12)
    assert (run.first_page, run.num_pages) == (2, 2)
    index.host.release(run.host)
    assert index.drop_host(run) == 2
    assert find(index.tree, [1, 2, 3, 4]).num_pages == 2
    assert index.take_host_victims(12) == []
    index.check_integrity()


def test_held_pages_and_taken_victims_stay_in_host_memory() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    fill(index, [8, 9])
    spill(index, 5)
    one, two = find(index.tree, [1, 2, 3]).host_slots(), find(index.tree, [8, 9]).host_slots()
    index.host.hold(one[1:2])
    runs = index.take_host_victims(12)
    assert [run.host.tolist() for run in runs] == [one[2:].tolist(), two.tolist()]
    assert index.take_host_victims(12) == []
    for run in runs:
        index.host.release(run.host)
    assert [run.host.tolist() for run in index.take_host_victims(2)] == [one[2:].tolist(), two[1:].tolist()]


def test_a_host_victim_with_a_branch_behind_it_by_now_stays() -> None:
    index = new_index()
    fill(index, [1, 2])
    spill(index, 2)
    (run,) = index.take_host_victims(2)
    keys = chain_keys(run.keys[-1], tokens_of(3), PAGE_SIZE, {2: ADAPTER}, 2)
    index.publish(run.cursor, tokens_of(3), keys, {2: ADAPTER}, host=index.host.allocate(1))
    index.host.release(run.host)
    assert index.drop_host(run) == 0
    assert find(index.tree, [1, 2, 3], {2: ADAPTER}).num_pages == 3
    index.check_integrity()


def test_a_host_victim_that_was_promoted_meanwhile_stays() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    spill(index, 2)
    (run,) = index.take_host_victims(2)
    slots = index.device.allocate(1)
    index.publish(Cursor(run.cursor.node, 1), tokens_of(2), run.keys[:1], {}, device=slots)
    index.host.release(run.host)
    assert index.drop_host(run) == 1
    match = find(index.tree, [1, 2, 3])
    assert (match.num_pages, match.device_slots()[1], on_host(index, [1, 2])) == (2, slots[0], [False, True])
    index.check_integrity()


def test_a_host_victim_that_is_held_or_followed_by_a_new_page_stays() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    spill(index, 3)
    (run,) = index.take_host_victims(3)
    index.host.release(run.host[2:])
    assert index.drop_host(run) == 1
    index.host.release(run.host[:2])
    known = find(index.tree, [1, 2])
    run = index.run(known.end, 0)
    keys = chain_keys(index.tree.parent_key(known.end), tokens_of(8), PAGE_SIZE, {})
    index.publish(known.end, tokens_of(8), keys, {}, host=index.host.allocate(1))
    assert index.drop_host(run) == 0
    assert on_host(index, [1, 2, 8]) == [True] * 3
    index.check_integrity()


# --- namespaces ------------------------------------------------------------------------------------------------------


def test_a_removed_namespace_is_gone_from_both_pools_and_no_other_is_touched() -> None:
    index = new_index()
    for contents in ([1, 2, 3], [1, 2, 8], [5]):
        fill(index, contents)
    fill(index, [1, 2, 3], namespace="b")
    mirror(index, [1, 2])
    spill(index, 1)
    assert index.remove_namespace("a") == (4, 3, 0)
    assert find(index.tree, [1]).num_pages == find(index.tree, [5]).num_pages == 0
    assert find(index.tree, [1, 2, 3], namespace="b").num_pages == 3
    assert (index.device.num_free, index.host.num_free, index.tree.num_pages) == (21, 12, 3)
    assert index.remove_namespace("a") == index.remove_namespace("nobody") == (0, 0, 0)
    index.check_integrity()


def test_held_pages_of_a_removed_namespace_stay_with_those_before_them() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    fill(index, [1, 2, 8, 9])
    spill(index, 2)
    lease = compute(index, [1, 2, 8])
    held = find(index.tree, [1, 2, 3]).host_slots()[2:]
    index.host.hold(held)
    assert index.remove_namespace("a") == (1, 1, 4)
    assert [find(index.tree, [1, 2, *rest]).num_pages for rest in ([3, 4], [8, 9])] == [3, 3]
    index.check_integrity()
    index.host.release(held)
    index.leases.release(lease)
    assert index.remove_namespace("a") == (3, 1, 0)
    assert (index.device.num_free, index.host.num_free, index.tree.num_nodes) == (24, 12, 0)
    index.check_integrity()


def test_a_held_page_of_a_removed_namespace_keeps_the_node_it_hangs_on() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    fill(index, [1, 2, 8])
    spill(index, 2)
    index.host.hold(find(index.tree, [1, 2, 8]).host_slots()[2:])
    assert index.remove_namespace("a") == (0, 1, 3)
    assert [find(index.tree, [1, 2, page]).num_pages for page in (3, 8)] == [2, 3]
    index.check_integrity()


def test_everything_can_be_evicted_once_nothing_holds_it() -> None:
    index = new_index()
    for contents in ([1, 2, 3], [1, 2, 8], [5, 6], [1]):
        fill(index, contents)
    while spill(index, 3):
        pass
    while runs := index.take_host_victims(3):
        for run in runs:
            index.host.release(run.host)
            index.drop_host(run)
    assert (index.device.num_free, index.host.num_free, index.tree.num_nodes) == (24, 12, 0)
    index.check_integrity()
