"""The one cast to FP8 that kvtier uses, for block scales, FP8 pages and FP8 workspaces."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """`values` as float8_e4m3fn: nearest, ties to even, saturating at 448 (infinities too); NaN stays NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
