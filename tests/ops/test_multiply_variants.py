"""How products with matrices are spread over thread blocks."""

from __future__ import annotations

import pytest
import torch

from kvtier.ops.cuda.variants import MultiplyVariant, multiply_variant

MULTIPROCESSORS = (20, 84, 132)
ROWS = (1, 8, 15, 16, 17, 512, 4_000, 8_192, 65_536, 1_000_003)  # of a KV head


def _variants(num_multiprocessors: int) -> list[MultiplyVariant]:
    num_rows = (1, 1 << 20)
    return [multiply_variant(dim, rows, num_multiprocessors) for dim in (64, 128, 256) for rows in num_rows]


@pytest.mark.parametrize("num_multiprocessors", MULTIPROCESSORS)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 200])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_grid_has_a_place_for_every_row_and_no_idle_block(
    num_multiprocessors: int, num_kv_heads: int, num_rows: int
) -> None:
    for variant in _variants(num_multiprocessors):
        row_blocks, column_blocks, matrices = variant.grid(num_rows, num_kv_heads, num_multiprocessors)
        assert matrices == num_kv_heads
        assert column_blocks * variant.column_warps * 32 == variant.head_dim
        rows_a_block = 16 * variant.row_warps
        assert (row_blocks - 1) * rows_a_block < num_rows
        if not variant.is_persistent:
            assert row_blocks * rows_a_block >= num_rows
        elif row_blocks > 1:
            assert row_blocks * column_blocks * matrices <= num_multiprocessors * variant.blocks_per_sm


@pytest.mark.parametrize("num_multiprocessors", MULTIPROCESSORS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_matrices_are_spread_widely_for_few_rows_alone(head_dim: int, num_multiprocessors: int) -> None:
    few = multiply_variant(head_dim, 16 * num_multiprocessors - 1, num_multiprocessors)
    many = multiply_variant(head_dim, 16 * num_multiprocessors, num_multiprocessors)
    assert (few.column_warps, few.is_persistent) == (1, False)
    assert (many.column_warps * 32, many.is_persistent) == (head_dim, True)


@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "num_query_heads", "num_kv_heads", "grid"),
    [
        (128, 1, 64, 8, (1, 4, 8)),
        (128, 32, 64, 8, (4, 4, 8)),
        (128, 64, 64, 8, (32, 1, 8)),
        (256, 64, 24, 4, (6, 8, 4)),
        (64, 64, 9, 3, (3, 2, 3)),
        (128, 8192, 8, 8, (47, 1, 8)),
    ],
)
def test_grids_of_usual_calls(
    head_dim: int, num_tokens: int, num_query_heads: int, num_kv_heads: int, grid: tuple[int, int, int]
) -> None:
    variant = multiply_variant(head_dim, num_tokens * num_query_heads, 132)
    assert variant.grid(num_tokens * num_query_heads // num_kv_heads, num_kv_heads, 132) == grid


def test_a_thread_block_has_at_most_the_registers_of_a_multiprocessor() -> None:
    for variant in _variants(132):
        registers = 65_536 // (variant.threads * variant.blocks_per_sm)
        assert registers >= variant.head_dim // 2 + variant.head_dim // 4  # columns, and rows being loaded
        assert ("HEAD_DIM", variant.head_dim) in variant.macros(torch.bfloat16)
