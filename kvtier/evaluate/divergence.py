"""How far next-token distributions lie from those of the unquantised model, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_SLICE_ELEMENTS = 1 << 22  # of logits at a time in fp64: bounds the memory under vocabularies of any size


class PositionScores(NamedTuple):
    """Scores of positions, each `(positions,)` fp64.

    Attributes:
        loss: negative log-likelihood of the token that follows in the text, in nats.
        exact_loss: the same under the unquantised model.
        divergence: Kullback-Leibler divergence from the unquantised model's distribution, in nats.
        agrees: 1 where the likeliest token is the unquantised model's, else 0.
    """

    loss: NDArray[np.float64]
    exact_loss: NDArray[np.float64]
    divergence: NDArray[np.float64]
    agrees: NDArray[np.float64]


def compare(exact: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> PositionScores:
    """Scores of `logits` against `exact`, both `(positions, vocabulary)`; `following` `(positions,)` are token ids."""
    num_rows = max(1, _SLICE_ELEMENTS // exact.shape[1])
    slices = [slice(start, start + num_rows) for start in range(0, len(exact), num_rows)]
    return concatenate([_compare_slice(exact[rows], logits[rows], following[rows]) for rows in slices])


def concatenate(parts: Sequence[PositionScores]) -> PositionScores:
    """One behind the other."""
    return PositionScores(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _compare_slice(exact: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> PositionScores:
    exact_log, log = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    divergence = (exact_log.exp() * (exact_log - log)).sum(-1)
    rows = torch.arange(len(following))
    agrees = exact.argmax(-1) == logits.argmax(-1)
    scores = (-log[rows, following], -exact_log[rows, following], divergence, agrees.double())
    return PositionScores(*(score.numpy() for score in scores))
