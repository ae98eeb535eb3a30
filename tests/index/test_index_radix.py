"""The radix tree alone: matches, splits, lengthening, extra keys, cursors."""

from __future__ import annotations

import pytest
from index_helpers import add, find, root
from plain_model import PAGE_SIZE, namespace_key, page_tokens, tokens_of

from kvtier.index import Cursor, Match, RadixTree
from kvtier.pages.chain import chain_keys

ADAPTER, IMAGE = b"a" * 32, b"i" * 32


def new_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE)


def parts(match: Match) -> list[tuple[int, int, int]]:
    """Pages of the sequence before each node of a match, and the pages of that node that matched."""
    return [(segment.node.first_page, segment.start, segment.stop) for segment in match.segments]


def keys_on_path(end: Cursor) -> list[bytes]:
    return [node.key_of(page) for node, start, stop in RadixTree.path(end) for page in range(start, stop)]


# --- matches ---------------------------------------------------------------------------------------------------------


def test_an_empty_tree_matches_nothing() -> None:
    tree = new_tree()
    match = find(tree, [1, 2])
    assert (match.num_pages, match.segments, match.end) == (0, [], root(tree))
    assert match.device_slots().tolist() == match.host_slots().tolist() == []


@pytest.mark.parametrize(
    ("asked", "num_pages"),
    [([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5], 4), ([1, 2, 3], 3), ([1, 2, 9, 4], 2), ([9, 2, 3], 0), ([], 0)],
)
def test_the_longest_known_run_of_whole_pages_is_found(asked: list[int], num_pages: int) -> None:
    tree = new_tree()
    add(tree, root(tree), [1, 2, 3, 4])
    match = find(tree, asked)
    assert (match.num_pages, match.end.depth) == (num_pages, num_pages)
    tree.check_integrity()


def test_tokens_that_do_not_fill_a_page_are_left_out() -> None:
    tree = new_tree()
    add(tree, root(tree), [1, 2])
    assert tree.match(root(tree), tokens_of(1, 2)[:-4], {}).num_pages == 1
    assert tree.match(root(tree), tokens_of(1, 2) + page_tokens(3)[:-4], {}).num_pages == 2
    assert tree.match(root(tree), page_tokens(1)[:8], {}).num_pages == 0


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_a_difference_in_any_token_of_a_page_ends_the_match_before_that_page(page_size: int) -> None:
    tree = RadixTree(page_size)
    tokens = bytes(3 * page_size * 4)
    tree.extend(root(tree), tokens, chain_keys(namespace_key("a"), tokens, page_size, {}), {})
    for position in range(3 * page_size):
        other = bytearray(tokens)
        other[4 * position] = 1
        assert tree.match(root(tree), bytes(other), {}).num_pages == position // page_size


def test_a_match_may_start_at_a_cursor_inside_a_run() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3, 4])
    match = tree.match(Cursor(end.node, 1), tokens_of(2, 3, 9), {})
    assert (match.num_pages, match.end, parts(match)) == (2, Cursor(end.node, 3), [(0, 1, 3)])


def test_namespaces_have_nothing_in_common() -> None:
    tree = new_tree()
    add(tree, root(tree, "a"), [1, 2])
    assert find(tree, [1, 2], namespace="b").num_pages == 0
    add(tree, root(tree, "b"), [1])
    assert [find(tree, [1, 2], namespace=namespace).num_pages for namespace in "ab"] == [2, 1]
    assert find(tree, [1]).end.node is not find(tree, [1], namespace="b").end.node
    assert [node.namespace for node in tree.nodes("a")] == ["a"]
    assert sorted(node.namespace for node in tree.nodes()) == ["a", "b"]
    assert list(tree.nodes("nobody")) == []
    assert keys_on_path(find(tree, [1]).end) != keys_on_path(find(tree, [1], namespace="b").end)


def test_a_namespace_is_there_as_long_as_it_has_pages_or_a_cursor() -> None:
    """Prompts name any number of namespaces, most of which never get a page."""
    tree = new_tree()
    for number in range(100):
        assert tree.match(root(tree, f"tenant-{number}"), tokens_of(1, 2), {}).num_pages == 0
    assert len(list(tree._roots)) == 0
    (segment,) = tree.path(add(tree, root(tree), [1, 2]))
    assert find(tree, [1, 2]).num_pages == 2
    cursor = root(tree)
    tree.trim(segment.node, 0)
    del segment
    assert root(tree).node is cursor.node, "whoever has a cursor adds where others find it"
    add(tree, cursor, [3])
    del cursor
    (node,) = tree.nodes()
    assert [found.tokens for found in tree.nodes("a")] == [node.tokens] == [tokens_of(3)]
    tree.trim(node, 0)
    del node
    assert len(list(tree._roots)) == 0


# --- structure -------------------------------------------------------------------------------------------------------


def test_a_leaf_is_lengthened_in_place() -> None:
    tree = new_tree()
    first = add(tree, root(tree), [1, 2])
    end = add(tree, first, [3])
    assert end.node is first.node
    assert (tree.num_nodes, tree.num_pages, end.node.num_pages) == (1, 3, 3)
    assert keys_on_path(end) == chain_keys(namespace_key("a"), tokens_of(1, 2, 3), PAGE_SIZE, {})
    assert parts(find(tree, [1, 2, 3])) == [(0, 0, 3)]
    tree.check_integrity()


def test_a_split_keeps_every_page_with_its_slots_and_keys() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3, 4, 5])
    node = end.node
    node.device[:], node.host[:], node.stored[:] = (
        [10, 11, 12, -1, -1],
        [-1, 21, 22, 23, 24],
        [True, False] * 2 + [True],
    )
    node.num_device, node.last_access, node.hits = 3, 7, 2
    keys = keys_on_path(end)
    upper = tree.split(node, 2)
    assert (upper.first_page, upper.num_pages, node.first_page, node.num_pages) == (0, 2, 2, 3)
    assert (upper.num_device, node.num_device, upper.device_children) == (2, 1, 1)
    assert (upper.last_access, upper.hits) == (7, 2)
    assert keys_on_path(end) == keys
    match = find(tree, [1, 2, 3, 4, 5])
    assert parts(match) == [(0, 0, 2), (2, 0, 3)]
    assert match.device_slots().tolist() == [10, 11, 12, -1, -1]
    assert match.host_slots().tolist() == [-1, 21, 22, 23, 24]
    assert [bool(flag) for part in match.segments for flag in part.node.stored] == [True, False, True, False, True]
    assert (tree.num_nodes, tree.num_pages) == (2, 5)
    tree.check_integrity()


def test_a_split_behind_the_device_part_leaves_the_lower_node_off_the_device() -> None:
    tree = new_tree()
    node = add(tree, root(tree), [1, 2, 3]).node
    node.device[:1], node.num_device = 5, 1
    upper = tree.split(node, 2)
    assert (upper.num_device, node.num_device, upper.device_children) == (1, 0, 0)
    tree.check_integrity()


def test_sequences_share_their_prefix() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3])
    other = add(tree, Cursor(tree.split(end.node, 1), 1), [8, 9])
    assert (tree.num_nodes, tree.num_pages) == (3, 5)
    assert keys_on_path(end)[0] == keys_on_path(other)[0]
    assert parts(find(tree, [1, 2, 3])) == [(0, 0, 1), (1, 0, 2)]
    assert parts(find(tree, [1, 8, 9])) == [(0, 0, 1), (1, 0, 2)]
    assert find(tree, [1, 8, 3]).num_pages == 2
    tree.check_integrity()


def test_the_slots_of_a_match_outlive_a_split() -> None:
    tree = new_tree()
    node = add(tree, root(tree), [1, 2, 3, 4]).node
    node.device[:], node.host[:], node.num_device = [0, 1, 2, 3], [4, 5, 6, 7], 4
    match = find(tree, [1, 2])
    tree.split(node, 2)
    assert match.device_slots().tolist() == [0, 1]
    assert match.host_slots().tolist() == [4, 5]


def test_a_trimmed_leaf_keeps_its_first_pages_and_an_empty_one_leaves_the_tree() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3])
    tree.trim(end.node, 1)
    assert (find(tree, [1, 2, 3]).num_pages, tree.num_nodes, tree.num_pages) == (1, 1, 1)
    tree.check_integrity()
    tree.trim(end.node, 0)
    assert (find(tree, [1]).num_pages, tree.num_nodes, tree.num_pages, list(tree.nodes())) == (0, 0, 0, [])
    add(tree, root(tree), [1])
    assert find(tree, [1]).num_pages == 1
    tree.check_integrity()


def test_parents_come_before_their_children() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3])
    add(tree, Cursor(tree.split(end.node, 2), 2), [8])
    seen = set()
    for node in tree.nodes():
        assert node.parent is root(tree).node or node.parent in seen
        seen.add(node)
    assert len(seen) == tree.num_nodes == 3


# --- extra keys ------------------------------------------------------------------------------------------------------


def test_a_page_where_extra_keys_begin_starts_a_node() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3, 4, 5], {1: ADAPTER, 3: IMAGE})
    assert [(node.first_page, node.num_pages, node.extra) for node in tree.nodes()] == [
        (0, 1, b""),
        (1, 2, ADAPTER),
        (3, 2, IMAGE),
    ]
    assert parts(find(tree, [1, 2, 3, 4, 5], {1: ADAPTER, 3: IMAGE})) == [(0, 0, 1), (1, 0, 2), (3, 0, 2)]
    assert keys_on_path(end) == chain_keys(
        namespace_key("a"), tokens_of(1, 2, 3, 4, 5), PAGE_SIZE, {1: ADAPTER, 3: IMAGE}
    )
    tree.check_integrity()


def test_a_leaf_is_lengthened_up_to_the_page_where_extra_keys_begin() -> None:
    tree = new_tree()
    first = add(tree, root(tree), [1])
    add(tree, first, [2, 3, 4], {3: ADAPTER})
    assert [(node.first_page, node.num_pages, node.extra) for node in tree.nodes()] == [(0, 3, b""), (3, 1, ADAPTER)]


@pytest.mark.parametrize(
    ("extras", "num_pages"),
    [({}, 3), ({0: ADAPTER}, 0), ({1: ADAPTER}, 1), ({2: ADAPTER}, 2), ({3: ADAPTER}, 3), ({2: IMAGE, 1: IMAGE}, 1)],
)
def test_extra_keys_inside_a_run_without_them_end_the_match(extras: dict[int, bytes], num_pages: int) -> None:
    tree = new_tree()
    add(tree, root(tree), [1, 2, 3])
    assert find(tree, [1, 2, 3], extras).num_pages == num_pages


@pytest.mark.parametrize(
    ("extras", "num_pages"),
    [({}, 1), ({1: IMAGE}, 1), ({1: ADAPTER}, 3), ({1: ADAPTER, 2: IMAGE}, 2), ({2: ADAPTER}, 1)],
)
def test_pages_with_extra_keys_match_under_the_same_extra_keys_alone(extras: dict[int, bytes], num_pages: int) -> None:
    tree = new_tree()
    add(tree, root(tree), [1, 2, 3], {1: ADAPTER})
    assert find(tree, [1, 2, 3], extras).num_pages == num_pages


def test_the_same_tokens_with_and_without_extra_keys_live_side_by_side() -> None:
    tree = new_tree()
    ends = [add(tree, root(tree), [1, 2], extras) for extras in ({}, {0: ADAPTER}, {0: IMAGE})]
    assert [find(tree, [1, 2], extras).end.node for extras in ({}, {0: ADAPTER}, {0: IMAGE})] == [e.node for e in ends]
    assert len({key for end in ends for key in keys_on_path(end)}) == 6
    tree.split(ends[1].node, 1)
    assert [find(tree, [1, 2], extras).num_pages for extras in ({}, {0: ADAPTER}, {0: IMAGE})] == [2, 2, 2]
    tree.trim(ends[1].node, 0)
    assert [find(tree, [1, 2], extras).num_pages for extras in ({}, {0: ADAPTER}, {0: IMAGE})] == [2, 1, 2]
    tree.check_integrity()


def test_extra_keys_count_from_the_start_of_the_sequence() -> None:
    tree = new_tree()
    first = add(tree, root(tree), [1, 2])
    add(tree, first, [3, 4], {2: ADAPTER})
    assert tree.match(first, tokens_of(3, 4), {2: ADAPTER}).num_pages == 2
    assert tree.match(first, tokens_of(3, 4), {0: ADAPTER}).num_pages == 0
    assert tree.match(first, tokens_of(3, 4), {2: ADAPTER, 0: IMAGE}).num_pages == 2
    assert tree.match(Cursor(first.node, 1), tokens_of(2, 3), {0: ADAPTER}).num_pages == 1
    assert tree.match(Cursor(first.node, 1), tokens_of(2, 3), {1: ADAPTER}).num_pages == 0
