"""Which implementation runs an operation on which device, and why.

| device       | quantise, gather, transform | decode of NVFP4 pages | decode of FP8 and BF16 pages |
|--------------|-----------------------------|-----------------------|------------------------------|
| no GPU       | torch reference             | torch reference       | torch reference              |
| SM80 and on  | kvtier's kernels            | kvtier's kernel       | FlashInfer, else reference   |

A prefill on a GPU is torch's flash attention; with a window or a soft-cap, FlashInfer's, else the reference.

The kernels are compiled for SM100 and SM120 too, but have not run there. FlashInfer's own kernels for NVFP4 pages on
these do not compute this operation: trtllm-gen (SM100) takes NVFP4 pages with FP8 queries and FP8 outputs only, whose
rounding alone is ten times the error allowed here, and XQA (SM120) returns no log-sum-exp and knows no soft-cap. Its
fa2 does compute it, but plans on the host, so a step could not be captured in a CUDA graph. See `docs/kernels.md`.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from importlib.util import find_spec
from typing import NamedTuple

import torch

from kvtier.pages.layout import PageFormat

OLDEST_CAPABILITY = (8, 0)
MEASURED_CAPABILITIES = ((9, 0),)  # where the kernels have run
KERNEL_HEAD_DIMS = (64, 128, 256)
KERNEL_MAX_GROUP = 16
_BALANCE_MAX_HEAD_DIM = 512
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_CODEC_DTYPES = (*_KERNEL_DTYPES, torch.float8_e4m3fn)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_FLASH_MAX_HEAD_DIM = 256
_NO_FLASHINFER = "FlashInfer is missing: pip install 'kvtier[gpu]'"


class Implementation(StrEnum):
    """Who computes."""

    REFERENCE = "torch reference"
    KERNEL = "kvtier kernel"
    FLASHINFER = "FlashInfer fa2"
    TORCH = "torch flash attention"


class Choice(NamedTuple):
    """An implementation and the reason for it, as `kvtier doctor` prints it."""

    implementation: Implementation
    reason: str


class Platform(NamedTuple):
    """What a device and its software offer."""

    capability: tuple[int, int] | None  # None: not an NVIDIA GPU
    has_cuda_core: bool
    has_flashinfer: bool


class DecodeCase(NamedTuple):
    """What decides about the implementation of one decode attention."""

    page_format: PageFormat
    head_dim: int
    group: int  # query heads of a KV head
    query_dtype: torch.dtype
    has_tail: bool
    has_window: bool = False


class PrefillCase(NamedTuple):
    """What decides about the implementation of one prefill attention."""

    head_dim: int
    query_dtype: torch.dtype
    has_window: bool
    has_softcap: bool


def _is_installed(*modules: str) -> bool:
    return all(find_spec(module) is not None for module in modules)


@functools.cache
def platform_of(device: torch.device) -> Platform:
    """The platform of a device."""
    if device.type != "cuda":
        return Platform(None, False, False)
    # NOTE: `cuda` is a namespace package that others fill too, so both of its parts are asked for.
    has_cuda_core = _is_installed("cuda") and _is_installed("cuda.core", "cuda.bindings")
    return Platform(torch.cuda.get_device_capability(device), has_cuda_core, _is_installed("flashinfer"))


def _without_kernels(platform: Platform) -> Choice | None:
    """The choice where no kernel can run at all."""
    if platform.capability is None:
        return Choice(Implementation.REFERENCE, "there is no NVIDIA GPU")
    if platform.capability < OLDEST_CAPABILITY:
        return Choice(Implementation.REFERENCE, "kernels need compute capability 8.0")
    if not platform.has_cuda_core:
        return Choice(Implementation.REFERENCE, "cuda-core is missing: pip install 'kvtier[gpu]'")
    return None


def _kernel(platform: Platform, reason: str) -> Choice:
    if platform.capability not in MEASURED_CAPABILITIES:
        reason += "; compiled for this GPU, but not run on one like it"
    return Choice(Implementation.KERNEL, reason)


@functools.cache
def choose_append(platform: Platform, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Choice:
    """Who quantises K and V of these dtypes."""
    if choice := _without_kernels(platform):
        return choice
    if key_dtype is not value_dtype or key_dtype not in _CODEC_DTYPES:
        return Choice(Implementation.REFERENCE, "the kernel takes K and V of one dtype: BF16, FP16 or FP8")
    return _kernel(platform, "K and V in one launch, bit for bit the reference")


@functools.cache
def choose_gather(platform: Platform, workspace_dtype: torch.dtype) -> Choice:
    """Who fills a workspace of this dtype."""
    if choice := _without_kernels(platform):
        return choice
    if workspace_dtype not in _CODEC_DTYPES:
        return Choice(Implementation.REFERENCE, "the kernel writes BF16, FP16 and FP8")
    return _kernel(platform, "K and V in one launch, bit for bit the reference")


@functools.cache
def choose_balance(platform: Platform, dtype: torch.dtype, head_dim: int) -> Choice:
    """Who balances K and Q of this dtype."""
    if choice := _without_kernels(platform):
        return choice
    if dtype not in _KERNEL_DTYPES or head_dim > _BALANCE_MAX_HEAD_DIM:
        return Choice(Implementation.REFERENCE, f"the kernel takes BF16 and FP16, heads up to {_BALANCE_MAX_HEAD_DIM}")
    return _kernel(platform, "bit for bit the reference")


@functools.cache
def choose_multiply(platform: Platform, dtype: torch.dtype, matrix_dtype: torch.dtype, head_dim: int) -> Choice:
    """Who multiplies K and Q of this dtype with matrices."""
    if choice := _without_kernels(platform):
        return choice
    if head_dim not in KERNEL_HEAD_DIMS:
        return Choice(Implementation.REFERENCE, f"the kernel has head dimensions {_listed(KERNEL_HEAD_DIMS)}")
    if dtype not in _KERNEL_DTYPES or matrix_dtype is not torch.float16:
        return Choice(Implementation.REFERENCE, "the kernel takes BF16 and FP16, and matrices in FP16")
    return _kernel(platform, "one launch, with sums in FP32 as the reference has")


@functools.cache
def choose_decode(platform: Platform, case: DecodeCase) -> Choice:
    """Who attends to pages."""
    if case.page_format is not PageFormat.NVFP4:
        return _choose_fallback_decode(platform, case)
    if choice := _without_kernels(platform):
        return choice
    if case.head_dim not in KERNEL_HEAD_DIMS:
        return Choice(Implementation.REFERENCE, f"the kernel has head dimensions {_listed(KERNEL_HEAD_DIMS)}")
    if case.group > KERNEL_MAX_GROUP:
        return Choice(Implementation.REFERENCE, f"the kernel has up to {KERNEL_MAX_GROUP} query heads a KV head")
    if case.query_dtype not in _KERNEL_DTYPES:
        return Choice(Implementation.REFERENCE, "the kernel takes BF16 and FP16 queries")
    return _kernel(platform, "attends to packed pages as they are")


def _choose_fallback_decode(platform: Platform, case: DecodeCase) -> Choice:
    if platform.capability is None:
        return Choice(Implementation.REFERENCE, "there is no NVIDIA GPU")
    if not platform.has_flashinfer:
        return Choice(Implementation.REFERENCE, _NO_FLASHINFER)
    if case.has_tail and case.has_window:
        return Choice(Implementation.REFERENCE, "FlashInfer's window does not end behind an open page")
    if case.head_dim not in _FLASHINFER_HEAD_DIMS or case.query_dtype not in _KERNEL_DTYPES:
        return Choice(Implementation.REFERENCE, "FlashInfer has no kernel for this head dimension and query dtype")
    if platform.capability < OLDEST_CAPABILITY:
        return Choice(Implementation.REFERENCE, "FlashInfer needs compute capability 8.0")
    return Choice(Implementation.FLASHINFER, f"FlashInfer is there; kvtier has no kernel for {case.page_format} pages")


@functools.cache
def choose_prefill(platform: Platform, case: PrefillCase) -> Choice:
    """Who attends to a workspace."""
    if platform.capability is None:
        return Choice(Implementation.REFERENCE, "there is no NVIDIA GPU")
    if platform.capability < OLDEST_CAPABILITY:
        return Choice(Implementation.REFERENCE, "flash attention needs compute capability 8.0")
    if case.query_dtype not in _KERNEL_DTYPES:
        return Choice(Implementation.REFERENCE, "flash attention takes BF16 and FP16")
    if not (case.has_window or case.has_softcap):
        if case.head_dim <= _FLASH_MAX_HEAD_DIM:
            return Choice(Implementation.TORCH, "causal, without window and soft-cap")
        return Choice(Implementation.REFERENCE, f"flash attention has heads up to {_FLASH_MAX_HEAD_DIM}")
    if not platform.has_flashinfer:
        return Choice(Implementation.REFERENCE, _NO_FLASHINFER)
    if case.head_dim not in _FLASHINFER_HEAD_DIMS:
        return Choice(Implementation.REFERENCE, f"FlashInfer has head dimensions {_listed(_FLASHINFER_HEAD_DIMS)}")
    return Choice(Implementation.FLASHINFER, "torch's flash attention has no window and no soft-cap")


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
