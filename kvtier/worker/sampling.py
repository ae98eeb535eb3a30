"""How the next token is chosen from the logits."""

from __future__ import annotations

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
    """Draws the tokens of one request, one after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def next_token(self, logits: torch.Tensor) -> int:
        """A token id from logits `(vocabulary,)`."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double() / self._sampling.temperature, dim=-1)
        likeliest, token_ids = probabilities.sort(descending=True)
        likelier = likeliest.cumsum(0) - likeliest  # what the tokens before each one make up
        probabilities[token_ids[likelier >= self._sampling.top_p]] = 0
        # One uniform number against the sums in order of the vocabulary: logits that differ in their last bits alone
        # draw the same token, which they would not if the order were that of the probabilities.
        sums = probabilities.cumsum(0)
        drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * sums[-1]
        return int(torch.searchsorted(sums, drawn, right=True))
