"""A node of the radix tree: a run of pages, what names them and where they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.index.pool import NO_SLOT, SlotArray
from kvtier.pages.chain import KEY_BYTES


class Node:
    """A run of pages below `parent`. Changed by `RadixTree` and `PageIndex` only."""

    __slots__ = (
        "__weakref__",
        "children",
        "device",
        "device_children",
        "extra",
        "first_page",
        "hits",
        "host",
        "keys",
        "last_access",
        "namespace",
        "num_device",
        "parent",
        "queued_in",
        "stored",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, namespace: str, first_page: int, extra: bytes, tokens: bytes, keys: bytes
    ) -> None:
        num_pages = len(keys) // KEY_BYTES
        self.parent = parent
        self.namespace = namespace
        self.first_page = first_page  # pages of the sequence before this node
        self.extra = extra
        self.tokens = tokens
        self.keys = keys
        self.device: SlotArray = np.full(num_pages, NO_SLOT, dtype=np.int32)
        self.host: SlotArray = np.full(num_pages, NO_SLOT, dtype=np.int32)
        self.stored: npt.NDArray[np.bool_] = np.zeros(num_pages, dtype=np.bool_)
        self.num_device = 0  # leading pages that are on the device
        self.device_children = 0  # children with pages on the device
        self.children: dict[bytes, Node] = {}
        self.last_access = 0
        self.hits = 0
        self.queued_in: set[str] = set()  # names of the victim queues that have an entry for this node

    @property
    def num_pages(self) -> int:
        return self.device.size

    @property
    def end_page(self) -> int:
        """Pages of the sequence up to and with this node."""
        return self.first_page + self.device.size

    def key_of(self, index: int) -> bytes:
        """Chain key of page `index` of this node."""
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    @property
    def ends_on_device(self) -> bool:
        """Whether it has pages on the device and no page on the device hangs on it."""
        return self.num_device > 0 and not self.device_children

    @property
    def ends_on_host(self) -> bool:
        """Whether it has pages in host memory alone and nothing hangs on it."""
        return self.num_device < self.num_pages and not self.children

    @property
    def has_mirror(self) -> bool:
        """Whether a page is both on the device and in host memory."""
        return bool((self.host[: self.num_device] != NO_SLOT).any())

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the pages on the device are a prefix of the path and the counts are right."""
        on_device = self.device != NO_SLOT
        assert self.host.size == self.stored.size == self.num_pages
        assert on_device[: self.num_device].all() and not on_device[self.num_device :].any(), "num_device is off"
        parent = self.parent
        assert parent is not None
        is_whole = parent.parent is None or parent.num_device == parent.num_pages
        assert is_whole or not self.num_device, "a page is on the device, but the page before it is not"
        num_children = sum(child.num_device > 0 for child in self.children.values())
        assert self.device_children == num_children, "the count of children on the device is off"
