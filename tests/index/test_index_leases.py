"""Leases and pins: what they hold and own, when that ends, and what they refuse."""

from __future__ import annotations

import pytest
from index_helpers import commit, compute, fill, find, new_index, reserve, root, spill
from plain_model import tokens_of

from kvtier.errors import InvalidRequestError, LeaseUnknownError
from kvtier.index.leases import PIN_SESSION
from kvtier.index.pool import slot_array


def test_a_lease_belongs_to_its_session() -> None:
    index = new_index()
    lease = index.leases.open(1, "a", root(index.tree), [])
    other = index.leases.open(2, "a", root(index.tree), [])
    assert lease.lease_id != other.lease_id
    assert index.leases.get(lease.lease_id, 1) is lease
    with pytest.raises(LeaseUnknownError, match=f"lease {lease.lease_id} is not one of this session's"):
        index.leases.get(lease.lease_id, 2)
    with pytest.raises(LeaseUnknownError, match="lease 99"):
        index.leases.get(99, 1)


def test_a_released_lease_is_unknown_and_its_id_never_used_again() -> None:
    index = new_index()
    lease = index.leases.open(1, "a", root(index.tree), [])
    index.leases.release(lease)
    assert (lease.released, len(index.leases)) == (True, 0)
    with pytest.raises(LeaseUnknownError):
        index.leases.get(lease.lease_id, 1)
    assert index.leases.open(1, "a", root(index.tree), []).lease_id > lease.lease_id


def test_only_reserved_pages_may_be_committed_and_each_once() -> None:
    index = new_index()
    lease, other = (index.leases.open(session, "a", root(index.tree), []) for session in (1, 2))
    slots, others = reserve(index, lease, 3), reserve(index, other, 1)
    lease.check_reserved(slots)
    lease.check_reserved(slot_array([]))
    with pytest.raises(InvalidRequestError, match="pages names a page twice"):
        lease.check_reserved(slots[[0, 1, 0]])
    with pytest.raises(InvalidRequestError, match=rf"pages \[{others[0]}\] are not reserved by lease {lease.lease_id}"):
        lease.check_reserved(slot_array([*slots, *others]))
    with pytest.raises(InvalidRequestError, match=r"pages \[-1, 23, 24\] are not reserved"):
        lease.check_reserved(slot_array([24, 23, -1]))
    commit(index, lease, slots[:1], [1])
    with pytest.raises(InvalidRequestError, match=rf"pages \[{slots[0]}\] are not reserved"):
        lease.check_reserved(slots)


def test_a_release_frees_what_the_lease_owns_and_unholds_the_rest() -> None:
    index = new_index()
    other = compute(index, [1, 2])
    lease = index.leases.open(2, "a", root(index.tree), [])
    slots = reserve(index, lease, 5)
    assert commit(index, lease, slots[:3], [1, 2, 3]) == 2
    assert index.device.num_free == 24 - 2 - 5
    assert index.leases.num_owned == 4
    assert sorted(index.leases.owned_slots().tolist()) == sorted(slots[[0, 1, 3, 4]].tolist())
    index.leases.release(lease)
    assert index.device.num_free == 24 - 3
    assert index.leases.owned_slots().size == index.leases.num_owned == 0
    assert index.device.is_held(find(index.tree, [1, 2, 3]).device_slots()).tolist() == [True, True, False]
    index.leases.release(other)
    assert index.device.num_held == 0
    index.check_integrity()


def test_a_page_of_two_leases_stays_held_until_both_are_gone() -> None:
    index = new_index()
    slots = fill(index, [1, 2])
    one, two = compute(index, [1, 2]), compute(index, [1], session=2)
    index.leases.release(one)
    assert index.device.is_held(slots).tolist() == [True, False]
    index.leases.release(two)
    assert index.device.is_held(slots).tolist() == [False, False]


def test_further_pages_can_be_held() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3])
    lease = compute(index, [1])
    index.leases.hold(lease, slots[1:])
    assert spill(index, 24) == []
    index.leases.release(lease)
    assert index.device.num_held == 0


def test_a_lease_holds_what_is_on_the_device_by_now() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3, 4])
    spill(index, 2)
    start = root(index.tree)
    lease = index.leases.open(1, "a", start, [])
    tokens = tokens_of(1, 2, 3, 4, 5)
    match, num_device = index.hold_device_prefix(lease, start, tokens, {})
    assert (match.num_pages, num_device, lease.end.depth) == (4, 2, 2)
    assert [held.tolist() for held in lease.held] == [slots[:2].tolist()]
    assert index.hold_device_prefix(lease, start, tokens, {})[1] == 2
    assert (len(lease.held), index.device.num_held) == (1, 2)
    promoted = index.device.allocate(1)
    index.publish(lease.end, tokens_of(3), index.run(match.end, 2).keys[:1], {}, device=promoted)
    assert index.hold_device_prefix(lease, start, tokens, {})[1] == 3
    assert [held.tolist() for held in lease.held] == [slots[:2].tolist(), promoted.tolist()]
    assert lease.end.depth == 3
    index.check_integrity()
    index.leases.release(lease)
    assert index.device.num_held == 0


def test_pages_of_a_lost_session_are_free_only_after_the_grace_time() -> None:
    index = new_index()
    lost, other_lost = compute(index, [1, 2]), compute(index, [8])
    kept = compute(index, [1, 2], session=2)
    reserve(index, lost, 3)
    reserve(index, other_lost, 2)
    reserve(index, kept, 1)
    assert index.leases.lose(1, free_at=10.0) == 2
    assert (lost.released, other_lost.released, kept.released, len(index.leases)) == (True, True, False, 1)
    # What they only read is free to go at once, what they may still write is not.
    assert index.device.is_held(find(index.tree, [1, 2]).device_slots()).all()
    assert not index.device.is_held(find(index.tree, [8]).device_slots()).any()
    assert index.device.num_free == 24 - 3 - 6
    index.check_integrity()
    index.leases.sweep(9.9)
    assert index.device.num_free == 24 - 3 - 6
    index.leases.sweep(10.0)
    assert index.device.num_free == 24 - 3 - 1
    index.leases.sweep(11.0)
    assert index.device.num_free == 24 - 3 - 1
    assert index.leases.lose(1, free_at=12.0) == 0
    index.check_integrity()


def test_duplicates_of_a_lost_session_are_quarantined_too() -> None:
    index = new_index()
    compute(index, [1, 2], session=2)
    lost = index.leases.open(1, "a", root(index.tree), [])
    slots = reserve(index, lost, 2)
    commit(index, lost, slots, [1, 2])
    index.leases.lose(1, free_at=5.0)
    assert sorted(index.leases.owned_slots().tolist()) == slots.tolist()
    assert (index.device.num_free, index.device.num_held, index.leases.num_owned) == (20, 2, 2)
    index.leases.sweep(5.0)
    assert (index.device.num_free, index.leases.owned_slots().size) == (22, 0)


def test_quarantines_end_each_at_its_own_time() -> None:
    index = new_index()
    for session, free_at in ((1, 10.0), (2, 20.0)):
        reserve(index, index.leases.open(session, "a", root(index.tree), []), 2)
        index.leases.lose(session, free_at)
    index.leases.sweep(15.0)
    assert index.device.num_free == 22
    index.check_integrity()
    index.leases.sweep(20.0)
    assert index.device.num_free == 24


def test_a_pin_keeps_its_pages_until_it_runs_out() -> None:
    index = new_index()
    slots = fill(index, [1, 2, 3])
    pin = compute(index, [1, 2], session=PIN_SESSION)
    pin.expires_at = 30.0
    lease = compute(index, [8])
    index.leases.sweep(29.9)
    assert spill(index, 24) == [slots[2:].tolist()]
    assert not pin.released
    index.leases.sweep(30.0)
    assert (pin.released, lease.released, len(index.leases)) == (True, False, 1)
    assert spill(index, 24) == [slots[:2].tolist()]
    index.check_integrity()
