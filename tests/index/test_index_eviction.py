"""Which pages leave the device and host memory, in which order, and which never do."""

from __future__ import annotations

import numpy as np
from index_helpers import compute, fill, find, new_index, reserve, spill
from plain_model import PAGE_SIZE, tokens_of

from kvtier.index import NO_SLOT, Cursor, PageIndex, PageRun
from kvtier.pages.chain import chain_keys


def take(index: PageIndex, count: int) -> list[list[int]]:
    """Device slots of victims by run; they stay on the device and are not held afterwards."""
    runs = index.take_device_victims(count)
    for run in runs:
        index.device.release(run.device)
    return [run.device.tolist() for run in runs]


def mirror(index: PageIndex, contents: list[int], first_page: int = 0) -> PageRun:
    """Gives pages of a sequence that are on the device a host copy."""
    run = index.run(find(index.tree, contents).end, first_page)
    index.host.free(index.set_host(run, index.host.allocate(run.num_pages)))
    return run


def on_host(index: PageIndex, contents: list[int]) -> list[bool]:
    return (find(index.tree, contents).host_slots() != NO_SLOT).tolist()


# --- which pages leave the device ------------------------------------------------------------------------------------


def test_leaves_go_before_what_they_hang_on() -> None:
    index = new_index()
    left, right = fill(index, [1, 2, 3, 4]), fill(index, [1, 2, 8, 9])
    assert take(index, 24) == [left[2:].tolist(), right[2:].tolist()]
    assert spill(index, 24) == [left[2:].tolist(), right[2:].tolist()]
    assert spill(index, 24) == [left[:2].tolist()]
    assert spill(index, 24) == []
    assert index.device.num_free == 24
    index.check_integrity()


def test_the_least_recently_used_goes_first_from_its_end() -> None:
    index = new_index()
    one, two, three = fill(index, [1, 1, 1]), fill(index, [2, 2, 2]), fill(index, [3, 3, 3])
    index.touch(find(index.tree, [1, 1, 1]).end)
    assert take(index, 4) == [two.tolist(), three[2:].tolist()]
    assert take(index, 2) == [two[1:].tolist()]
    index.touch(find(index.tree, [2, 2, 2]).end)
    assert take(index, 9) == [three.tolist(), one.tolist(), two.tolist()]
    index.check_integrity()


def test_a_prompt_that_used_a_prefix_protects_that_prefix_alone() -> None:
    index = new_index()
    one, two = fill(index, [1, 2, 3, 4]), fill(index, [8, 9])
    index.touch(find(index.tree, [1, 2, 7]).end)
    assert spill(index, 4) == [one[2:].tolist(), two.tolist()]
    assert spill(index, 1) == [one[1:2].tolist()]
    index.check_integrity()


def test_a_leased_page_never_goes_and_a_longer_unleased_tail_does() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4])
    lease = compute(index, [1, 2])
    assert take(index, 24) == [slots[2:].tolist()]
    assert spill(index, 24) == [slots[2:].tolist()]
    assert take(index, 24) == []
    index.leases.release(lease)
    assert take(index, 24) == [slots[:2].tolist()]


def test_a_page_with_a_leased_page_behind_it_stays_too() -> None:
    index = new_index()
    fill(index, [1, 2, 3])
    held = find(index.tree, [1, 2, 3]).device_slots()[2:]
    index.device.hold(held)
    assert take(index, 24) == []


def test_reserved_pages_are_no_victims() -> None:
    index = new_index()
    lease = compute(index, [1])
    reserve(index, lease, 5)
    assert take(index, 24) == []
    assert index.device.num_free == 18
    index.check_integrity()


def test_taken_victims_are_held_until_their_transfer_ends() -> None:
    index = new_index()
    one, two = fill(index, [1, 1]), fill(index, [2, 2])
    (run,) = index.take_device_victims(2)
    assert index.device.is_held(one).tolist() == [True, True]
    assert take(index, 24) == [two.tolist()]
    index.device.release(run.device)
    assert take(index, 24) == [one.tolist(), two.tolist()]


# --- how they leave it -----------------------------------------------------------------------------------------------


def test_spilled_pages_are_found_in_host_memory() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4])
    (run,) = index.take_device_victims(2)
    host = index.host.allocate(2)
    assert index.set_host(run, host).tolist() == []
    index.device.release(run.device)
    assert index.drop_device(run) == 2
    match = find(index.tree, [1, 2, 3, 4])
    assert match.device_slots().tolist() == [*slots[:2].tolist(), NO_SLOT, NO_SLOT]
    assert match.host_slots().tolist() == [NO_SLOT, NO_SLOT, *host.tolist()]
    assert index.device.num_free == 22
    index.check_integrity()


def test_pages_without_a_copy_leave_the_tree() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    (run,) = index.take_device_victims(2)
    index.device.release(run.device)
    assert index.drop_device(run) == 2
    assert (find(index.tree, [1, 2, 3, 4]).num_pages, index.tree.num_pages, index.device.num_free) == (2, 2, 22)
    index.check_integrity()


def test_of_a_run_with_copies_of_its_first_pages_the_rest_leaves_the_tree() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    (run,) = index.take_device_victims(4)
    index.set_host(run, index.host.allocate(2))
    index.device.release(run.device)
    assert index.drop_device(run) == 4
    assert (find(index.tree, [1, 2, 3, 4]).num_pages, on_host(index, [1, 2])) == (2, [True, True])
    assert index.device.num_free == 24
    index.check_integrity()


def test_a_page_without_a_copy_stays_while_pages_behind_it_are_in_host_memory() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4, 5])
    spill(index, 1)
    mirror(index, [1, 2, 3, 4], first_page=2)
    (run,) = index.take_device_victims(4)
    index.device.release(run.device)
    assert index.drop_device(run) == 2
    assert find(index.tree, [1, 2, 3, 4, 5]).device_slots().tolist() == [*slots[:2].tolist(), *[NO_SLOT] * 3]
    assert find(index.tree, [1, 2, 3, 4, 5]).num_pages == 5
    index.check_integrity()


def test_a_drop_stops_at_a_page_that_was_leased_meanwhile() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4])
    (run,) = index.take_device_victims(4)
    lease = compute(index, [1, 2])
    index.device.release(run.device)
    assert index.drop_device(run) == 2
    assert find(index.tree, [1, 2, 3, 4]).device_slots().tolist() == slots[:2].tolist()
    index.leases.release(lease)
    index.check_integrity()


def test_nothing_is_dropped_when_a_page_was_committed_behind_the_run_meanwhile() -> None:
    index = new_index()
    slots = fill(index, [1, 2])
    (run,) = index.take_device_victims(2)
    fill(index, [1, 2, 3])
    index.device.release(run.device)
    assert index.drop_device(run) == 0
    assert find(index.tree, [1, 2, 3]).device_slots().tolist()[:2] == slots.tolist()
    fill(index, [1, 8])
    assert index.drop_device(run) == 0
    index.check_integrity()


def test_a_drop_goes_on_above_a_node_that_was_cut_meanwhile() -> None:
    index = new_index()
    fill(index, [1, 2, 3, 4])
    (run,) = index.take_device_victims(4)
    index.touch(find(index.tree, [1, 2]).end)
    index.set_host(run, index.host.allocate(3))
    index.device.release(run.device)
    assert index.tree.num_nodes == 2
    assert index.drop_device(run) == 4
    assert (find(index.tree, [1, 2, 3, 4]).num_pages, index.device.num_free) == (3, 24)
    index.check_integrity()


# --- host memory -----------------------------------------------------------------------------------------------------


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
