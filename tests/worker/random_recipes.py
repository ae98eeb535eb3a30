"""Recipes with random transforms for the tiny models: only that they act is of interest, not what they gain."""

from __future__ import annotations

import numpy as np

from kvtier.pages.recipe import PLAIN, SEARCH, Recipe, RecipeName
from kvtier.worker.model import WorkerModel


def random_recipe(name: RecipeName, model: WorkerModel) -> Recipe:
    """A recipe of this name that fits `model`; matrices have condition numbers of about 3."""
    num_layers, num_kv_heads, head_dim, _ = model.geometry
    random = np.random.default_rng(7)
    spread = np.exp(random.uniform(-0.6, 0.6, (num_layers, num_kv_heads, head_dim)))
    match name:
        case RecipeName.PLAIN:
            return PLAIN
        case RecipeName.SEARCH:
            return SEARCH
        case RecipeName.BALANCED:
            return Recipe(name, balance=spread.astype(np.float32))
        case RecipeName.FULL:
            rotations, _ = np.linalg.qr(random.normal(size=(*spread.shape, head_dim)))
            keys = rotations * spread[..., None, :]
            return Recipe(name, key_matrices=keys.astype(np.float16))
