"""`gather_dequantize`: prefixes from scattered pages into one workspace."""

from __future__ import annotations

import pytest
import torch
from paged_sequences import paged_sequences

from kvtier.errors import InvalidRequestError
from kvtier.ops import GlobalScales, Workspace, gather_dequantize
from kvtier.pages.layout import PageFormat

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]
UNTOUCHED = 7.0


def _workspace(num_rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Workspace:
    key, value = torch.full((2, num_rows, heads, head_dim), UNTOUCHED).to(dtype)
    return Workspace(key, value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 16), (32, 64), (64, 128), (128, 256)])
def test_rows_are_what_the_pages_give_back(
    page_format: PageFormat, dtype: torch.dtype, page_size: int, head_dim: int
) -> None:
    lengths = [page_size, 0, 1, 2 * page_size + 5, page_size - 1]
    sequences = paged_sequences(page_format, lengths, page_size=page_size, head_dim=head_dim)
    room = 3  # rows left free behind each prefix
    starts = torch.tensor([1 + sum(lengths[:index]) + room * index for index in range(len(lengths))], dtype=torch.int32)
    num_rows = int(starts[-1]) + lengths[-1] + room
    workspace = _workspace(num_rows, 2, head_dim, dtype)
    expected = _workspace(num_rows, 2, head_dim, dtype)
    for start, key, value in zip(starts.tolist(), sequences.keys, sequences.values, strict=True):
        expected.key[start : start + len(key)] = key.clamp(-448, 448).to(dtype)
        expected.value[start : start + len(value)] = value.clamp(-448, 448).to(dtype)
    gather_dequantize(sequences.view, sequences.page_table, sequences.lengths, starts, sequences.scales, workspace)
    assert torch.equal(_bytes(workspace.key), _bytes(expected.key))
    assert torch.equal(_bytes(workspace.value), _bytes(expected.value))


def test_fp8_workspace_of_fp8_pages_has_the_same_bytes() -> None:
    sequences = paged_sequences(PageFormat.FP8, [16], scales=GlobalScales())
    workspace = _workspace(16, 2, 64, torch.float8_e4m3fn)
    gather_dequantize(
        sequences.view, sequences.page_table, sequences.lengths, torch.tensor([0]), sequences.scales, workspace
    )
    page = int(sequences.page_table[0, 0])
    assert torch.equal(_bytes(workspace.key), _bytes(sequences.view.k_data[page].transpose(0, 1)))


def test_fp8_workspace_saturates() -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [16], scales=GlobalScales())
    page = int(sequences.page_table[0, 0])
    sequences.view.k_scales[page] = torch.tensor(448.0).to(torch.float8_e4m3fn)
    sequences.view.k_data[page] = 0xF7
    workspace = _workspace(16, 2, 64, torch.float8_e4m3fn)
    gather_dequantize(
        sequences.view, sequences.page_table, sequences.lengths, torch.tensor([0]), sequences.scales, workspace
    )
    assert workspace.key.float().unique().tolist() == [-448.0, 448.0]


@pytest.mark.parametrize(
    ("starts", "message"),
    [([0, 1], "rows 1 to 21 do not fit in a workspace of 20 rows"), ([-1, 0], "rows -1 to 2 do not fit")],
)
def test_rows_outside_the_workspace_are_refused(starts: list[int], message: str) -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [3, 20])
    with pytest.raises(InvalidRequestError, match=message):
        gather_dequantize(
            sequences.view,
            sequences.page_table,
            sequences.lengths,
            torch.tensor(starts),
            sequences.scales,
            _workspace(20, 2, 64, torch.float32),
        )


@pytest.mark.parametrize(
    ("page", "length", "message"),
    [(-1, 5, r"names pages \[-1\] of a pool of 3"), (3, 5, r"names pages \[3\]"), (0, 17, "17 tokens need 2 pages")],
)
def test_page_tables_that_name_no_page_are_refused(page: int, length: int, message: str) -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [16])
    with pytest.raises(InvalidRequestError, match=message):
        gather_dequantize(
            sequences.view,
            torch.tensor([[page]], dtype=torch.int32),
            torch.tensor([length]),
            torch.tensor([0]),
            sequences.scales,
            _workspace(20, 2, 64, torch.float32),
        )
