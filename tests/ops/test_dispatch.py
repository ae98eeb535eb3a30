"""Who runs an operation where."""

from __future__ import annotations

import pytest
import torch

from kvtier.ops.cuda.variants import SHARED_BYTES_A_BLOCK, decode_variant
from kvtier.ops.dispatch import (
    Choice,
    DecodeCase,
    Implementation,
    Platform,
    PrefillCase,
    choose_append,
    choose_decode,
    choose_gather,
    choose_multiply,
    choose_prefill,
    platform_of,
)
from kvtier.pages.layout import PageFormat

CPU = Platform(None, False, False)
HOPPER = Platform((9, 0), True, True)
BF16, FP16 = torch.bfloat16, torch.float16
PREFILL = PrefillCase(128, BF16, has_window=False, has_softcap=False)
NVFP4 = DecodeCase(PageFormat.NVFP4, 128, 8, BF16, False)


def _choices_with_kernels(platform: Platform) -> list[Choice]:
    return [
        choose_append(platform, BF16, BF16),
        choose_gather(platform, BF16),
        choose_multiply(platform, BF16, FP16, 128),
        choose_decode(platform, NVFP4),
    ]


def test_without_a_gpu_everything_is_the_reference() -> None:
    assert platform_of(torch.device("cpu")) == CPU
    choices = [choose_append(CPU, BF16, BF16), choose_gather(CPU, BF16), choose_multiply(CPU, BF16, FP16, 128)]
    choices += [choose_decode(CPU, NVFP4._replace(page_format=page_format)) for page_format in PageFormat]
    assert {choice.implementation for choice in choices} == {Implementation.REFERENCE}
    assert {choice.reason for choice in choices} == {"there is no NVIDIA GPU"}


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_kernels_run_from_sm80_on_and_say_where_they_have_not_run(capability: tuple[int, int]) -> None:
    platform = Platform(capability, True, True)
    for choice in _choices_with_kernels(platform):
        assert choice.implementation is Implementation.KERNEL
        assert ("not run on one like it" in choice.reason) == (capability != (9, 0))


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (Platform((7, 5), True, False), "kernels need compute capability 8.0"),
        (Platform((9, 0), False, True), "cuda-core is missing: pip install 'kvtier[gpu]'"),
    ],
)
def test_a_gpu_that_cannot_run_kernels_gets_the_reference(platform: Platform, reason: str) -> None:
    for choice in _choices_with_kernels(platform):
        assert (choice.implementation, choice.reason) == (Implementation.REFERENCE, reason)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (NVFP4._replace(head_dim=80), "head dimensions 64, 128, 256"),
        (NVFP4._replace(group=17), "up to 16 query heads a KV head"),
        (NVFP4._replace(query_dtype=torch.float32), "BF16 and FP16 queries"),
        (NVFP4._replace(page_format=PageFormat.FP8, has_tail=True, has_window=True), "window does not end behind"),
        (NVFP4._replace(page_format=PageFormat.BF16, head_dim=80), "no kernel for this head dimension"),
    ],
)
def test_what_no_kernel_covers_is_the_reference(case: DecodeCase, reason: str) -> None:
    choice = choose_decode(HOPPER, case)
    assert choice.implementation is Implementation.REFERENCE and reason in choice.reason


@pytest.mark.parametrize(
    ("dtype", "matrix_dtype", "head_dim", "reason"),
    [
        (BF16, FP16, 96, "head dimensions 64, 128, 256"),
        (torch.float32, torch.float32, 128, "BF16 and FP16, and matrices in FP16"),
        (BF16, BF16, 128, "BF16 and FP16, and matrices in FP16"),
    ],
)
def test_products_that_no_kernel_covers_are_the_reference(
    dtype: torch.dtype, matrix_dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    choice = choose_multiply(HOPPER, dtype, matrix_dtype, head_dim)
    assert choice.implementation is Implementation.REFERENCE and reason in choice.reason
    assert choose_multiply(HOPPER, FP16, FP16, 256).implementation is Implementation.KERNEL


def test_unusual_dtypes_of_the_codec_are_the_reference() -> None:
    for choice in (
        choose_append(HOPPER, torch.float32, torch.float32),
        choose_append(HOPPER, BF16, torch.float16),
        choose_gather(HOPPER, torch.float32),
    ):
        assert choice.implementation is Implementation.REFERENCE


@pytest.mark.parametrize("page_format", [PageFormat.FP8, PageFormat.BF16])
def test_other_formats_decode_through_flashinfer_where_it_is(page_format: PageFormat) -> None:
    case = NVFP4._replace(page_format=page_format)
    assert choose_decode(HOPPER, case).implementation is Implementation.FLASHINFER
    without = choose_decode(HOPPER._replace(has_flashinfer=False), case)
    assert without.implementation is Implementation.REFERENCE and "FlashInfer is missing" in without.reason


@pytest.mark.parametrize(
    ("platform", "case", "implementation", "reason"),
    [
        (CPU, PREFILL, Implementation.REFERENCE, "no NVIDIA GPU"),
        (Platform((7, 5), True, True), PREFILL, Implementation.REFERENCE, "compute capability 8.0"),
        (HOPPER, PREFILL, Implementation.TORCH, "without window and soft-cap"),
        (HOPPER._replace(has_flashinfer=False), PREFILL._replace(head_dim=96), Implementation.TORCH, "causal"),
        (HOPPER, PREFILL._replace(query_dtype=torch.float32), Implementation.REFERENCE, "BF16 and FP16"),
        (HOPPER, PREFILL._replace(head_dim=512), Implementation.REFERENCE, "heads up to 256"),
        (HOPPER, PREFILL._replace(has_window=True), Implementation.FLASHINFER, "no window"),
        (HOPPER, PREFILL._replace(has_softcap=True), Implementation.FLASHINFER, "no soft-cap"),
        (HOPPER, PREFILL._replace(has_window=True, head_dim=96), Implementation.REFERENCE, "64, 128, 256"),
        (Platform((9, 0), True, False), PREFILL._replace(has_softcap=True), Implementation.REFERENCE, "is missing"),
    ],
)
def test_who_prefills(platform: Platform, case: PrefillCase, implementation: Implementation, reason: str) -> None:
    choice = choose_prefill(platform, case)
    assert choice.implementation is implementation and reason in choice.reason


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES_A_BLOCK.values(), ids=SHARED_BYTES_A_BLOCK)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", range(1, 17))
def test_decode_variants_fit_in_shared_memory(shared_bytes: int, head_dim: int, group: int) -> None:
    variant = decode_variant(head_dim, group, shared_bytes)
    assert variant.head_tiles * 8 >= group
    assert variant.num_warps >= 2
    assert variant.shared_bytes + 4096 <= shared_bytes
