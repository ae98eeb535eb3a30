"""Hadamard matrices of the head dimensions that models have."""

from __future__ import annotations

import torch

from kvtier.errors import InvalidRequestError


def hadamard(order: int) -> torch.Tensor:
    """A matrix `(order, order)` fp64 of 1 and -1 with orthogonal rows.

    Sylvester's doubling of one of order 1, or of q + 1 by Paley's construction with a prime q of the form 4 n + 3.
    Raises `InvalidRequestError` for an order that is not reached so; of multiples of 16 up to 256, that is 112 alone.
    """
    base = order
    while base > 1 and not _is_paley_prime(base - 1):
        if base % 2:
            raise InvalidRequestError(f"head dimension {order}: kvtier knows no Hadamard matrix of this order")
        base //= 2
    matrix = torch.ones(1, 1, dtype=torch.float64) if base == 1 else _paley(base - 1)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def _is_paley_prime(number: int) -> bool:
    return number % 4 == 3 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _paley(prime: int) -> torch.Tensor:
    """I + S of order prime + 1, where S is skew: a row of 1 on top, and whether i - j is a square below."""
    squares = {number * number % prime for number in range(1, prime)}
    character = torch.tensor([0] + [1 if number in squares else -1 for number in range(1, prime)], dtype=torch.float64)
    index = torch.arange(prime)
    skew = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    skew[0, 1:], skew[1:, 0] = 1, -1
    skew[1:, 1:] = character[(index.unsqueeze(1) - index) % prime]
    return skew + torch.eye(prime + 1, dtype=torch.float64)
