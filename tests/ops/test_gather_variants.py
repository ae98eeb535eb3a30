"""How a gather is spread over thread blocks."""

from __future__ import annotations

import pytest
import torch

from kvtier.ops.cuda.variants import GATHER_THREADS, GatherVariant
from kvtier.pages.layout import PageFormat

FP8 = torch.float8_e4m3fn
RESIDENT_BLOCKS = 528  # of an H200


def _values(
    num_tokens: int, page_format: PageFormat = PageFormat.NVFP4, dtype: torch.dtype = FP8, page_size: int = 64
) -> int:
    smallest = GatherVariant(page_format, dtype, 128, page_size, True, values=32)
    return smallest.for_launch(8, 2 * num_tokens // page_size, RESIDENT_BLOCKS).values


@pytest.mark.parametrize(
    ("num_tokens", "values"), [(64, 32), (4_096, 32), (4_224, 32), (4_288, 64), (8_192, 64), (8_512, 32), (1 << 20, 32)]
)
def test_thread_blocks_are_large_where_two_turns_become_one(num_tokens: int, values: int) -> None:
    assert _values(num_tokens) == values


def test_other_thread_blocks_stay_small() -> None:
    assert _values(8_192, dtype=torch.bfloat16) == 32
    assert _values(8_192, page_format=PageFormat.FP8) == 32
    assert _values(8_192, page_size=16) == 32, "a page's K is no more than a small block makes"


@pytest.mark.parametrize("values", [32, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_thread_blocks_cover_a_page(values: int, num_kv_heads: int, head_dim: int) -> None:
    variant = GatherVariant(PageFormat.NVFP4, FP8, head_dim, 64, True, values)
    made, wanted = GATHER_THREADS * values, num_kv_heads * 64 * head_dim
    blocks = variant.blocks_a_side(num_kv_heads)
    assert (blocks - 1) * made < wanted <= blocks * made
