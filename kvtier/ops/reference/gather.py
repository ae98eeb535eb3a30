"""Bring the tokens of cached prefixes from their pages into one contiguous workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.reference.codec import Encoded, GlobalScales, decode, page_format_of
from kvtier.pages.views import LayerView


class Workspace(NamedTuple):
    """Decoded K and V, each `(tokens, Hkv, D)` of float8_e4m3fn, bfloat16, float16 or float32."""

    key: torch.Tensor
    value: torch.Tensor


def gather_dequantize(
    view: LayerView,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scales: GlobalScales,
    workspace: Workspace,
) -> None:
    """Decodes the first `lengths[b]` tokens of every sequence b to rows `starts[b]` and following of `workspace`.

    Other rows stay as they are, so that room for a new chunk can be left behind each prefix.

    Args:
        view: one layer of the pool, of any page format.
        page_table: `(B, max_pages)` int32, each sequence's page numbers in order; those past its length are not read.
        lengths: `(B,)` int32, tokens of each sequence; 0 is allowed.
        starts: `(B,)` int32, the workspace row of each sequence's first token.
        scales: global scales of this layer.
        workspace: written in place. A float8_e4m3fn workspace holds the values themselves, saturating at 448.

    Raises `InvalidRequestError` when a page lies outside the pool, the table is too short or the workspace too small.
    """
    rows_available = len(workspace.key)
    for page_row, length, start in zip(page_table, lengths.tolist(), starts.tolist(), strict=True):
        end = start + length
        if not 0 <= start <= end <= rows_available:
            raise InvalidRequestError(f"rows {start} to {end} do not fit in a workspace of {rows_available} rows")
        tokens = read_tokens(view, page_row, 0, length, scales, workspace.key.dtype)
        workspace.key[start:end] = tokens.key
        workspace.value[start:end] = tokens.value


def read_tokens(
    view: LayerView, page_row: torch.Tensor, first: int, end: int, scales: GlobalScales, dtype: torch.dtype
) -> Workspace:
    """Decoded tokens `first` to `end - 1` of the sequence with page numbers `page_row`: K and V `(tokens, Hkv, D)`.

    Only the pages that hold these tokens are read.
    """
    num_pages, _, page_size, _ = view.k_data.shape
    first_page, end_page = first // page_size, -(-end // page_size)
    if end_page > len(page_row):
        raise InvalidRequestError(f"{end} tokens need {end_page} pages, but the page table has {len(page_row)}")
    pages = page_row[first_page:end_page].long()
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < num_pages:
        raise InvalidRequestError(f"the page table names pages {pages.tolist()} of a pool of {num_pages}")
    wanted = slice(first - first_page * page_size, end - first_page * page_size)
    page_format = page_format_of(view)

    def rows(region: torch.Tensor) -> torch.Tensor:
        # Packed bytes are reordered, not decoded values: they are fewer, and torch 2.6 cannot index FP8 on CPU.
        return region.view(torch.uint8)[pages].transpose(1, 2).flatten(0, 1)[wanted].view(region.dtype)

    def read(data: torch.Tensor, block_scales: torch.Tensor, global_scale: float) -> torch.Tensor:
        return decode(Encoded(rows(data), rows(block_scales)), page_format, global_scale, dtype)

    return Workspace(read(view.k_data, view.k_scales, scales.k), read(view.v_data, view.v_scales, scales.v))
