"""What one decode step reads, at addresses that never change: filled on the host, copied to the device as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtier.ops import LEFT_OUT

Long = TypeVar("Long", torch.Tensor, npt.NDArray[np.int64])
Int = TypeVar("Int", torch.Tensor, npt.NDArray[np.int32])


class RowInputs(NamedTuple, Generic[Long, Int]):
    """One entry for each row of a batch.

    Attributes:
        tokens, positions: int64, what the model is called with.
        places: int64, of open pages, where the token's K and V are kept.
        slots: `(rows, tokens)` int64, of the pool, where the row's open page, or its token alone, is quantised to.
        paged_lengths, open_lengths: int32, tokens of the sequence in pages and in its open page, with the new one.
    """

    tokens: Long
    positions: Long
    places: Long
    slots: Long
    paged_lengths: Int
    open_lengths: Int


class FixedInputs:
    """`RowInputs` in host memory, as numpy arrays, and on the device, as tensors."""

    def __init__(self, num_rows: int, slots_a_row: int, unread_place: int, device: torch.device) -> None:
        """`unread_place` is where rows without a sequence keep their token."""
        self._unread_place = unread_place
        num_bytes = num_rows * ((3 + slots_a_row) * 8 + 2 * 4)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        self.on_device: RowInputs[torch.Tensor, torch.Tensor] = RowInputs(*_parts(self._device, num_rows))
        self.on_host: RowInputs[npt.NDArray[np.int64], npt.NDArray[np.int32]] = RowInputs(
            *(part.numpy() for part in _parts(self._host, num_rows))
        )
        self.clear()

    def clear(self) -> None:
        """Leaves no row with a sequence: it writes to no page and attends to nothing."""
        host = self.on_host
        self._host.zero_()
        host.places.fill(self._unread_place)
        host.slots.fill(LEFT_OUT)

    def upload(self) -> None:
        """Queues the copy to the device."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class FixedPageTable:
    """Page numbers `(rows, max_pages)` int32; a row keeps those that it was given until it gets others."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self._host = torch.zeros((num_rows, max_pages), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.on_device = self._host if device.type == "cpu" else self._host.to(device)
        self.on_host: npt.NDArray[np.int32] = self._host.numpy()
        self._known: list[tuple[Items[int], int]] = [((), 0)] * num_rows  # pages of a row, and how many the table has
        self._has_changed = False

    def set(self, row: int, pages: Items[int]) -> None:
        """Gives a row its pages.

        NOTE: the same sequence of numbers may have become longer since it was given last, and nothing else.
        """
        known, count = self._known[row]
        first = count if known is pages else 0
        if len(pages) > first:
            self.on_host[row, first : len(pages)] = pages[first:]
            self._has_changed = True
        self._known[row] = (pages, len(pages))

    def upload(self) -> None:
        """Queues the copy to the device, if anything has changed."""
        if self._has_changed and self.on_device is not self._host:
            self.on_device.copy_(self._host, non_blocking=True)
        self._has_changed = False


def _parts(packed: torch.Tensor, num_rows: int) -> Iterator[torch.Tensor]:
    """The tensors of `RowInputs`, which lie one behind the other in `packed`."""
    int32_bytes = 2 * 4 * num_rows
    tokens, positions, places, *slots = packed[:-int32_bytes].view(torch.int64).view(-1, num_rows)
    yield from (tokens, positions, places)
    yield packed[3 * 8 * num_rows : -int32_bytes].view(torch.int64).view(num_rows, len(slots))
    yield from packed[-int32_bytes:].view(torch.int32).view(2, num_rows)
