"""`prefill_attention` against a dense fp64 oracle."""

from __future__ import annotations

import pytest
import torch
from dense_attention import attend

from kvtier.errors import InvalidRequestError
from kvtier.ops import prefill_attention
from kvtier.ops.reference.attention import QUERY_CHUNK


def _tensors(
    num_queries: int, num_keys: int, group: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    query = torch.randn(num_queries, 2 * group, head_dim, generator=generator)
    key, value = torch.randn(2, num_keys, 2, head_dim, generator=generator)
    return query, key, value


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (7, 7), (20, 33), (QUERY_CHUNK + 2, 300)])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 64), (5, 128), (8, 256)])
@pytest.mark.parametrize("sliding_window", [None, 1, 16, 200])
@pytest.mark.parametrize("logit_softcap", [None, 2.0])
def test_last_queries_equal_the_oracle(
    num_queries: int,
    num_keys: int,
    group: int,
    head_dim: int,
    sliding_window: int | None,
    logit_softcap: float | None,
) -> None:
    query, key, value = _tensors(num_queries, num_keys, group, head_dim)
    out = prefill_attention(query, key, value, head_dim**-0.5, sliding_window, logit_softcap)
    assert out.dtype == query.dtype
    expected = attend(query, key, value, head_dim**-0.5, sliding_window, logit_softcap).out
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("workspace_dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("logit_softcap", [None, 2.0])
def test_workspace_of_another_dtype_is_cast_to_the_query(
    workspace_dtype: torch.dtype, logit_softcap: float | None
) -> None:
    query, key, value = _tensors(30, 50, 3, 64)
    query, key, value = query.bfloat16(), key.to(workspace_dtype), value.to(workspace_dtype)
    out = prefill_attention(query, key, value, 0.125, None, logit_softcap)
    assert out.dtype == torch.bfloat16
    expected = attend(query, key, value, 0.125, None, logit_softcap).out
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("logit_softcap", [None, 2.0])
def test_later_tokens_do_not_change_earlier_rows(logit_softcap: float | None) -> None:
    query, key, value = _tensors(QUERY_CHUNK + 10, 200, 3, 64)
    before = prefill_attention(query, key, value, 0.125, None, logit_softcap)
    key[-5:], value[-5:] = 3.0, -3.0
    after = prefill_attention(query, key, value, 0.125, None, logit_softcap)
    assert torch.equal(after[:-5], before[:-5])
    assert bool((after[-5:] != before[-5:]).any(-1).all())


def test_more_queries_than_keys_are_refused() -> None:
    query, key, value = _tensors(5, 4, 1, 16)
    with pytest.raises(InvalidRequestError, match="5 queries are more than the 4 tokens"):
        prefill_attention(query, key, value, 0.25)


def test_heads_that_do_not_divide_are_refused() -> None:
    _, key, value = _tensors(5, 5, 1, 16)
    with pytest.raises(InvalidRequestError, match="3 query heads are not a multiple of 2 KV heads"):
        prefill_attention(torch.zeros(5, 3, 16), key, value, 0.25)
