"""Decode attention of FP8 and BF16 pages on a GPU: FlashInfer where it is installed, and else the reference."""

from __future__ import annotations

import pytest
import torch

from kvtier import ops
from kvtier.ops import GlobalScales
from kvtier.ops.reference import attention as reference
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.views import layer_view


@pytest.mark.parametrize("page_format", [PageFormat.FP8, PageFormat.BF16])
def test_ragged_batch_equals_the_reference(device: torch.device, page_format: PageFormat) -> None:
    torch.manual_seed(0)
    layout, scales = PageLayout(page_format, 2, 8, 128, 64), GlobalScales(0.5, 2.0)
    pool = torch.zeros(24, layout.page_bytes, dtype=torch.uint8, device=device)
    view = layer_view(pool, layout, 1)
    slots = torch.arange(24 * 64, device=device)
    key, value = torch.randn(2, len(slots), 8, 128, dtype=torch.bfloat16, device=device)
    ops.quantize_append(view, key, value, slots, scales)
    table = torch.randperm(24, device=device).int().view(4, 6)
    lengths = torch.tensor([0, 1, 64, 301], dtype=torch.int32, device=device)
    query = torch.randn(4, 64, 128, dtype=torch.bfloat16, device=device)
    found = ops.decode_attention(query, view, table, lengths, scales, 128**-0.5)
    expected = reference.decode_attention(query.float(), view, table, lengths, scales, 128**-0.5)
    assert float((found.out.float() - expected.out).norm() / expected.out.norm()) <= 5e-3
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=2e-3)
