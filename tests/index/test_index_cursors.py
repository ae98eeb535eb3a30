"""Cursors and paths: they name the same pages whatever happens to the nodes around them."""

from __future__ import annotations

from index_helpers import add, root
from plain_model import PAGE_SIZE, tokens_of

from kvtier.index import Cursor, RadixTree


def new_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE)


def test_a_cursor_finds_its_node_after_splits() -> None:
    tree = new_tree()
    node = add(tree, root(tree), [1, 2, 3, 4, 5, 6]).node
    cursors = [Cursor(node, depth) for depth in range(7)]
    keys = [tree.parent_key(cursor) for cursor in cursors]
    upper = tree.split(node, 4)
    top = tree.split(upper, 2)
    assert [tree.parent_key(cursor) for cursor in cursors] == keys
    assert tree.locate(cursors[0]) == (root(tree).node, 0)
    assert [tree.locate(cursors[depth]) for depth in (1, 2, 3, 4, 5, 6)] == [
        (top, 1),
        (top, 2),
        (upper, 1),
        (upper, 2),
        (node, 1),
        (node, 2),
    ]
    assert tree.match(cursors[3], tokens_of(4, 5, 6), {}).num_pages == 3


def test_a_cursor_at_the_end_of_a_leaf_stays_there_when_the_leaf_is_lengthened() -> None:
    tree = new_tree()
    cursor = add(tree, root(tree), [1, 2])
    key = tree.parent_key(cursor)
    add(tree, cursor, [3])
    assert (tree.locate(cursor), tree.parent_key(cursor)) == ((cursor.node, 2), key)
    assert tree.match(cursor, tokens_of(3), {}).num_pages == 1
    tree.split(cursor.node, 1)
    assert (tree.locate(cursor), tree.parent_key(cursor)) == ((cursor.node, 1), key)


def test_a_cursor_stays_valid_when_the_node_it_passed_through_is_gone() -> None:
    tree = new_tree()
    lower = add(tree, root(tree), [1, 2, 3, 4])
    upper = tree.split(lower.node, 3)
    cursor = Cursor(lower.node, 2)
    tree.trim(lower.node, 0)
    assert tree.locate(cursor) == (upper, 2)
    add(tree, Cursor(upper, 3), [7, 8])
    top = tree.split(upper, 1)
    assert (tree.locate(cursor), tree.locate(Cursor(lower.node, 1))) == ((upper, 1), (top, 1))
    assert tree.match(cursor, tokens_of(3, 7, 8), {}).num_pages == 3


def test_other_branches_do_not_move_a_cursor() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3])
    upper = tree.split(end.node, 2)
    other = add(tree, Cursor(upper, 2), [8, 9])
    located = tree.locate(end)
    add(tree, other, [10])
    tree.split(other.node, 1)
    tree.trim(other.node, 0)
    assert tree.locate(end) == located == (end.node, 1)


def test_a_path_names_its_pages_in_order() -> None:
    tree = new_tree()
    end = add(tree, root(tree), [1, 2, 3, 4, 5])
    upper = tree.split(end.node, 3)
    assert tree.path(end) == [(upper, 0, 3), (end.node, 0, 2)]
    assert tree.path(end, 2) == [(upper, 2, 3), (end.node, 0, 2)]
    assert tree.path(end, 3) == [(end.node, 0, 2)]
    assert tree.path(Cursor(end.node, 4), 4) == tree.path(root(tree)) == []
    assert tree.path(Cursor(end.node, 2), 1) == [(upper, 1, 2)]
