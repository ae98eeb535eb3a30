"""Which pieces a transfer between two pools is made of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.index.pool import slot_array
from kvtier.tiers.slot_copies import Pieces, batches_of, pieces_of

NUM_SLOTS = 40


def rows(pieces: Pieces) -> list[tuple[int, int, int]]:
    return list(zip(*(part.tolist() for part in pieces), strict=True))


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Device and host slots, with runs of neighbours among them."""
    slots = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=NUM_SLOTS)
    device, host = draw(slots), draw(slots)
    count = min(len(device), len(host))
    if draw(st.booleans()):
        first = draw(st.integers(0, NUM_SLOTS - count))
        host = list(range(first, first + count))
        device = sorted(device[:count])
    return device[:count], host[:count]


@given(transfers(), st.integers(1, 50), st.integers(1, 400))
def test_pieces_copy_exactly_the_bytes_of_the_pages(
    transfer: tuple[list[int], list[int]], page_bytes: int, boundary_bytes: int
) -> None:
    device_slots, host_slots = transfer
    device = np.arange(1, NUM_SLOTS * page_bytes + 1)
    expected = np.zeros((NUM_SLOTS, page_bytes), dtype=np.int64)
    expected[host_slots] = device.reshape(NUM_SLOTS, page_bytes)[device_slots]

    host = np.zeros(NUM_SLOTS * page_bytes, dtype=np.int64)
    pieces = pieces_of(slot_array(device_slots), slot_array(host_slots), page_bytes, boundary_bytes)
    for device_offset, host_offset, num_bytes in rows(pieces):
        assert num_bytes > 0
        assert host_offset // boundary_bytes == (host_offset + num_bytes - 1) // boundary_bytes
        assert not host[host_offset : host_offset + num_bytes].any(), "copied twice"
        host[host_offset : host_offset + num_bytes] = device[device_offset : device_offset + num_bytes]
    assert np.array_equal(host.reshape(NUM_SLOTS, page_bytes), expected)


@given(transfers(), st.integers(1, 50), st.integers(1, 100), st.integers(1, 400))
def test_batches_are_the_pieces_in_order_and_bounded(
    transfer: tuple[list[int], list[int]], page_bytes: int, first_bytes: int, most_bytes: int
) -> None:
    pieces = pieces_of(slot_array(transfer[0]), slot_array(transfer[1]), page_bytes, 10**9)
    batches = list(batches_of(pieces, first_bytes, most_bytes))
    assert [row for batch in batches for row in rows(batch)] == rows(pieces)
    for number, batch in enumerate(batches):
        assert batch.num_bytes.size
        assert batch.num_bytes[:-1].sum() < (first_bytes if number == 0 else most_bytes)


def test_batches_grow_from_the_first() -> None:
    pieces = pieces_of(slot_array(range(0, 60, 2)), slot_array(range(0, 60, 2)), 10, 10**9)
    assert [len(rows(batch)) for batch in batches_of(pieces, 20, 80)] == [2, 4, 8, 8, 8]


def test_neighbours_in_both_pools_are_one_piece() -> None:
    def pieces(device: list[int], host: list[int], boundary_bytes: int = 10**6) -> list[tuple[int, int, int]]:
        return rows(pieces_of(slot_array(device), slot_array(host), 100, boundary_bytes))

    assert pieces([], []) == []
    assert pieces([3, 4, 5], [7, 8, 9]) == [(300, 700, 300)]
    assert pieces([5, 3, 4], [9, 7, 8]) == [(300, 700, 300)]  # in whatever order they are named
    assert pieces([3, 4, 5], [7, 9, 10]) == [(300, 700, 100), (400, 900, 200)]
    assert pieces([3, 4], [8, 7]) == [(400, 700, 100), (300, 800, 100)]
    assert pieces([0, 1, 2], [1, 2, 3], boundary_bytes=250) == [(0, 100, 150), (150, 250, 150)]
