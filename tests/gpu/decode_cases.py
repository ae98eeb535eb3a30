"""Random cases of decode attention in poisoned memory, and their exact results in fp64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kvtier.ops import GlobalScales, OpenPages
from kvtier.ops.reference.gather import read_tokens
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.views import LayerView, layer_view

NAN_SCALE = 0x7F
NO_PAGE = 0x7FFFFFF0
HEAD_DIMS, PAGE_SIZES = (64, 128, 256), (16, 32, 64, 128)


@dataclass(frozen=True)
class DecodeCase:
    """Arguments of one decode. `complete_table` also names the pages before a window, which `page_table` does not."""

    query: torch.Tensor
    view: LayerView
    page_table: torch.Tensor
    complete_table: torch.Tensor
    lengths: torch.Tensor
    scales: GlobalScales
    softmax_scale: float
    sliding_window: int | None
    logit_softcap: float | None
    tail: OpenPages | None

    @property
    def arguments(self) -> tuple[object, ...]:
        """Those of `kvtier.ops.decode_attention`, without a workspace."""
        scaling = (self.softmax_scale, self.sliding_window, self.logit_softcap)
        return (self.query, self.view, self.page_table, self.lengths, self.scales, *scaling, self.tail)


def random_case(seed: int, device: torch.device) -> DecodeCase:
    """Seeds 0 to 383 have every head dimension with every page size, query dtype and group once; the rest is drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    head_dim, page_size = HEAD_DIMS[seed % 3], PAGE_SIZES[seed // 3 % 4]
    dtype = (torch.bfloat16, torch.float16)[seed // 12 % 2]
    group = seed // 24 % 16 + 1
    num_kv_heads = draw.choice((1, 2, 4, 8))
    batch = draw.choice((1, 2, 3, 5, 16, 40, 70))
    longest = draw.choice((40, 300, 3000)) if batch > 3 else draw.choice((100, 2000, 20000))
    lengths = [0 if draw.random() < 0.15 else draw.randint(1, longest) for _ in range(batch)]
    if draw.random() < 0.1:
        lengths = [0] * batch
    tail_lengths: list[int] | None = None
    if draw.random() < 0.5:
        lengths = [length // page_size * page_size for length in lengths]
        tail_lengths = [draw.choice((0, draw.randint(0, page_size), page_size)) for _ in lengths]
    window = draw.choice((None, None, draw.randint(1, longest), draw.randint(1, 100)))
    scales = GlobalScales(draw.choice((1.0, 0.25, 0.0123)), draw.choice((1.0, 0.25, 0.0123)))

    view, complete_table = _poisoned_pages(
        PageLayout(PageFormat.NVFP4, 2, num_kv_heads, head_dim, page_size), lengths, device
    )
    page_table = complete_table.clone()
    for row, length, tail_length in zip(page_table, lengths, tail_lengths or [0] * batch, strict=True):
        first = max(0, length + tail_length - window) if window else 0
        row[: (first if first < length else length + page_size - 1) // page_size] = NO_PAGE
    query = torch.randn(batch, num_kv_heads * group, head_dim, device=device)
    return DecodeCase(
        (query * draw.choice((1.0, 6.0)) / scales.k**0.5).to(dtype),
        view,
        page_table,
        complete_table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        scales,
        draw.choice((head_dim**-0.5, 0.05)),
        window,
        draw.choice((None, None, 30.0, 5.0)),
        None if tail_lengths is None else _poisoned_tail(tail_lengths, page_size, num_kv_heads, head_dim, device),
    )


def _poisoned_pages(layout: PageLayout, lengths: list[int], device: torch.device) -> tuple[LayerView, torch.Tensor]:
    """Random codes; NaN as the block scales of foreign pages and of places past a length."""
    pages_of = [-(-length // layout.page_size) for length in lengths]
    num_pages = sum(pages_of) + 9
    pool = torch.randint(0, 256, (num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    view = layer_view(pool, layout, 1)
    order = torch.randperm(num_pages, device=device).int()
    table = torch.full((len(lengths), max(pages_of) + 2), NO_PAGE, dtype=torch.int32, device=device)
    is_token = torch.zeros(num_pages, layout.page_size, dtype=torch.bool, device=device)
    for row, length, count in zip(table, lengths, pages_of, strict=True):
        row[:count], order = order[:count], order[count:]
        is_token[row[:count].long()] = True
        if length % layout.page_size:
            is_token[int(row[count - 1]), length % layout.page_size :] = False
    for region in (view.k_scales, view.v_scales):
        scales = torch.randint(0x28, 0x39, region.shape, dtype=torch.uint8, device=device)
        region.view(torch.uint8).copy_(torch.where(is_token[:, None, :, None], scales, NAN_SCALE))
    return view, table


def _poisoned_tail(
    lengths: list[int], page_size: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> OpenPages:
    shape = (2, len(lengths), page_size, num_kv_heads, head_dim)
    key, value = torch.randn(shape, dtype=torch.bfloat16, device=device)
    for index, length in enumerate(lengths):
        key[index, length:] = value[index, length:] = torch.nan
    return OpenPages(key, value, torch.tensor(lengths, dtype=torch.int32, device=device))


def exact_attention(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in fp64 on the values that the pages and the open pages hold."""
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    lse = torch.full(case.query.shape[:2], -torch.inf, dtype=torch.float64, device=case.query.device)
    for index, length in enumerate(case.lengths.tolist()):
        pages = read_tokens(case.view, case.complete_table[index], 0, length, GlobalScales(), torch.float32)
        key, value = pages.key.double() * case.scales.k, pages.value.double() * case.scales.v
        if case.tail is not None:
            rows = slice(int(case.tail.lengths[index]))
            key = torch.cat((key, case.tail.key[index, rows].double()))
            value = torch.cat((value, case.tail.value[index, rows].double()))
        if len(key) == 0:
            continue
        seen = slice(max(0, len(key) - (case.sliding_window or len(key))), None)
        keys, values = key[seen].transpose(0, 1), value[seen].transpose(0, 1)
        logits = torch.unflatten(case.query[index].double(), 0, (len(keys), -1)) @ keys.transpose(1, 2)
        logits = logits * case.softmax_scale
        if case.logit_softcap is not None:
            logits = case.logit_softcap * torch.tanh(logits / case.logit_softcap)
        out[index] = (logits.softmax(-1) @ values).flatten(0, 1)
        lse[index] = logits.logsumexp(-1).flatten()
    return out, lse
