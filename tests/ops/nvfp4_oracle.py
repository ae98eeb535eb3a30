"""NVFP4 quantisation of one block, value by value, written from the format's definition and not from kvtier's code.

Only the operations that the format defines in fp32 are done in fp32 (numpy scalars, correctly rounded); every rounding
to a smaller format is the nearest of an enumerated list of exact fractions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def _e4m3_magnitude(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) / 2**6
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [_e4m3_magnitude(code) for code in range(127)]  # code 127 is NaN
E2M1 = [Fraction(half, 2) for half in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest(grid: list[Fraction], value: np.float32) -> int:
    """Index of the entry of `grid` nearest to `value`, the even index at a tie, the last one beyond the end."""
    if np.isinf(value):
        return len(grid) - 1
    exact = Fraction(float(value))
    above = bisect_left(grid, exact)
    if above == 0 or above == len(grid):
        return min(above, len(grid) - 1)
    below = above - 1
    to_below, to_above = exact - grid[below], grid[above] - exact
    if to_below == to_above:
        return below if below % 2 == 0 else above
    return below if to_below < to_above else above


def quantize_block(block: Sequence[np.float32], global_scale: float) -> tuple[bytes, int]:
    """8 bytes of codes and the scale's byte for 16 fp32 values."""
    g = np.float32(global_scale)
    amax = np.float32(0)
    for value in block:
        if not np.isnan(value) and abs(value) > amax:
            amax = abs(value)
    scale_code = nearest(E4M3, amax / (np.float32(6) * g))
    step = np.float32(float(E4M3[scale_code])) * g
    reciprocal = np.float32(0) if step == 0 else np.float32(1) / step
    codes = []
    for value in block:
        magnitude = abs(value * reciprocal)
        code = 0 if np.isnan(magnitude) else nearest(E2M1, magnitude)
        codes.append(code + 8 * int(np.signbit(value)))
    return bytes(codes[2 * pair] + 16 * codes[2 * pair + 1] for pair in range(8)), scale_code


def quantize_rows(rows: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes `(rows, D/2)` and scale bytes `(rows, D/16)` of fp32 `rows`."""
    blocks = rows.reshape(-1, 16)
    with np.errstate(over="ignore", invalid="ignore"):
        quantized = [quantize_block(list(block), global_scale) for block in blocks]
    data = np.frombuffer(b"".join(codes for codes, _ in quantized), dtype=np.uint8).reshape(len(rows), -1)
    scales = np.array([scale for _, scale in quantized], dtype=np.uint8).reshape(len(rows), -1)
    return data, scales


def dequantize_rows(data: np.ndarray, scales: np.ndarray, global_scale: float) -> np.ndarray:
    """fp32 values `(rows, D)`: the exact product of code and scale, times the fp32 global scale, rounded once."""
    values = np.empty((len(data), 2 * data.shape[1]), dtype=np.float32)
    for row, codes in enumerate(data):
        for element in range(values.shape[1]):
            code = int(codes[element // 2]) >> (4 * (element % 2)) & 0xF
            exact = float(E2M1[code & 7] * E4M3[int(scales[row, element // 16])])
            values[row, element] = np.float32(-exact if code & 8 else exact) * np.float32(global_scale)
    return values
