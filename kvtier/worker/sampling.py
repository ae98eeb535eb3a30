"""How the next token is chosen from the logits."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from kvtier.errors import InvalidRequestError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token; any other draws from the likeliest tokens that make up `top_p`.

    The same seed draws the same tokens from the same logits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InvalidRequestError(f"temperature is {self.temperature}; use 0 for greedy or a positive number")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


class Sampler:
    """The tokens of one request, one after the other.

    Attributes:
        sampling: how they are chosen.
        uniform: from 0 to 1, what decides about the next token.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self.advance()

    def advance(self) -> None:
        """Goes on to the token behind the next one."""
        self.uniform = float(torch.rand((), dtype=torch.float64, generator=self._generator))


def choose_tokens(
    logits: torch.Tensor, likeliest: torch.Tensor, rows: Items[int], samplers: Items[Sampler]
) -> list[int]:
    """A token id for every sampler, which stays where it is; waits for a GPU that still computes the logits.

    Args:
        logits: `(R, vocabulary)`.
        likeliest: `(R,)` int64, their largest.
        rows: the row of the logits of each sampler.
    """
    of_row = likeliest.tolist()
    tokens = [of_row[row] for row in rows]
    drawing = [index for index, sampler in enumerate(samplers) if sampler.sampling.temperature > 0]
    if drawing:
        drawn = _draw(logits[[rows[index] for index in drawing]], [samplers[index] for index in drawing])
        for index, token in zip(drawing, drawn, strict=True):
            tokens[index] = token
    return tokens


def _draw(logits: torch.Tensor, samplers: Items[Sampler]) -> list[int]:
    """A token id for each row of logits `(N, vocabulary)`."""
    numbers = [(sampler.sampling.temperature, sampler.sampling.top_p, sampler.uniform) for sampler in samplers]
    temperature, top_p, uniform = torch.tensor(numbers, dtype=torch.float64).to(logits.device).T.unsqueeze(-1)
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    likeliest, token_ids = probabilities.sort(dim=-1, descending=True)
    likelier = likeliest.cumsum(-1) - likeliest  # what the tokens before each one make up
    kept = probabilities.scatter(-1, token_ids, likeliest.masked_fill(likelier >= top_p, 0))
    # One uniform number against the sums in order of the vocabulary: logits that differ in their last bits alone draw
    # the same token, which they would not if the order were that of the probabilities.
    sums = kept.cumsum(-1)
    drawn: list[int] = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)[:, 0].tolist()
    return drawn
