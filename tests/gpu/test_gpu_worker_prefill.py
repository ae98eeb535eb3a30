"""Prefill attention on a GPU against the reference in fp32."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvtier import ops
from kvtier.ops.dispatch import Implementation, PrefillCase, choose_prefill, platform_of
from kvtier.ops.reference import attention as reference

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None


def prefill(
    device: torch.device, num_queries: int, num_keys: int, head_dim: int, group: int, **settings: float | int | None
) -> None:
    torch.manual_seed(num_keys)
    query = torch.randn(num_queries, 2 * group, head_dim, dtype=torch.bfloat16, device=device)
    room = torch.randn(2, num_keys + 9, 2, head_dim, dtype=torch.bfloat16, device=device)
    key, value = room[:, :num_keys]  # as in a workspace, where more follows
    found = ops.prefill_attention(query, key, value, head_dim**-0.5, **settings)
    expected = reference.prefill_attention(query.float(), key.float(), value.float(), head_dim**-0.5, **settings)
    assert found.dtype is torch.bfloat16 and found.shape == query.shape
    assert float((found.float() - expected).norm() / expected.norm()) <= 5e-3


@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (1, 300), (64, 64), (63, 700), (512, 4096), (1000, 1001)]
)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (128, 4), (256, 8), (80, 3)])
def test_flash_attention_equals_the_reference(
    device: torch.device, num_queries: int, num_keys: int, head_dim: int, group: int
) -> None:
    case = PrefillCase(head_dim, torch.bfloat16, False, False)
    assert choose_prefill(platform_of(device), case).implementation is Implementation.TORCH
    prefill(device, num_queries, num_keys, head_dim, group)


def test_flash_attention_makes_no_mask(device: torch.device) -> None:
    query = torch.randn(2048, 8, 128, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, 65536, 2, 128, dtype=torch.bfloat16, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ops.prefill_attention(query, key, value, 128**-0.5)
    assert torch.cuda.max_memory_allocated(device) - before < 2048 * 65536  # bytes of a mask


@pytest.mark.skipif(not HAS_FLASHINFER, reason="FlashInfer is not installed")
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 300), (63, 700), (512, 1024)])
@pytest.mark.parametrize(
    ("sliding_window", "logit_softcap"), [(100, None), (None, 5.0), (1, None), (257, 5.0), (5000, None)]
)
def test_windows_and_soft_caps_equal_the_reference(
    device: torch.device, num_queries: int, num_keys: int, sliding_window: int | None, logit_softcap: float | None
) -> None:
    case = PrefillCase(128, torch.bfloat16, sliding_window is not None, logit_softcap is not None)
    assert choose_prefill(platform_of(device), case).implementation is Implementation.FLASHINFER
    prefill(device, num_queries, num_keys, 128, 4, sliding_window=sliding_window, logit_softcap=logit_softcap)


@pytest.mark.parametrize(("sliding_window", "logit_softcap"), [(100, None), (None, 5.0)])
def test_heads_that_no_kernel_takes_are_the_reference(
    device: torch.device, sliding_window: int | None, logit_softcap: float | None
) -> None:
    case = PrefillCase(96, torch.bfloat16, sliding_window is not None, logit_softcap is not None)
    assert choose_prefill(platform_of(device), case).implementation is Implementation.REFERENCE
    prefill(device, 63, 700, 96, 2, sliding_window=sliding_window, logit_softcap=logit_softcap)
