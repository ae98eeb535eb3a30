"""`decode_attention` over pages against a dense fp64 oracle, and the merge of partial results."""

from __future__ import annotations

import math

import pytest
import torch
from dense_attention import attend
from paged_sequences import PagedSequences, paged_sequences

from kvtier.errors import InvalidRequestError
from kvtier.ops import AttentionResult, GlobalScales, OpenPages, decode_attention, merge_attention
from kvtier.ops.reference.attention import open_page_attention
from kvtier.pages.layout import PageFormat


def _query(sequences: PagedSequences, group: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    num_heads, head_dim = sequences.keys[0].shape[1:]
    generator = torch.Generator().manual_seed(group)
    return torch.randn(len(sequences.lengths), num_heads * group, head_dim, generator=generator).to(dtype)


def _decode(
    query: torch.Tensor,
    sequences: PagedSequences,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> AttentionResult:
    return decode_attention(
        query,
        sequences.view,
        sequences.page_table,
        sequences.lengths,
        sequences.scales,
        query.shape[-1] ** -0.5,
        sliding_window,
        logit_softcap,
    )


def _assert_equals_oracle(
    query: torch.Tensor,
    sequences: PagedSequences,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> None:
    result = _decode(query, sequences, sliding_window, logit_softcap)
    assert (result.out.dtype, result.lse.dtype) == (query.dtype, torch.float32)
    for index, (key, value) in enumerate(zip(sequences.keys, sequences.values, strict=True)):
        row = slice(index, index + 1)
        expected = attend(query[row], key, value, query.shape[-1] ** -0.5, sliding_window, logit_softcap)
        torch.testing.assert_close(result.out[row].double(), expected.out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(result.lse[row].double(), expected.lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 5, 8])
def test_ragged_batch_equals_the_oracle(page_format: PageFormat, page_size: int, head_dim: int, group: int) -> None:
    lengths = [page_size + 1, 0, 1, page_size, 2 * page_size - 3]
    sequences = paged_sequences(page_format, lengths, page_size=page_size, head_dim=head_dim)
    _assert_equals_oracle(_query(sequences, group), sequences)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("sliding_window", [1, 15, 16, 17, 33, 1000])
@pytest.mark.parametrize("logit_softcap", [None, 0.5])
def test_sliding_window_and_softcap(page_format: PageFormat, sliding_window: int, logit_softcap: float | None) -> None:
    sequences = paged_sequences(page_format, [70, 0, 1, 16, 17, 33])
    _assert_equals_oracle(_query(sequences, 3), sequences, sliding_window, logit_softcap)


def test_softcap_without_a_window_changes_the_result_as_the_oracle_says() -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [70])
    query = _query(sequences, 2)
    _assert_equals_oracle(query, sequences, None, 0.5)
    assert float((_decode(query, sequences).lse - _decode(query, sequences, None, 0.5).lse).abs().max()) > 0.01


def test_a_window_reads_no_page_before_it() -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [70])
    query = _query(sequences, 2)
    before = _decode(query, sequences, 20)
    sequences.page_table[0, :3] = -1  # tokens 0 to 47; the window begins at token 50
    after = _decode(query, sequences, 20)
    assert torch.equal(before.out, after.out) and torch.equal(before.lse, after.lse)


def test_empty_sequences_give_zeros_and_minus_infinity() -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [0, 5, 0])
    result = _decode(_query(sequences, 3), sequences)
    assert result.out[[0, 2]].tolist() == [[[0.0] * 64] * 6] * 2
    assert result.lse[[0, 2]].tolist() == [[-torch.inf] * 6] * 2
    assert bool(result.lse[1].isfinite().all())


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [40, 3, 70])
    query = _query(sequences, 3)
    together = _decode(query, sequences)
    for index in range(3):
        row = slice(index, index + 1)
        alone = decode_attention(
            query[row], sequences.view, sequences.page_table[row], sequences.lengths[row], sequences.scales, 64**-0.5
        )
        assert torch.equal(alone.out, together.out[row]) and torch.equal(alone.lse, together.lse[row])


@pytest.mark.parametrize("logit_softcap", [None, 3.0])
def test_open_pages_alone_are_merged_with_pages_alone(logit_softcap: float | None) -> None:
    sequences = paged_sequences(PageFormat.FP8, [32, 0, 16, 0, 48])
    query = _query(sequences, 3)
    key, value = torch.randn(2, 5, 16, 2, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    lengths = [5, 7, 0, 0, 16]
    for index, length in enumerate(lengths):
        key[index, length:] = value[index, length:] = torch.nan
    tail = OpenPages(key, value, torch.tensor(lengths, dtype=torch.int32))
    pages = (sequences.view, sequences.page_table, sequences.lengths, sequences.scales, 64**-0.5, None, logit_softcap)
    open_pages = open_page_attention(query, tail, 64**-0.5, logit_softcap)
    merged = merge_attention(decode_attention(query, *pages), open_pages)
    together = decode_attention(query, *pages, tail)
    torch.testing.assert_close(merged.out, together.out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(merged.lse, together.lse, rtol=2e-6, atol=2e-6)
    assert not open_pages.out[2:4].any() and (open_pages.lse[2:4] == -torch.inf).all()


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("sliding_window", [None, 1, 9, 25, 1000])
def test_open_pages_are_attended_behind_those_in_the_pool(page_format: PageFormat, sliding_window: int | None) -> None:
    sequences = paged_sequences(page_format, [32, 0, 16, 0, 48])
    query = _query(sequences, 3)
    tail_lengths = [5, 7, 0, 0, 16]
    generator = torch.Generator().manual_seed(4)
    key, value = torch.randn(2, 5, 16, 2, 64, generator=generator).bfloat16()
    for index, length in enumerate(tail_lengths):
        key[index, length:] = value[index, length:] = torch.nan
    tail = OpenPages(key, value, torch.tensor(tail_lengths, dtype=torch.int32))
    pages = (sequences.view, sequences.page_table, sequences.lengths, sequences.scales)
    result = decode_attention(query, *pages, 64**-0.5, sliding_window, None, tail)
    for index, length in enumerate(tail_lengths):
        row = slice(index, index + 1)
        keys = torch.cat((sequences.keys[index], key[index, :length].float()))
        values = torch.cat((sequences.values[index], value[index, :length].float()))
        expected = attend(query[row], keys, values, 64**-0.5, sliding_window)
        torch.testing.assert_close(result.out[row].double(), expected.out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(result.lse[row].double(), expected.lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_query_is_rounded_only_at_the_end(dtype: torch.dtype) -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [70, 0, 16])
    query = _query(sequences, 3, dtype)
    half, full = _decode(query, sequences), _decode(query.float(), sequences)
    assert half.out.dtype == dtype
    assert torch.equal(half.out, full.out.to(dtype)) and torch.equal(half.lse, full.lse)


def test_global_scales_multiply_logits_and_output() -> None:
    plain = paged_sequences(PageFormat.NVFP4, [30], scales=GlobalScales())
    query = _query(plain, 1)
    expected = _decode(2 * query, plain)
    scaled = decode_attention(
        query, plain.view, plain.page_table, plain.lengths, GlobalScales(k=2.0, v=4.0), query.shape[-1] ** -0.5
    )
    torch.testing.assert_close(scaled.out, 4 * expected.out)
    torch.testing.assert_close(scaled.lse, expected.lse)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("split_pages", [0, 1, 3, 5])
def test_merge_of_a_split_equals_the_whole(page_format: PageFormat, split_pages: int) -> None:
    sequences = paged_sequences(page_format, [70, 0, 1, 16, 40])
    query = _query(sequences, 3)
    split = split_pages * 16
    page_table, lengths = sequences.page_table, sequences.lengths

    def part(table: torch.Tensor, tokens: torch.Tensor) -> AttentionResult:
        return decode_attention(query, sequences.view, table, tokens, sequences.scales, 64**-0.5, None, 20.0)

    whole = part(page_table, lengths)
    head = part(page_table[:, :split_pages], lengths.clamp(max=split))
    tail = part(page_table[:, split_pages:], (lengths - split).clamp(min=0))
    for merged in (merge_attention(head, tail), merge_attention(tail, head)):
        torch.testing.assert_close(merged.out, whole.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-6, atol=1e-6)


def test_merge_by_hand() -> None:
    first = AttentionResult(torch.tensor([[[1.0, 2.0]]]).bfloat16(), torch.tensor([[0.0]]))
    second = AttentionResult(torch.tensor([[[5.0, 6.0]]]).bfloat16(), torch.tensor([[math.log(3.0)]]))
    merged = merge_attention(first, second)
    assert merged.out.dtype == torch.bfloat16 and merged.out.tolist() == [[[4.0, 5.0]]]
    torch.testing.assert_close(merged.lse, torch.tensor([[math.log(4.0)]]))


def test_merge_with_extreme_lse_does_not_overflow() -> None:
    first = AttentionResult(torch.ones(1, 1, 2), torch.tensor([[500.0]]))
    second = AttentionResult(3 * torch.ones(1, 1, 2), torch.tensor([[-500.0]]))
    merged = merge_attention(first, second)
    assert merged.out.tolist() == [[[1.0, 1.0]]] and merged.lse.tolist() == [[500.0]]


def test_heads_that_do_not_divide_and_bad_windows_are_refused() -> None:
    sequences = paged_sequences(PageFormat.NVFP4, [5])
    with pytest.raises(InvalidRequestError, match="3 query heads are not a multiple of 2 KV heads"):
        _decode(torch.zeros(1, 3, 64), sequences)
    with pytest.raises(InvalidRequestError, match="sliding_window is 0"):
        _decode(torch.zeros(1, 4, 64), sequences, 0)
