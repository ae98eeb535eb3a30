"""Choosing tokens from logits."""

from __future__ import annotations

import pytest
import torch

from kvtier.errors import InvalidRequestError
from kvtier.worker.sampling import Sampler, Sampling, choose_tokens

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draws(sampling: Sampling, count: int) -> list[int]:
    sampler = Sampler(sampling)
    tokens = []
    for _ in range(count):
        tokens += choose_tokens(LOGITS[None], LOGITS[None].argmax(-1), [0], [sampler])
        sampler.advance()
    return tokens


def test_temperature_zero_is_greedy() -> None:
    assert draws(Sampling(), 5) == [0] * 5


def test_the_same_seed_draws_the_same_tokens() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    assert draws(sampling, 50) == draws(sampling, 50)
    assert draws(sampling, 50) != draws(Sampling(temperature=1.0, seed=8), 50)


def test_draws_follow_the_probabilities() -> None:
    tokens = draws(Sampling(temperature=1.0, seed=1), 4000)
    shares = [tokens.count(token) / 4000 for token in range(4)]
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_a_low_temperature_prefers_likely_tokens() -> None:
    tokens = draws(
        Sampling(temperature=0.25, seed=1), 1000
    )  # probabilities to the fourth power: 0.88, 0.11, 0.01, 0.00
    assert tokens.count(0) / 1000 == pytest.approx(0.88, abs=0.04)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_make_it_up(top_p: float, kept: set[int]) -> None:
    assert set(draws(Sampling(temperature=1.0, top_p=top_p, seed=1), 500)) == kept


@pytest.mark.parametrize(
    ("values", "message"), [({"temperature": -1.0}, "temperature is -1"), ({"top_p": 0.0}, "top_p is 0")]
)
def test_values_that_mean_nothing_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Sampling(**values)
