"""The radix tree over tokens.

A node is a run of whole pages: its edge label is the tokens of the run, compared as bytes. Children are found by the
digest of extra keys (mostly empty) and the tokens of their first page, so a lookup is one dictionary access and one
memory comparison a node. A page at which extra keys begin always starts a node.

For every page a node knows the chain key, the device and host slot (`NO_SLOT` where it has none) and whether Redis has
it.

NOTE: On every path the pages on the device are a prefix: a page is on the device only if all pages before it are.
`PageIndex` keeps this; eviction works from the leaves and promotion from the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvtier.index.node import Node
from kvtier.index.pool import NO_SLOT, NO_SLOTS, SlotArray
from kvtier.pages.chain import KEY_BYTES, TOKEN_BYTES, Extras

BoolArray = npt.NDArray[np.bool_]


class Cursor(NamedTuple):
    """A position in the tree: behind `depth` pages on the path that leads to `node`.

    It stays valid while nodes are split, extended and trimmed, as long as the pages before it are held:
    `RadixTree.locate` finds the node that has them now.
    """

    node: Node
    depth: int


class Segment(NamedTuple):
    """Pages `start` to `stop` of a node."""

    node: Node
    start: int
    stop: int


class Match(NamedTuple):
    """The known pages behind a cursor: `segments` as they were then, `end` is the cursor behind them."""

    segments: list[Segment]
    num_pages: int
    end: Cursor

    # NOTE: The slots are looked up anew: `segments` name other pages once a node is split, which `touch` does.

    def device_slots(self) -> SlotArray:
        """Device slot of every matched page; those on the device come first."""
        segments = RadixTree.path(self.end, self.end.depth - self.num_pages)
        return np.concatenate([NO_SLOTS, *(node.device[start:stop] for node, start, stop in segments)])

    def host_slots(self) -> SlotArray:
        """Host slot of every matched page."""
        segments = RadixTree.path(self.end, self.end.depth - self.num_pages)
        return np.concatenate([NO_SLOTS, *(node.host[start:stop] for node, start, stop in segments)])


class RadixTree:
    """Runs of pages under one root a namespace. All pages have `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.stride = page_size * TOKEN_BYTES  # bytes of a page's tokens
        self.num_nodes = 0
        self.num_pages = 0
        # NOTE: A root without pages goes with the last cursor on it: prompts may name any number of namespaces.
        self._roots: WeakValueDictionary[str, Node] = WeakValueDictionary()
        self._roots_with_pages: dict[str, Node] = {}

    def root(self, namespace: str, root_key: bytes) -> Cursor:
        """The start of a namespace, new where there is none."""
        node = self._roots.get(namespace)
        if node is None:
            # A root has no pages; its `keys` holds the parent key of the first ones.
            node = Node(None, namespace, 0, b"", b"", b"")
            node.keys = root_key
            self._roots[namespace] = node
        return Cursor(node, 0)

    @staticmethod
    def locate(cursor: Cursor) -> tuple[Node, int]:
        """The node that has the page before `cursor`, and how many of its pages lie before it."""
        node, depth = cursor
        while node.first_page >= depth and node.parent is not None:
            node = node.parent
        return node, depth - node.first_page

    def parent_key(self, cursor: Cursor) -> bytes:
        """Chain key of the page before `cursor`, or the root key."""
        node, offset = self.locate(cursor)
        return node.key_of(offset - 1) if offset else node.keys

    def match(self, cursor: Cursor, tokens: bytes, extras: Extras) -> Match:
        """The longest known run of the whole pages in `tokens` behind `cursor`. Changes nothing."""
        node, offset = self.locate(cursor)
        depth = cursor.depth
        position = 0
        segments: list[Segment] = []
        while position + self.stride <= len(tokens):
            if offset == node.num_pages:
                first_page = tokens[position : position + self.stride]
                child = node.children.get(extras.get(depth, b"") + first_page)
                if child is None:
                    break
                node, offset = child, 0
            elif depth in extras:  # extra keys begin here, but this run goes on without
                break
            limit = min((page for page in extras if page > depth), default=depth + node.num_pages) - depth
            count = self._common_pages(node, offset, tokens, position, limit)
            if count == 0:
                break
            segments.append(Segment(node, offset, offset + count))
            offset += count
            depth += count
            position += count * self.stride
            if offset < node.num_pages:
                break
        return Match(segments, depth - cursor.depth, Cursor(node, depth))

    def _common_pages(self, node: Node, offset: int, tokens: bytes, position: int, limit: int) -> int:
        if offset == 0 and node.num_pages <= limit and tokens.startswith(node.tokens, position):
            return node.num_pages
        first_byte = offset * self.stride
        known, asked = len(node.tokens) - first_byte, (len(tokens) - position) // self.stride * self.stride
        count = min(known, asked, limit * self.stride) // 8
        ours = np.frombuffer(node.tokens, dtype=np.uint64, count=count, offset=first_byte)
        theirs = np.frombuffer(tokens, dtype=np.uint64, count=count, offset=position)
        different = ours != theirs
        first = int(np.argmax(different)) if different.any() else different.size
        return first * 8 // self.stride

    @staticmethod
    def path(cursor: Cursor, first_page: int = 0) -> list[Segment]:
        """The pages from `first_page` up to `cursor`, in order."""
        segments: list[Segment] = []
        node, depth = cursor
        while depth > first_page:
            node, offset = RadixTree.locate(Cursor(node, depth))
            start = max(0, first_page - node.first_page)
            segments.append(Segment(node, start, offset))
            depth = node.first_page + start
        segments.reverse()
        return segments

    def extend(self, cursor: Cursor, tokens: bytes, keys: list[bytes], extras: Extras) -> list[Segment]:
        """Adds the pages of `tokens` behind `cursor`, which is the end of a node. They have no slots yet."""
        segments: list[Segment] = []
        node, offset = self.locate(cursor)
        assert offset == node.num_pages, "split the node first"
        starts = sorted({cursor.depth, *(p for p in extras if cursor.depth < p < cursor.depth + len(keys))})
        for start, stop in zip(starts, [*starts[1:], cursor.depth + len(keys)], strict=True):
            first, last = start - cursor.depth, stop - cursor.depth
            run = tokens[first * self.stride : last * self.stride]
            run_keys = b"".join(keys[first:last])
            extra = extras.get(start, b"")
            if node.parent is not None and not node.children and not extra:
                segments.append(self._lengthen(node, run, run_keys))
            else:
                child = Node(node, node.namespace, start, extra, run, run_keys)
                node.children[extra + run[: self.stride]] = child
                if node.parent is None:
                    self._roots_with_pages[node.namespace] = node
                self.num_nodes += 1
                self.num_pages += child.num_pages
                segments.append(Segment(child, 0, child.num_pages))
                node = child
        return segments

    def _lengthen(self, node: Node, tokens: bytes, keys: bytes) -> Segment:
        before = node.num_pages
        count = len(keys) // KEY_BYTES
        node.tokens += tokens
        node.keys += keys
        node.device = np.concatenate([node.device, np.full(count, NO_SLOT, dtype=np.int32)])
        node.host = np.concatenate([node.host, np.full(count, NO_SLOT, dtype=np.int32)])
        node.stored = np.concatenate([node.stored, np.zeros(count, dtype=np.bool_)])
        self.num_pages += count
        return Segment(node, before, before + count)

    def split(self, node: Node, offset: int) -> Node:
        """Cuts a node before page `offset` and returns the new upper node; `node` keeps the pages behind it."""
        parent = node.parent
        assert parent is not None and 0 < offset < node.num_pages
        cut = offset * self.stride
        keys = node.keys[: offset * KEY_BYTES]
        upper = Node(parent, node.namespace, node.first_page, node.extra, node.tokens[:cut], keys)
        upper.device, node.device = node.device[:offset].copy(), node.device[offset:].copy()
        upper.host, node.host = node.host[:offset].copy(), node.host[offset:].copy()
        upper.stored, node.stored = node.stored[:offset].copy(), node.stored[offset:].copy()
        upper.num_device = min(node.num_device, offset)
        upper.last_access, upper.hits = node.last_access, node.hits
        parent.children[node.extra + node.tokens[: self.stride]] = upper
        node.parent = upper
        node.first_page += offset
        node.extra = b""
        node.tokens = node.tokens[cut:]
        node.keys = node.keys[offset * KEY_BYTES :]
        node.num_device -= upper.num_device
        upper.children[node.tokens[: self.stride]] = node
        upper.device_children = int(node.num_device > 0)
        self.num_nodes += 1
        return upper

    def trim(self, node: Node, num_pages: int) -> None:
        """Keeps the first `num_pages` pages of a leaf; without any left it goes.

        The removed node keeps its parent, so that cursors that passed through it still find their way up.
        """
        assert not node.children and node.num_device <= num_pages
        self.num_pages -= node.num_pages - num_pages
        if num_pages == 0:
            parent = node.parent
            assert parent is not None
            del parent.children[node.extra + node.tokens[: self.stride]]
            if parent.parent is None and not parent.children:
                del self._roots_with_pages[parent.namespace]
            self.num_nodes -= 1
        node.tokens = node.tokens[: num_pages * self.stride]
        node.keys = node.keys[: num_pages * KEY_BYTES]
        node.device = node.device[:num_pages]
        node.host = node.host[:num_pages]
        node.stored = node.stored[:num_pages]

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """All nodes but the roots, parents before children; of one namespace, or of all."""
        roots = self._roots_with_pages
        chosen = roots.values() if namespace is None else filter(None, [roots.get(namespace)])
        stack = [child for root in chosen for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every node agrees with its parent, its label and the counts."""
        for namespace, root in self._roots_with_pages.items():
            assert root.children, "a root without pages is kept"
            assert self._roots.get(namespace) is root, "a namespace has two roots"
        num_nodes = num_pages = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and node.num_pages > 0, "an empty node is in the tree"
            label = node.extra + node.tokens[: self.stride]
            assert parent.children.get(label) is node, "a node is not under its label"
            assert node.first_page == parent.end_page and node.namespace == parent.namespace
            assert len(node.tokens) == node.num_pages * self.stride and len(node.keys) == node.num_pages * KEY_BYTES
            node.check_integrity()
            num_nodes += 1
            num_pages += node.num_pages
        assert (num_nodes, num_pages) == (self.num_nodes, self.num_pages), "the tree's counts are off"
