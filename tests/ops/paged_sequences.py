"""Sequences in the pages of a poisoned pool, for tests of the operations on pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.ops import GlobalScales, quantize_append, round_trip
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.views import LayerView, layer_view

POISON = 0xFF  # NaN as a block scale, as an FP8 value and, doubled, as a BF16 value
LAYER = 1
UNEQUAL_SCALES = GlobalScales(k=0.5, v=2.0)


@dataclass(frozen=True)
class PagedSequences:
    """K and V of several sequences in layer 1 of a pool whose other bytes are all poison.

    `keys[b]` and `values[b]` are what the pages give back in fp32, `(lengths[b], Hkv, D)`. Pages are in random order,
    with foreign pages between them; entries of the page table past a sequence's length name no page.
    """

    view: LayerView
    page_table: torch.Tensor
    lengths: torch.Tensor
    scales: GlobalScales
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged_sequences(
    page_format: PageFormat,
    lengths: Sequence[int],
    *,
    page_size: int = 16,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    scales: GlobalScales = UNEQUAL_SCALES,
) -> PagedSequences:
    """Random sequences of these lengths, written by `quantize_append`."""
    generator = torch.Generator().manual_seed(11)
    layout = PageLayout(page_format, LAYER + 2, num_kv_heads, head_dim, page_size)
    pages_of = [-(-length // page_size) for length in lengths]
    order = torch.randperm(2 * sum(pages_of) + 1, generator=generator)
    pool = torch.full((len(order), layout.page_bytes), POISON, dtype=torch.uint8)
    view = layer_view(pool, layout, LAYER)
    page_table = torch.full((len(lengths), max(pages_of)), -1, dtype=torch.int32)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for row, length, num_pages in zip(page_table, lengths, pages_of, strict=True):
        pages, order = order[:num_pages], order[num_pages:]
        row[:num_pages] = pages
        slots = (pages.unsqueeze(1) * page_size + torch.arange(page_size)).flatten()[:length]
        key, value = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
        quantize_append(view, key, value, slots, scales)
        keys.append(round_trip(key, page_format, scales.k))
        values.append(round_trip(value, page_format, scales.v))
    return PagedSequences(view, page_table, torch.tensor(lengths, dtype=torch.int32), scales, keys, values)
