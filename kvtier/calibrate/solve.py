"""From second moments to the recipes `balanced` and `full`.

If the error of a block of 16 codes follows the block's energy, the error of logits is the sum over blocks of
tr(Sk_block) tr(Sq_block), with Sk and Sq the second moments of transformed keys and queries. `full` has the matrix that
makes this least among all; `balanced` comes close with a factor for each channel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kvtier.calibrate.hadamard import hadamard
from kvtier.calibrate.moments import Moments
from kvtier.calibrate.rotation import Rotation
from kvtier.errors import InvalidRequestError
from kvtier.pages.recipe import Origin, Recipe, RecipeName

# How much of the moments is of the recorded positions; the rest is spread over the model's whole context. Recorded
# queries count more, because a text that is continued asks from where it ends.
_RECORDED_SHARE_OF_KEYS = 1 / 3
_RECORDED_SHARE_OF_QUERIES = 1 / 2

_DIAGONAL_SHARE = 0.02
_FLOOR = 1e-6  # of the mean energy: a channel without energy would have an infinite factor


class Matrices(NamedTuple):
    """What keys and queries `(..., D)` are multiplied with from the right: `(Hkv, D, D)` each."""

    key: torch.Tensor
    query: torch.Tensor


def check_head_dim(name: RecipeName, head_dim: int) -> None:
    """Raises `InvalidRequestError` when there is no such recipe for this head dimension."""
    if name is RecipeName.BALANCED and head_dim & (head_dim - 1):
        raise InvalidRequestError(f"head_dim is {head_dim}; the recipe `balanced` needs a power of two, use `full`")
    if name is RecipeName.FULL:
        hadamard(head_dim)


def solve_recipe(
    name: RecipeName, moments: Moments, rotations: list[Rotation], num_positions: int, origin: Origin
) -> Recipe:
    """The recipe `balanced` or `full` for a model that has these moments.

    `num_positions` is its largest context. Raises `InvalidRequestError` when the moments are not finite.
    """
    if not (moments.keys.isfinite().all() and moments.queries.isfinite().all()):
        raise InvalidRequestError("queries or keys of the model are not finite; nothing can be calibrated on them")
    layers = [
        (
            regular(mix(keys, rotation, num_positions, _RECORDED_SHARE_OF_KEYS)),
            regular(mix(queries, rotation, num_positions, _RECORDED_SHARE_OF_QUERIES)),
            rotation,
        )
        for keys, queries, rotation in zip(moments.keys, moments.queries, rotations, strict=True)
    ]
    if name is RecipeName.BALANCED:
        return Recipe(name, balance=_fp32([balance_of(*layer) for layer in layers]), origin=origin)
    matrices = torch.stack([matrices_of(keys, queries).key for keys, queries, _ in layers])
    return Recipe(name, key_matrices=matrices.to(torch.float16).numpy(), origin=origin)


def mix(moments: torch.Tensor, rotation: Rotation, num_positions: int, recorded_share: float) -> torch.Tensor:
    """Moments `(Hkv, D, D)` at the recorded positions, and turned to all others."""
    return recorded_share * moments + (1 - recorded_share) * rotation.spread(moments, num_positions)


def regular(moments: torch.Tensor) -> torch.Tensor:
    """Moments `(Hkv, D, D)` with more on the diagonal, so that they are far from singular.

    Eigenvalues are at least 1e-6 of the mean energy and at most their sum: the condition number is below 1.1e6 D, and
    that of `matrices_of`, a geometric mean, below the root of this. It leaves fp32 digits enough for the inverse.
    """
    energies = moments.diagonal(dim1=-2, dim2=-1)
    mean = energies.mean(-1, keepdim=True)
    floor = _FLOOR * torch.where(mean > 0, mean, 1.0)
    return moments + torch.diag_embed(_DIAGONAL_SHARE * energies + floor)


def balance_of(keys: torch.Tensor, queries: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """What keys are divided by and queries multiplied with, `(Hkv, D)`: (E k^2 / E q^2)^(1/4) of each channel.

    Channels that the rotary embedding turns into each other share one factor, so that the division commutes with it,
    and positions do not matter. A factor on all channels would change no logit: the geometric mean of a head is 1, so
    that keys keep their size.
    """
    key, query = (rotation.share_in_planes(moments.diagonal(dim1=-2, dim2=-1)) for moments in (keys, queries))
    logarithms = (key.log() - query.log()) / 4
    return (logarithms - logarithms.mean(-1, keepdim=True)).exp()


def matrices_of(keys: torch.Tensor, queries: torch.Tensor) -> Matrices:
    """M = c A^-1 U S^(1/2) H / sqrt(D) and its inverse, transposed, with A = Sk^(1/2) and A Sq A = U S^2 U^T.

    `keys` and `queries` are Sk and Sq, `(Hkv, D, D)` fp64. M makes both moments proportional to S, and H, a Hadamard
    matrix, spreads that evenly over all channels. A factor changes no logit: c lets keys keep their energy.
    """
    root, inverse_root = _roots(keys)
    squares, vectors = torch.linalg.eigh(root @ queries @ root)
    scales = squares.pow(0.25).unsqueeze(-2)
    spread = hadamard(keys.shape[-1]) / keys.shape[-1] ** 0.5
    energies = keys.diagonal(dim1=-2, dim2=-1).sum(-1) / squares.sqrt().sum(-1)
    factor = energies.sqrt()[:, None, None]
    return Matrices(inverse_root @ (vectors * scales) @ spread * factor, root @ (vectors / scales) @ spread / factor)


def _roots(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric square root of positive definite matrices, and its inverse."""
    squares, vectors = torch.linalg.eigh(moments)
    scales = squares.sqrt().unsqueeze(-2)
    return (vectors * scales) @ vectors.mT, (vectors / scales) @ vectors.mT


def _fp32(layers: list[torch.Tensor]) -> np.ndarray:
    array: np.ndarray = torch.stack(layers).to(torch.float32).numpy()
    return array
