"""The bytes of a page.

A page image holds `page_size` consecutive tokens of all layers of one rank. For each layer it has four regions,
`[K data, K scales, V data, V scales]`, each dense HND: heads, then tokens, then bytes. Scales are linear along the
head dimension, one E4M3 byte for 16 values. The formats `fp8` and `bf16` have no scales: those regions are empty.

Every region starts on a multiple of 16 bytes, because page size and head dimension are multiples of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvtier.errors import InvalidRequestError

LAYOUT_VERSION = 1
BLOCK_SIZE = 16  # values that share one scale
PAGE_SIZES = (16, 32, 64, 128)


class PageFormat(StrEnum):
    """How one value is stored."""

    NVFP4 = "nvfp4"
    FP8 = "fp8"
    BF16 = "bf16"


class Region(NamedTuple):
    """A dense part of a layer: `shape` is (heads, tokens, bytes), `offset_bytes` counts from the layer's start."""

    offset_bytes: int
    shape: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        heads, tokens, row_bytes = self.shape
        return heads * tokens * row_bytes


class LayerRegions(NamedTuple):
    """The four regions of one layer, in the order of their bytes."""

    k_data: Region
    k_scales: Region
    v_data: Region
    v_scales: Region


@dataclass(frozen=True)
class PageLayout:
    """Geometry of the pages of one model under one format.

    Raises `InvalidRequestError` when a page of these numbers cannot exist.
    """

    page_format: PageFormat
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 64

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise InvalidRequestError(f"page_size is {self.page_size}; use one of {', '.join(map(str, PAGE_SIZES))}")
        if self.head_dim <= 0 or self.head_dim % BLOCK_SIZE:
            raise InvalidRequestError(f"head_dim is {self.head_dim}; it must be a positive multiple of {BLOCK_SIZE}")
        if self.num_layers <= 0 or self.num_kv_heads <= 0:
            raise InvalidRequestError(
                f"num_layers is {self.num_layers} and num_kv_heads {self.num_kv_heads}; both must be positive"
            )

    @property
    def data_row_bytes(self) -> int:
        """Bytes of the codes of one token and head, for K or for V."""
        match self.page_format:
            case PageFormat.NVFP4:
                return self.head_dim // 2
            case PageFormat.FP8:
                return self.head_dim
            case PageFormat.BF16:
                return 2 * self.head_dim

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of the block scales of one token and head, for K or for V."""
        return self.head_dim // BLOCK_SIZE if self.page_format is PageFormat.NVFP4 else 0

    @property
    def regions(self) -> LayerRegions:
        data_shape = (self.num_kv_heads, self.page_size, self.data_row_bytes)
        scale_shape = (self.num_kv_heads, self.page_size, self.scale_row_bytes)
        regions: list[Region] = []
        offset = 0
        for shape in (data_shape, scale_shape, data_shape, scale_shape):
            regions.append(Region(offset, shape))
            offset += regions[-1].num_bytes
        return LayerRegions(*regions)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a page."""
        last = self.regions.v_scales
        return last.offset_bytes + last.num_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page image."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers."""
        return self.page_bytes // self.page_size
