"""Which node loses its pages first.

A policy only ranks nodes; which nodes may be evicted at all (leaves, without held pages) is the index's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from kvtier.index.node import Node


class EvictionPolicy(Protocol):
    """Ranks eviction candidates."""

    def priority(self, node: Node) -> float:
        """Lower goes first. Must not fall while a node waits in a queue: entries are re-ranked only when popped."""


class LruPolicy:
    """Least recently used first."""

    def priority(self, node: Node) -> float:
        return node.last_access


class VictimQueue:
    """Candidates in the order of a policy.

    Entries are lazy: a node may have risen in rank or stopped to be a candidate since it was pushed; both are found out
    when it is popped. A node has at most one entry.
    """

    def __init__(self, name: str, policy: EvictionPolicy, is_candidate: Callable[[Node], bool]) -> None:
        self._name = name
        self._policy = policy
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, Node]] = []
        self._pushes = 0
        self._compact_at = 1024

    def push(self, node: Node) -> None:
        """Adds a node if it is a candidate and not waiting yet."""
        if self._name in node.queued_in or not self._is_candidate(node):
            return
        if len(self._heap) >= self._compact_at:
            self._compact()
        node.queued_in.add(self._name)
        self._pushes += 1
        heapq.heappush(self._heap, (self._policy.priority(node), self._pushes, node))

    def pop(self) -> Node | None:
        """The first candidate, or None when there is none."""
        while self._heap:
            rank, order, node = self._heap[0]
            if not self._is_candidate(node):
                heapq.heappop(self._heap)
                node.queued_in.discard(self._name)
                continue
            current = self._policy.priority(node)
            if current > rank:
                heapq.heapreplace(self._heap, (current, order, node))
                continue
            heapq.heappop(self._heap)
            node.queued_in.discard(self._name)
            return node
        return None

    def _compact(self) -> None:
        # Nodes that left the tree stay in the heap until popped; a queue that is seldom popped must not keep them all.
        kept = []
        for entry in self._heap:
            if self._is_candidate(entry[2]):
                kept.append(entry)
            else:
                entry[2].queued_in.discard(self._name)
        heapq.heapify(kept)
        self._heap = kept
        self._compact_at = max(1024, 2 * len(kept))
