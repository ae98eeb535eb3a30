"""Recipes: how the values of a model become codes.

A recipe has, for every layer, the global scales of K and V, the rule by which block scales are chosen, and a constant
transform of K whose inverse goes to Q, so that logits stay what they are:

| name       | block scales | transform of K and Q                                                              |
|------------|--------------|-----------------------------------------------------------------------------------|
| `plain`    | largest      | none                                                                              |
| `search`   | searched     | none                                                                              |
| `balanced` | searched     | each channel divided by a factor, then a Walsh-Hadamard transform of every head   |
| `full`     | searched     | one matrix a KV head                                                              |

`plain` and `search` fit every model. The others are calibrated for one model and kept in a safetensors file. A recipe
is part of a page's meaning: its digest goes into the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvtier.errors import InvalidRequestError

_log = logging.getLogger(__name__)

FILE_FORMAT = "kvtier recipe 1"
_MAX_CONDITION = 1e5  # beyond, products of a matrix and its inverse lose what fp32 has to lose


class BlockScales(StrEnum):
    """How the scale of 16 values is chosen."""

    LARGEST = "largest"  # the largest magnitude becomes 6, as FlashInfer's writer does
    SEARCH = "search"  # the one of least squared error, of five around it

    @property
    def rule(self) -> str:
        """Part of the fingerprint. NOTE: whoever changes what the search finds changes its number."""
        return "search 1" if self is BlockScales.SEARCH else "largest"


class RecipeName(StrEnum):
    """See the table above."""

    PLAIN = "plain"
    SEARCH = "search"
    BALANCED = "balanced"
    FULL = "full"

    @property
    def is_calibrated(self) -> bool:
        """Whether it belongs to one model and comes from a file."""
        return self in (RecipeName.BALANCED, RecipeName.FULL)


@dataclass(frozen=True)
class Origin:
    """What a recipe was calibrated on.

    Attributes:
        model, revision: as in the identity of the cache.
        num_positions: it holds for positions from 0 to below this, by the rotary embedding.
        texts: digest of the texts.
        num_tokens: tokens of the texts.
    """

    model: str = ""
    revision: str = ""
    num_positions: int = 0
    texts: str = ""
    num_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Recipe:
    """One recipe.

    Attributes, with layers L, KV heads Hkv and head dimension D:
        balance: `(L, Hkv, D)` fp32, positive; K is divided by it and Q multiplied. `balanced` alone.
        key_matrices: `(L, Hkv, D, D)` fp16; K is multiplied by it from the left. `full` alone.
        global_scales: `(L, 2)` fp32, those of K and V; None is 1.0 everywhere.

    Raises `InvalidRequestError` when arrays do not belong to the name, are not finite, or have no inverse.
    """

    name: RecipeName
    balance: np.ndarray | None = None
    key_matrices: np.ndarray | None = None
    global_scales: np.ndarray | None = None
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        wanted = {RecipeName.BALANCED: {"balance"}, RecipeName.FULL: {"key_matrices"}}
        given = self.arrays.keys() - {"global_scales"}
        if given != wanted.get(self.name, set()):
            raise InvalidRequestError(f"a recipe {self.name} cannot have exactly these arrays: {sorted(given)}")
        for name, array in self.arrays.items():
            dtype = np.float16 if name == "key_matrices" else np.float32
            if array.dtype != dtype or not np.isfinite(array).all():
                raise InvalidRequestError(f"{name} of the recipe must be {np.dtype(dtype).name} and finite")
        if self.key_matrices is not None:
            _check_matrices(self.key_matrices)
        if self.balance is not None and not (self.balance.ndim == 3 and (self.balance > 0).all()):
            raise InvalidRequestError("balance of the recipe must be (layers, KV heads, head_dim) and positive")
        if self.global_scales is not None and not (
            self.global_scales.shape[1:] == (2,) and (self.global_scales > 0).all()
        ):
            raise InvalidRequestError("global_scales of the recipe must be (layers, 2) and positive")

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that it has, by name."""
        arrays = {
            "balance": self.balance,
            "key_matrices": self.key_matrices,
            "global_scales": self.global_scales,
        }
        return {name: array for name, array in arrays.items() if array is not None}

    @cached_property
    def query_matrices(self) -> np.ndarray | None:
        """What Q is multiplied by, `(L, Hkv, D, D)` fp32: the inverses of `key_matrices`, transposed."""
        if self.key_matrices is None:
            return None
        inverse = np.linalg.inv(self.key_matrices.astype(np.float64))
        return np.swapaxes(inverse, -1, -2).astype(np.float32)

    @property
    def block_scales(self) -> BlockScales:
        return BlockScales.LARGEST if self.name is RecipeName.PLAIN else BlockScales.SEARCH

    @property
    def digest(self) -> str:
        """What goes into the fingerprint: the name, and BLAKE2b-128 of all that changes a code, if there is more."""
        if not self.arrays:
            return self.name.value
        digest = hashlib.blake2b(digest_size=16, person=b"kvtier recipe")
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
        return f"{self.name}-{digest.hexdigest()}"

    def of_rank(self, rank: int, world_size: int) -> Recipe:
        """The part for the KV heads of one tensor-parallel rank; its digest is its own."""
        if world_size == 1:
            return self
        balance, key_matrices = (
            None if array is None else np.split(array, world_size, axis=1)[rank]
            for array in (self.balance, self.key_matrices)
        )
        return replace(self, balance=balance, key_matrices=key_matrices)

    def check_fits(self, model: str, revision: str, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Raises `InvalidRequestError` unless the recipe was made for this model, or for any."""
        if self.origin.revision and self.origin.revision != revision:
            raise InvalidRequestError(
                f"the recipe is for {self.origin.model} with weights {self.origin.revision}, and {model} has weights "
                f"{revision}: run `kvtier calibrate` for this model"
            )
        geometry = (num_layers, num_kv_heads, head_dim)
        for name, array in self.arrays.items():
            expected = geometry[: 1 if name == "global_scales" else 3]
            if array.shape[: len(expected)] != expected:
                raise InvalidRequestError(
                    f"{name} of the recipe is {array.shape}; {model} has layers, KV heads and head dimension {geometry}"
                )
        if self.balance is not None and head_dim & (head_dim - 1):
            raise InvalidRequestError(f"head_dim is {head_dim}; the recipe `balanced` needs a power of two, use `full`")

    def save(self, path: Path) -> None:
        """Writes the recipe to `path`, whole or not at all; the same recipe is the same bytes."""
        header = {"format": FILE_FORMAT, "name": self.name.value, "digest": self.digest, "origin": vars(self.origin)}
        # NOTE: safetensors writes an array's bytes in the order of its memory, whatever its strides say, and entries of
        # metadata in random order, so there is one.
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(save(arrays, {"kvtier": json.dumps(header)}))
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> Recipe:
        """The recipe in a file; raises `InvalidRequestError` when there is none, or it is damaged."""
        try:
            with safe_open(path, "np") as file:
                header = json.loads((file.metadata() or {}).get("kvtier", "{}"))
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            if header.get("format") != FILE_FORMAT:
                raise InvalidRequestError(f"{path} is not a recipe of this release; run `kvtier calibrate`")
            recipe = Recipe(RecipeName(header["name"]), **arrays, origin=Origin(**header["origin"]))
            digest = header["digest"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"cannot read a recipe from {path}: {error}") from error
        if recipe.digest != digest:
            raise InvalidRequestError(f"the recipe in {path} is damaged: its digest is not {digest}")
        return recipe


PLAIN = Recipe(RecipeName.PLAIN)
SEARCH = Recipe(RecipeName.SEARCH)


def shipped_recipe(revision: str) -> Recipe | None:
    """The recipe that comes with kvtier for a model's weights, if there is one."""
    for entry in sorted(files("kvtier.recipes").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".safetensors"):
            recipe = Recipe.load(Path(str(entry)))
            if recipe.origin.revision == revision:
                return recipe
    return None


def find_recipe(name: str, revision: str) -> Recipe:
    """The recipe that a user asks for: `plain`, `search`, `shipped` (for these weights, else `search`), or a file."""
    match name:
        case "plain":
            return PLAIN
        case "search":
            return SEARCH
        case "shipped":
            recipe = shipped_recipe(revision)
            if recipe is None:
                _log.warning("kvtier has no recipe for weights %s: using `search`; see `kvtier calibrate`", revision)
            return recipe or SEARCH
        case _:
            return Recipe.load(Path(name))


def _check_matrices(matrices: np.ndarray) -> None:
    if not (matrices.ndim == 4 and matrices.shape[2] == matrices.shape[3]):
        raise InvalidRequestError(
            f"key_matrices of the recipe are {matrices.shape}; they must be (layers, KV heads, head_dim, head_dim)"
        )
    worst = np.linalg.cond(matrices.astype(np.float64)).max()
    if worst > _MAX_CONDITION:
        raise InvalidRequestError(f"key_matrices of the recipe have condition numbers up to {worst:.1e}: no inverse")
