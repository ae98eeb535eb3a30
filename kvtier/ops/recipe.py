"""A recipe as the operations take it: by layer, on the device of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.ops.reference.codec import GlobalScales
from kvtier.ops.reference.transform import Balance, Matrices, Transform
from kvtier.pages.recipe import BlockScales, Recipe


@dataclass(frozen=True)
class LayerRecipe:
    """How one layer's values become codes: `transform` of K and Q, block scales, and global scales of K and V."""

    scales: GlobalScales = GlobalScales()
    block_scales: BlockScales = BlockScales.LARGEST
    transform: Transform | None = None


def layer_recipes(recipe: Recipe, num_layers: int, dtype: torch.dtype, device: torch.device) -> list[LayerRecipe]:
    """`recipe` for each layer of a model whose K and Q have `dtype`."""
    return [
        LayerRecipe(_scales_of(recipe, layer), recipe.block_scales, _transform_of(recipe, layer, dtype, device))
        for layer in range(num_layers)
    ]


def _scales_of(recipe: Recipe, layer: int) -> GlobalScales:
    return GlobalScales() if recipe.global_scales is None else GlobalScales(*recipe.global_scales[layer].tolist())


def _transform_of(recipe: Recipe, layer: int, dtype: torch.dtype, device: torch.device) -> Transform | None:
    if recipe.balance is not None:
        return Balance.of(torch.from_numpy(recipe.balance[layer]).to(device))
    if recipe.key_matrices is not None and recipe.query_matrices is not None:
        key, query = recipe.key_matrices[layer], recipe.query_matrices[layer]
        # NOTE: not bfloat16, whose rounding would leave the two far from each other's inverse.
        matrix_dtype = torch.float32 if dtype is torch.float32 else torch.float16
        # NOTE: contiguous, for numpy keeps the strides of a transposed array, and torch those of numpy.
        return Matrices(*(torch.from_numpy(each).to(device, matrix_dtype).contiguous() for each in (key, query)))
    return None
