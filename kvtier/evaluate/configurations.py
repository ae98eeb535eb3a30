"""The configurations that an evaluation compares: page format, recipe and open page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe, find_recipe
from kvtier.worker import OpenPage, WorkerModel

RECIPE_NAMES = ("plain", "search", "shipped")

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True)
class Configuration:
    """One way to store K and V. `recipe_label` is the recipe as the user named it; of a file, its name."""

    page_format: PageFormat
    recipe_label: str
    recipe: Recipe
    open_page: OpenPage

    @property
    def title(self) -> str:
        """For people."""
        recipe = f" {self.recipe_label}" if self.page_format is PageFormat.NVFP4 else ""
        return f"{self.page_format}{recipe}, open page {self.open_page}"


def parse_choices(kind: type[_Choice], text: str, what: str) -> list[_Choice]:
    """Members of `kind` by comma; raises `InvalidRequestError` for one that is unknown, `what` says of which things."""
    known = {member.value: member for member in kind}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"{name!r} is no {what}; use {', '.join(known)}")
    return list(dict.fromkeys(known[name] for name in names))


def parse_recipes(text: str, model: WorkerModel) -> dict[str, Recipe]:
    """Recipes by label, of names and files by comma; one that is the same as one before it is left out.

    Raises `InvalidRequestError` for a name that is neither known nor a file, and for a recipe of another model.
    """
    recipes: dict[str, Recipe] = {}
    for name in (name.strip() for name in text.split(",")):
        if name not in RECIPE_NAMES and not Path(name).is_file():
            raise InvalidRequestError(f"{name!r} is no recipe; use {', '.join(RECIPE_NAMES)} or the path of a file")
        recipe = find_recipe(name, model.revision)
        num_layers, num_kv_heads, head_dim, _ = model.geometry
        recipe.check_fits(model.name, model.revision, num_layers, num_kv_heads, head_dim)
        if recipe.digest not in (other.digest for other in recipes.values()):
            recipes[_label(name, recipe)] = recipe
    return recipes


def all_configurations(
    formats: Sequence[PageFormat], recipes: dict[str, Recipe], open_pages: Sequence[OpenPage]
) -> list[Configuration]:
    """Every combination that makes sense.

    Recipes are for nvfp4; the other formats store plainly. With bf16 pages an open page in BF16 is no different, so
    that format comes once.
    """
    return list(_combinations(formats, recipes, open_pages))


def _combinations(
    formats: Sequence[PageFormat], recipes: dict[str, Recipe], open_pages: Sequence[OpenPage]
) -> Iterator[Configuration]:
    for page_format in formats:
        match page_format:
            case PageFormat.NVFP4:
                for label, recipe in recipes.items():
                    for open_page in open_pages:
                        yield Configuration(page_format, label, recipe, open_page)
            case PageFormat.FP8:
                for open_page in open_pages:
                    yield Configuration(page_format, PLAIN.name, PLAIN, open_page)
            case PageFormat.BF16:
                yield Configuration(page_format, PLAIN.name, PLAIN, OpenPage.OFF)


def _label(name: str, recipe: Recipe) -> str:
    """A file by its name, what `shipped` stands for with the name of the recipe that it is."""
    if name == "shipped":
        return f"shipped ({recipe.name})"
    return name if name in RECIPE_NAMES else Path(name).stem
