"""Intervals by block bootstrap: neighbouring positions of a text are alike, so they are drawn in blocks.

Blocks go round from the end of a text to its beginning, so that every position is drawn as often (D. N. Politis, J. P.
Romano, A circular block-resampling procedure for stationary data, 1992). Intervals are percentiles of the resampled
statistic. Two configurations are compared by the differences at the same positions, whose interval is far narrower than
those of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
RESAMPLES = 1000
COVERAGE = 0.95
_SEED = 0

Values: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Callable[[Values], Values]
"""Of values `(..., positions)`, one number for each of `(...)`."""


class Interval(NamedTuple):
    """A statistic of all positions, and between what it lies in 95% of the resamples."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


class Resamples:
    """Drawings of positions, with repetition, in blocks of consecutive ones of the same text.

    Attributes:
        positions: `(count, positions)`, the positions of every drawing.
    """

    def __init__(self, lengths: Sequence[int], block_tokens: int = BLOCK_TOKENS, count: int = RESAMPLES) -> None:
        """`lengths` are the positions of each text, whose values stand one behind the other.

        The same lengths give the same drawings, so statistics of different configurations are paired. Blocks are no
        longer than the shortest text.
        """
        block = min(block_tokens, *lengths)
        num_positions = sum(lengths)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)  # of the text, by position
        periods = np.repeat(lengths, lengths)
        drawn = np.random.default_rng(_SEED).integers(num_positions, size=(count, -(-num_positions // block), 1))
        blocks = begins[drawn] + (drawn - begins[drawn] + np.arange(block)) % periods[drawn]
        self.positions = blocks.reshape(count, -1)[:, :num_positions]

    def interval(self, values: Values, statistic: Statistic) -> Interval:
        """`statistic` of `values` `(positions,)` with its interval."""
        tail = (1 - COVERAGE) / 2
        low, high = np.quantile(statistic(values[self.positions]), (tail, 1 - tail))
        return Interval(float(statistic(values)), float(low), float(high))


def mean(values: Values) -> Values:
    result: Values = np.mean(values, axis=-1)
    return result


def percentile_99(values: Values) -> Values:
    result: Values = np.quantile(values, 0.99, axis=-1)
    return result


def exponential_mean(values: Values) -> Values:
    """The perplexity, of negative log-likelihoods; the ratio of two, of their differences."""
    result: Values = np.exp(mean(values))
    return result
