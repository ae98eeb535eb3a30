"""Slot pools: the free list, holds, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.index import NO_SLOT, SlotPool
from kvtier.index.pool import slot_array


def test_slots_are_handed_out_once_and_the_last_freed_first() -> None:
    pool = SlotPool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert (pool.num_free, pool.allocated().tolist()) == (1, [0, 1, 2])
    pool.free(slot_array([1]))
    assert pool.allocate(2).tolist() == [1, 3]
    assert (pool.num_free, pool.allocate(0).size) == (0, 0)
    pool.check_integrity()


def test_an_allocation_beyond_what_is_free_changes_nothing() -> None:
    pool = SlotPool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match="2 slots asked, 1 free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="-1 slots asked"):
        pool.allocate(-1)
    assert pool.num_free == 1
    pool.check_integrity()


def test_holds_are_counted() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(3)
    pool.hold(slots)
    pool.hold(slots[1:])
    pool.release(slots[:2])
    assert pool.is_held(slots).tolist() == [False, True, True]
    assert pool.num_held == 2
    pool.release(slots[1:])
    assert pool.is_held(slots).tolist() == [False, False, True]
    pool.free(slots[:2])
    assert pool.num_free == 3


def test_a_held_slot_and_a_free_slot_cannot_be_freed() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(2)
    pool.hold(slots[1:])
    with pytest.raises(ValueError, match=r"slots \[1\] are free already, or held"):
        pool.free(slots)
    with pytest.raises(ValueError, match=r"slots \[3\] are free already"):
        pool.free(slot_array([3]))
    assert (pool.num_free, pool.num_held) == (2, 1)
    pool.check_integrity()


def test_a_free_slot_cannot_be_held_nor_a_slot_released_too_often() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(1)
    with pytest.raises(ValueError, match=r"slots \[2\] are free and cannot be held"):
        pool.hold(slot_array([0, 2]))
    assert pool.num_held == 0
    with pytest.raises(ValueError, match=r"slots \[0\] have no hold to release"):
        pool.release(slots)


def test_no_slot_is_refused_like_a_free_slot() -> None:
    pool = SlotPool(3)
    slots = pool.allocate(3)
    nowhere = slot_array([NO_SLOT])
    for operation in (pool.hold, pool.release, pool.free):
        with pytest.raises(ValueError, match=r"slots \[-1\]"):
            operation(nowhere)
    assert pool.is_held(nowhere).tolist() == [False]
    assert (pool.num_held, pool.num_free, pool.allocated().tolist()) == (0, 0, slots.tolist())
    pool.check_integrity()


def test_integrity_check_finds_a_slot_that_is_on_the_free_list_twice() -> None:
    pool = SlotPool(4)
    pool.check_integrity()
    pool._stack[0] = pool._stack[1]
    with pytest.raises(AssertionError, match="on the free list twice"):
        pool.check_integrity()


def test_slot_arrays_are_flat_int32() -> None:
    slots = slot_array([[3, 1], [2, 0]])
    assert (slots.tolist(), slots.dtype) == ([3, 1, 2, 0], np.dtype(np.int32))
    assert slot_array([]).shape == (0,)


def test_a_pool_grows_with_all_that_it_has_in_place() -> None:
    pool = SlotPool(4)
    held = pool.allocate(2)
    pool.hold(held)
    pool.grow(4)
    assert (pool.num_slots, pool.num_free) == (4, 2)
    pool.grow(9)
    assert (pool.num_slots, pool.num_free, pool.num_held) == (9, 7, 2)
    pool.check_integrity()
    with pytest.raises(ValueError, match="are free and cannot be held"):
        pool.hold(np.array([NO_SLOT]))
    others = pool.allocate(7)
    assert sorted([*held, *others]) == list(range(9))
    pool.check_integrity()
