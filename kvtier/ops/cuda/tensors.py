"""What the wrappers of the kernels read off their tensors and devices."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.reference.codec import GlobalScales, page_format_of
from kvtier.pages.layout import PageFormat
from kvtier.pages.views import LayerView

ACCESS_BYTES = 16  # of one load or store of a kernel
_SCALE_RANGE = 2.0**80  # of global scales, within which the kernels' reciprocals are exact


class PoolGeometry(NamedTuple):
    """The shape of one layer of a pool."""

    page_format: PageFormat
    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    page_stride_bytes: int


def geometry_of(view: LayerView) -> PoolGeometry:
    """The geometry of the pool behind `view`, whose regions all have the same page stride."""
    page_format = page_format_of(view)
    num_pages, num_kv_heads, page_size, row_length = view.k_data.shape
    head_dim = row_length * (2 if page_format is PageFormat.NVFP4 else 1)
    stride_bytes = view.k_data.stride(0) * view.k_data.element_size()
    return PoolGeometry(page_format, num_pages, num_kv_heads, page_size, head_dim, stride_bytes)


def region_addresses(view: LayerView) -> tuple[int, int, int, int]:
    """Addresses of K data, K scales, V data and V scales of page 0."""
    return (view.k_data.data_ptr(), view.k_scales.data_ptr(), view.v_data.data_ptr(), view.v_scales.data_ptr())


def has_aligned_rows(values: torch.Tensor) -> bool:
    """Whether the rows of `values` are dense and all start on 16 bytes."""
    *outer, innermost = values.stride()
    sizes = [values.data_ptr(), *(stride * values.element_size() for stride in outer)]
    return innermost == 1 and all(size % ACCESS_BYTES == 0 for size in sizes)


def with_aligned_rows(values: torch.Tensor) -> torch.Tensor:
    """`values`, or a copy of it that kernels can read."""
    return values if has_aligned_rows(values) else values.clone(memory_format=torch.contiguous_format)


def row_strides(values: torch.Tensor) -> tuple[int, int]:
    """Bytes from token to token and from head to head of `values` `(tokens, heads, D)`."""
    token, head, _ = values.stride()
    return token * values.element_size(), head * values.element_size()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def num_resident_blocks(device: torch.device, threads: int) -> int:
    """Thread blocks of `threads` threads that a CUDA device runs at once, if registers and shared memory allow."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count * (properties.max_threads_per_multi_processor // threads))


def check_indices(num_sequences: int, **tensors: torch.Tensor) -> None:
    """Raises `InvalidRequestError` unless each tensor has a row a sequence, int32, the last dimension dense."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.int32 or len(tensor) != num_sequences or tensor.stride(-1) != 1:
            raise InvalidRequestError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be dense int32, one row for each of "
                f"{num_sequences} sequences"
            )


def check_scales(scales: GlobalScales) -> None:
    """Raises `InvalidRequestError` for scales with which the kernels would not round like the reference."""
    if not all(1 / _SCALE_RANGE <= scale <= _SCALE_RANGE for scale in (scales.k, scales.v)):
        raise InvalidRequestError(f"global scales are {scales.k} and {scales.v}; kernels take 2^-80 to 2^80")
