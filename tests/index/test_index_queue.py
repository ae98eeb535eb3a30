"""The queue of eviction candidates: lazy entries, order, compaction."""

from __future__ import annotations

from kvtier.index import LruPolicy, Node
from kvtier.index.policy import VictimQueue


class Candidates:
    """Nodes with a time of last use, and a queue over those that are not excluded."""

    def __init__(self) -> None:
        self.excluded: set[Node] = set()
        self.queue = VictimQueue("test", LruPolicy(), lambda node: node not in self.excluded)

    def node(self, last_access: int) -> Node:
        node = Node(None, "a", 0, b"", b"", b"")
        node.last_access = last_access
        return node

    def drain(self) -> list[int]:
        popped = []
        while (node := self.queue.pop()) is not None:
            popped.append(node.last_access)
        return popped


def test_the_least_recently_used_comes_first_and_of_equals_the_first_pushed() -> None:
    candidates = Candidates()
    nodes = [candidates.node(last_access) for last_access in (5, 3, 9, 3)]
    for node in nodes:
        candidates.queue.push(node)
    assert candidates.queue.pop() is nodes[1]
    assert candidates.queue.pop() is nodes[3]
    assert candidates.drain() == [5, 9]
    assert candidates.queue.pop() is None


def test_a_node_has_one_entry_however_often_it_is_pushed() -> None:
    candidates = Candidates()
    node = candidates.node(1)
    for _ in range(3):
        candidates.queue.push(node)
    assert (candidates.queue.pop(), node.queued_in, candidates.queue.pop()) == (node, set(), None)
    candidates.queue.push(node)
    assert candidates.queue.pop() is node


def test_a_node_used_while_it_waits_is_ranked_anew() -> None:
    candidates = Candidates()
    nodes = [candidates.node(last_access) for last_access in (1, 2, 3)]
    for node in nodes:
        candidates.queue.push(node)
    nodes[0].last_access = 4
    assert candidates.drain() == [2, 3, 4]


def test_a_node_that_is_no_candidate_is_not_queued_and_falls_out_when_popped() -> None:
    candidates = Candidates()
    never, once, always = (candidates.node(last_access) for last_access in (1, 2, 3))
    candidates.excluded.add(never)
    for node in (never, once, always):
        candidates.queue.push(node)
    assert (never.queued_in, once.queued_in) == (set(), {"test"})
    candidates.excluded.add(once)
    assert candidates.queue.pop() is always
    assert once.queued_in == set()
    candidates.excluded.clear()
    candidates.queue.push(once)
    assert candidates.queue.pop() is once


def test_a_queue_that_is_seldom_popped_lets_go_of_nodes_that_are_no_candidates() -> None:
    candidates = Candidates()
    nodes = [candidates.node(last_access) for last_access in range(20_000)]
    for node in nodes:
        candidates.queue.push(node)
        if node.last_access % 100:
            candidates.excluded.add(node)
    waiting = [node for node in nodes if node.queued_in]
    assert set(nodes[::100]) <= set(waiting)
    assert len(waiting) < 2_000
    assert candidates.drain() == list(range(0, 20_000, 100))
    assert not any(node.queued_in for node in nodes)
