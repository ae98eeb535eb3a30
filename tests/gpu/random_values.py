"""Random values of many kinds, in blocks as the codec sees them: what a kernel must round like the reference."""

from __future__ import annotations

import torch

from kvtier.ops.reference.fp8 import to_e4m3

KINDS = (
    "normal",
    "heavy tails",
    "constant",
    "zeros",
    "signed zeros",
    "infinities",
    "NaN",
    "all specials",
    "subnormal",
    "least scales",
    "greatest scales",
    "ties",
)


def random_values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values of a kind as `dtype`: bfloat16, float16 or float8_e4m3fn."""
    values = _fp32(kind, shape, generator)
    if dtype is not torch.float8_e4m3fn:
        return values.to(dtype)
    nan_codes = torch.where(torch.signbit(values), 0xFF, 0x7F).to(torch.uint8)
    codes = to_e4m3(values.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)).view(torch.uint8)
    return torch.where(values.isnan(), nan_codes, codes).view(dtype)


def _fp32(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    row = (*shape[:-1], 1)

    def normal(of: tuple[int, ...] = shape) -> torch.Tensor:
        return torch.randn(of, device=device, generator=generator)

    def uniform(of: tuple[int, ...] = shape) -> torch.Tensor:
        return torch.rand(of, device=device, generator=generator)

    def one_of(*choices: float) -> torch.Tensor:
        return torch.tensor(choices, device=device)[(uniform() * len(choices)).long()]

    match kind:
        case "normal":
            return normal()
        case "heavy tails":
            return torch.tan(torch.pi * (uniform() - 0.5))
        case "constant":
            return (3 * normal(row)).expand(shape)
        case "zeros":
            return torch.zeros(shape, device=device)
        case "signed zeros":
            return torch.where(uniform() < 0.5, one_of(0.0, -0.0), normal())
        case "infinities":
            return torch.where(uniform() < 0.05, one_of(torch.inf, -torch.inf), normal())
        case "NaN":
            return torch.where(uniform() < 0.1, one_of(torch.nan, -torch.nan), normal())
        case "all specials":
            specials = one_of(torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, 1.0)
            return torch.where(uniform() < 0.9, specials, normal())
        case "subnormal":
            return normal() * 1e-40
        case "least scales":
            return normal() * torch.exp2((uniform(row) * 14 - 16).floor())
        case "greatest scales":
            return normal() * torch.exp2((uniform(row) * 10 + 6).floor())
        case "ties":
            midpoints = one_of(6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) * one_of(1.0, -1.0)
            scales = torch.arange(1, 127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
            return midpoints * scales[(uniform(row) * 126).long()] * 0.25
    raise ValueError(kind)
