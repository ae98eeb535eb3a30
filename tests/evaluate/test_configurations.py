"""Which configurations are compared, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from evaluation_models import HEAD_DIM, NUM_KV_HEADS, tiny_llama

from kvtier.errors import InvalidRequestError
from kvtier.evaluate.configurations import all_configurations, parse_choices, parse_recipes
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, SEARCH, Origin, Recipe, RecipeName
from kvtier.worker import OpenPage, WorkerModel, prepare_model


@pytest.fixture(scope="module")
def model() -> WorkerModel:
    return prepare_model(tiny_llama(), "tiny", "of these weights")


def balanced(revision: str, num_layers: int = 2) -> Recipe:
    ones = np.ones((num_layers, NUM_KV_HEADS, HEAD_DIM), dtype=np.float32)
    return Recipe(RecipeName.BALANCED, balance=ones, origin=Origin("tiny", revision))


def test_recipes_are_for_nvfp4_and_bf16_comes_once() -> None:
    recipes = {"plain": PLAIN, "search": SEARCH}
    configurations = all_configurations(list(PageFormat), recipes, [OpenPage.BF16, OpenPage.OFF])
    assert [each.title for each in configurations] == [
        "nvfp4 plain, open page bf16",
        "nvfp4 plain, open page off",
        "nvfp4 search, open page bf16",
        "nvfp4 search, open page off",
        "fp8, open page bf16",
        "fp8, open page off",
        "bf16, open page off",
    ]


def test_recipes_are_named_as_the_user_did(model: WorkerModel, tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    balanced("of these weights").save(file)
    recipes = parse_recipes(f"plain, search,{file}", model)
    assert list(recipes) == ["plain", "search", "mine"]
    assert recipes["mine"].name is RecipeName.BALANCED


def test_a_recipe_comes_once(model: WorkerModel) -> None:
    """None ships for these weights, so that `shipped` is `search`."""
    assert list(parse_recipes("search,shipped,search", model)) == ["search"]
    assert list(parse_recipes("shipped", model)) == ["shipped (search)"]


def test_what_is_unknown_is_refused(model: WorkerModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="'int4' is no page format; use nvfp4, fp8, bf16"):
        parse_choices(PageFormat, "bf16,int4", "page format")
    with pytest.raises(InvalidRequestError, match="'on' is no open page; use bf16, fp8, off"):
        parse_choices(OpenPage, "on", "open page")
    with pytest.raises(InvalidRequestError, match="'serach' is no recipe; use plain, search, shipped or the path"):
        parse_recipes("plain,serach", model)
    other = tmp_path / "other.safetensors"
    balanced("of other weights").save(other)
    with pytest.raises(InvalidRequestError, match="run `kvtier calibrate` for this model"):
        parse_recipes(str(other), model)


def test_choices_come_once_and_in_their_order() -> None:
    assert parse_choices(PageFormat, "fp8, bf16,fp8", "page format") == [PageFormat.FP8, PageFormat.BF16]
