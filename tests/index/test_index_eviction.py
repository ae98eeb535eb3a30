"""Which pages leave the device, in which order, and which never do."""

from __future__ import annotations

from index_helpers import compute, fill, find, mirror, new_index, on_host, reserve, spill

from kvtier.index import NO_SLOT, PageIndex

ADAPTER = b"a" * 32


def take(index: PageIndex, count: int) -> list[list[int]]:
    """Device slots of victims by run; they stay on the device and are not held afterwards."""
    runs = index.take_device_victims(count)
    for run in runs:
        index.device.release(run.device)
    return [run.device.tolist() for run in runs]


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
    (run,) = index.take_device_victims(2)
    index.device.release(run.device)
    assert index.drop_device(run) == 0
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


def test_nothing_is_dropped_while_a_branch_behind_the_run_is_on_the_device_or_needs_it() -> None:
    index = new_index()
    fill(index, [1, 2])
    (run,) = index.take_device_victims(2)
    fill(index, [1, 2, 3], {2: ADAPTER})
    mirror(index, [1, 2], first_page=1)
    index.device.release(run.device)
    assert index.drop_device(run) == 0
    spill(index, 1)
    # The branch is in host memory now; the second page has a copy, the first has none and stays.
    assert index.drop_device(run) == 1
    assert find(index.tree, [1, 2, 3], {2: ADAPTER}).num_pages == 3
    index.check_integrity()
