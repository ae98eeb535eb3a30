"""Recipes: their digests, their files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import InvalidRequestError
from kvtier.pages.recipe import PLAIN, SEARCH, BlockScales, Origin, Recipe, RecipeName, find_recipe

_ORIGIN = Origin("model", "weights-1", 8192, "digest of texts", 1000)


def _balanced(seed: int = 0, origin: Origin = _ORIGIN) -> Recipe:
    balance = np.random.default_rng(seed).uniform(0.5, 2, (2, 3, 32)).astype(np.float32)
    return Recipe(RecipeName.BALANCED, balance=balance, origin=origin)


def _full() -> Recipe:
    matrices = np.random.default_rng(0).normal(size=(2, 3, 16, 16)) + 12 * np.eye(16)
    return Recipe(RecipeName.FULL, key_matrices=matrices.astype(np.float16))


@pytest.mark.parametrize("recipe", [PLAIN, SEARCH, _balanced(), _full()], ids=lambda recipe: recipe.name)
def test_a_file_gives_back_the_recipe(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    recipe.save(path)
    found = Recipe.load(path)
    assert (found.name, found.digest, found.origin) == (recipe.name, recipe.digest, recipe.origin)
    assert found.arrays.keys() == recipe.arrays.keys()
    for name, array in recipe.arrays.items():
        assert np.array_equal(found.arrays[name], array)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_digests_tell_recipes_apart_and_ignore_their_origin() -> None:
    assert PLAIN.digest == "plain"
    assert SEARCH.digest == "search"
    assert _balanced(0).digest == _balanced(0, Origin()).digest
    assert _balanced(0).digest != _balanced(1).digest
    scaled = Recipe(RecipeName.PLAIN, global_scales=np.full((2, 2), 0.5, dtype=np.float32))
    assert scaled.digest not in (PLAIN.digest, "plain")


def test_block_scales_are_searched_by_all_but_plain() -> None:
    rules = [recipe.block_scales for recipe in (PLAIN, SEARCH, _balanced(), _full())]
    assert rules == [BlockScales.LARGEST] + [BlockScales.SEARCH] * 3


@pytest.mark.parametrize("change", ["byte", "truncated", "no digest", "other file", "missing"])
def test_a_damaged_file_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    _balanced().save(path)
    content = bytearray(path.read_bytes())
    match change:
        case "byte":
            content[-3] ^= 0x10
        case "truncated":
            content = content[:-100]
        case "no digest":
            content = content.replace(b"digest", b"tsegid")
        case "other file":
            content = bytearray(b"# a text\n" * 100)
    path.write_bytes(content)
    if change == "missing":
        path.unlink()
    with pytest.raises(InvalidRequestError, match="a.safetensors"):
        Recipe.load(path)


def test_arrays_must_belong_to_the_name() -> None:
    balance = _balanced().balance
    assert balance is not None
    with pytest.raises(InvalidRequestError, match="plain cannot have exactly these arrays: \\['balance'\\]"):
        Recipe(RecipeName.PLAIN, balance=balance)
    with pytest.raises(InvalidRequestError, match="full cannot have"):
        Recipe(RecipeName.FULL)
    with pytest.raises(InvalidRequestError, match="positive"):
        Recipe(RecipeName.BALANCED, balance=-balance)
    with pytest.raises(InvalidRequestError, match="float32 and finite"):
        Recipe(RecipeName.BALANCED, balance=balance * np.float32(np.inf))
    with pytest.raises(InvalidRequestError, match="float16 and finite"):
        Recipe(RecipeName.FULL, key_matrices=np.ones((1, 1, 16, 16), dtype=np.float32))
    with pytest.raises(InvalidRequestError, match="must be \\(layers, KV heads, head_dim, head_dim\\)"):
        Recipe(RecipeName.FULL, key_matrices=np.ones((1, 1, 16, 32), dtype=np.float16))
    with pytest.raises(InvalidRequestError, match="no inverse"):
        Recipe(RecipeName.FULL, key_matrices=np.ones((1, 1, 16, 16), dtype=np.float16))


def test_queries_get_the_inverse_of_what_keys_get() -> None:
    recipe = _full()
    assert recipe.key_matrices is not None and recipe.query_matrices is not None
    product = recipe.key_matrices.astype(np.float64) @ np.swapaxes(recipe.query_matrices, -1, -2)
    np.testing.assert_allclose(product, np.broadcast_to(np.eye(16), product.shape), atol=1e-6)


def test_a_recipe_of_another_model_is_refused() -> None:
    recipe = _balanced()
    recipe.check_fits("model", "weights-1", 2, 3, 32)
    PLAIN.check_fits("any", "any", 7, 7, 48)
    with pytest.raises(InvalidRequestError, match="model with weights weights-1, and other has weights weights-2"):
        recipe.check_fits("other", "weights-2", 2, 3, 32)
    with pytest.raises(InvalidRequestError, match="layers, KV heads and head dimension \\(4, 3, 32\\)"):
        recipe.check_fits("model", "weights-1", 4, 3, 32)


def test_balance_needs_a_power_of_two() -> None:
    recipe = Recipe(RecipeName.BALANCED, balance=np.ones((1, 1, 80), dtype=np.float32))
    with pytest.raises(InvalidRequestError, match="head_dim is 80"):
        recipe.check_fits("model", "weights", 1, 1, 80)


def test_recipes_are_found_by_name(tmp_path: Path) -> None:
    _balanced().save(tmp_path / "mine.safetensors")
    assert find_recipe("plain", "weights") is PLAIN
    assert find_recipe("search", "weights") is SEARCH
    assert find_recipe("shipped", "unknown weights") is SEARCH
    assert find_recipe(str(tmp_path / "mine.safetensors"), "weights").digest == _balanced().digest
    with pytest.raises(InvalidRequestError, match="nothing-here"):
        find_recipe("nothing-here", "weights")
