"""How each kernel is compiled: its source, the macros of a case, and the cases that are in use.

A kernel is compiled for one dtype, head dimension and page size, so that the compiler knows every loop and address.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import BlockScales

Macros = tuple[tuple[str, int], ...]  # names and values, always in the same order

_TYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
_FORMAT_CODES = {PageFormat.NVFP4: 0, PageFormat.FP8: 1, PageFormat.BF16: 2}


def sources_directory() -> Path:
    """Where the CUDA sources are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[2]
    installed = package / "_kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def append_macros(
    input_dtype: torch.dtype, page_format: PageFormat, head_dim: int, page_size: int, block_scales: BlockScales
) -> Macros:
    """Macros of `quantize_append.cu`."""
    searches = page_format is PageFormat.NVFP4 and block_scales is BlockScales.SEARCH
    return (
        ("INPUT", _TYPE_CODES[input_dtype]),
        ("PAGE_FORMAT", _FORMAT_CODES[page_format]),
        ("HEAD_DIM", head_dim),
        ("PAGE_SIZE", page_size),
        ("SCALE_SEARCH", int(searches)),
    )


def balance_macros(dtype: torch.dtype, head_dim: int) -> Macros:
    """Macros of `balance_heads.cu`."""
    return (("INPUT", _TYPE_CODES[dtype]), ("HEAD_DIM", head_dim))


# ---- gather_dequantize.cu -------------------------------------------------------------------------------------------

GATHER_THREADS = 512  # of a thread block


class GatherVariant(NamedTuple):
    """How a gather is compiled and launched: a thread block makes adjacent rows of one side of one page."""

    page_format: PageFormat
    output_dtype: torch.dtype
    head_dim: int
    page_size: int
    has_unit_scales: bool
    values: int  # that a thread makes

    def macros(self) -> Macros:
        """Macros of the kernel."""
        return (
            ("PAGE_FORMAT", _FORMAT_CODES[self.page_format]),
            ("OUTPUT", _TYPE_CODES[self.output_dtype]),
            ("HEAD_DIM", self.head_dim),
            ("PAGE_SIZE", self.page_size),
            ("UNIT_SCALES", int(self.page_format is PageFormat.NVFP4 and self.has_unit_scales)),
            ("VALUES", self.values),
        )

    def blocks_a_side(self, num_kv_heads: int) -> int:
        """Thread blocks for K or V of a page."""
        return -(-num_kv_heads * self.page_size * self.head_dim // (GATHER_THREADS * self.values))

    def for_launch(self, num_kv_heads: int, num_sides: int, num_resident_blocks: int) -> GatherVariant:
        """This one, or the one with 64 values a thread for `num_sides` times K or V of a page.

        From NVFP4 to FP8 one turn of thread blocks with twice the work is faster than two turns: by 5% on an H200.
        Of more turns a smaller part is lost, and less than one would leave much of the chip idle with large blocks.
        """
        if self.page_format is not PageFormat.NVFP4 or self.output_dtype is not torch.float8_e4m3fn:
            return self
        large = self._replace(values=64)
        large_blocks, blocks = (variant.blocks_a_side(num_kv_heads) * num_sides for variant in (large, self))
        return large if large_blocks <= num_resident_blocks < blocks else self


# ---- multiply_heads.cu ----------------------------------------------------------------------------------------------

_TILE_ROWS = 16
_WARP_COLUMNS = 32
_FEW_ROWS_PER_SM = 16  # below, a matrix is spread over many thread blocks; beyond, they would read the rows too often


class MultiplyVariant(NamedTuple):
    """How a product with matrices is compiled, and the thread blocks that it is launched with."""

    head_dim: int
    column_warps: int  # of a thread block, 32 columns each
    row_warps: int  # tiles of 16 rows that a thread block has at a time
    blocks_per_sm: int
    is_persistent: bool  # whether a thread block has more than one tile a warp

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.column_warps * self.row_warps

    def macros(self, dtype: torch.dtype) -> Macros:
        """Macros for K or Q in bfloat16 or float16."""
        return (
            ("INPUT", _TYPE_CODES[dtype]),
            ("HEAD_DIM", self.head_dim),
            ("COLUMN_WARPS", self.column_warps),
            ("ROW_WARPS", self.row_warps),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("PERSISTENT", int(self.is_persistent)),
        )

    def grid(self, num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> tuple[int, int, int]:
        """For `num_rows` rows of every KV head: thread blocks that share the rows, the columns and the KV heads."""
        num_blocks = -(-num_rows // (_TILE_ROWS * self.row_warps))
        column_blocks = self.head_dim // (_WARP_COLUMNS * self.column_warps)
        if self.is_persistent:
            resident = max(num_multiprocessors * self.blocks_per_sm // (column_blocks * num_kv_heads), 1)
            rounds = -(-num_blocks // resident)
            num_blocks = -(-num_blocks // rounds)
        return num_blocks, column_blocks, num_kv_heads


_MULTIPLY_FEW = {
    64: MultiplyVariant(64, 1, 4, 4, False),
    128: MultiplyVariant(128, 1, 4, 4, False),
    256: MultiplyVariant(256, 1, 4, 2, False),
}
_MULTIPLY_MANY = {
    64: MultiplyVariant(64, 2, 2, 4, True),
    128: MultiplyVariant(128, 4, 1, 3, True),
    256: MultiplyVariant(256, 8, 1, 1, True),
}


def multiply_variant(head_dim: int, num_rows: int, num_multiprocessors: int) -> MultiplyVariant:
    """The variant for so many rows of all KV heads together. Every row is the same, bit for bit, in both."""
    is_few = num_rows < _FEW_ROWS_PER_SM * num_multiprocessors
    return (_MULTIPLY_FEW if is_few else _MULTIPLY_MANY)[head_dim]


# ---- decode_attention.cu --------------------------------------------------------------------------------------------

_STAGE_BYTES = 4608  # of a warp's ring: codes and scales of K and V of 4,096 values each
_STATIC_SHARED_BYTES = 4096  # what the kernel has besides, rounded up
_HEADS_A_TILE = 8


class DecodeVariant(NamedTuple):
    """How a decode is compiled and launched: one thread block of `num_warps` warps on each multiprocessor."""

    head_dim: int
    head_tiles: int  # of 8 query heads of one KV head
    num_warps: int
    num_stages: int
    query_in_shared: bool

    @property
    def warp_bytes(self) -> int:
        """Shared memory of a warp."""
        query_bytes = self.head_tiles * self.head_dim * 16 if self.query_in_shared else 0
        return self.num_stages * _STAGE_BYTES + query_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self.num_warps * self.warp_bytes

    @property
    def scratch_floats(self) -> int:
        """Floats of scratch of a thread block: two partial results and one of each warp."""
        return (2 + self.num_warps) * _HEADS_A_TILE * self.head_tiles * (self.head_dim + 2)

    def macros(self, query_dtype: torch.dtype, page_size: int) -> Macros:
        """Macros for queries in bfloat16 or float16."""
        return (
            ("KVTIER_HEAD_DIM", self.head_dim),
            ("KVTIER_PAGE_SIZE", page_size),
            ("KVTIER_HEAD_TILES", self.head_tiles),
            ("KVTIER_QUERY_BF16", int(query_dtype is torch.bfloat16)),
            ("KVTIER_WARPS", self.num_warps),
            ("KVTIER_STAGES", self.num_stages),
            ("KVTIER_QUERY_IN_SHARED", int(self.query_in_shared)),
        )


def decode_variant(head_dim: int, group: int, shared_bytes_a_block: int) -> DecodeVariant:
    """The variant for `group` query heads a KV head on a GPU with so much shared memory a thread block.

    As many warps as registers allow, for the chip waits for memory and for fixed latencies; fewer where their rings do
    not fit in shared memory. Accumulators grow with head dimension and group, and so do a warp's registers.
    """
    head_tiles = -(-group // _HEADS_A_TILE)
    match head_dim * head_tiles:
        case 64 | 128:
            wanted = DecodeVariant(head_dim, head_tiles, 16, 2, False)
        case 256:
            wanted = DecodeVariant(head_dim, head_tiles, 12, 2, False)
        case 512:
            wanted = DecodeVariant(head_dim, head_tiles, 8, 4, True)
        case _:
            raise InvalidRequestError(
                f"no decode kernel for head dimension {head_dim} and {group} query heads a KV head"
            )
    fitting = (shared_bytes_a_block - _STATIC_SHARED_BYTES) // wanted.warp_bytes
    return wanted._replace(num_warps=min(wanted.num_warps, fitting))


_DECODE_CASES = [(head_dim, group) for head_dim in (64, 128, 256) for group in (8, 16)]
# NOTE: a GPU with the most shared memory (SM90's 227 KiB) gets the most warps, and so the most scratch.
MAX_SCRATCH_FLOATS_A_BLOCK = max(decode_variant(*case, 227 << 10).scratch_floats for case in _DECODE_CASES)


# ---- what is compiled in continuous integration ---------------------------------------------------------------------

SHARED_BYTES_A_BLOCK = {  # the most that a thread block may ask for, by architecture
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100a": 227 << 10,
    "sm_120a": 99 << 10,
}

_COMPILED_DECODES = (  # head dimension, group, dtype of queries, page size
    (64, 8, torch.bfloat16, 16),
    (64, 16, torch.float16, 128),
    (128, 8, torch.bfloat16, 64),
    (128, 8, torch.float16, 16),
    (128, 16, torch.bfloat16, 32),
    (256, 8, torch.bfloat16, 64),
    (256, 16, torch.float16, 32),
)


def variants_in_use(architecture: str) -> Iterator[tuple[str, Macros]]:
    """Kernel names and macros that together compile every branch of every kernel on an architecture."""
    bf16, fp16, fp8 = _TYPE_CODES
    nvfp4 = PageFormat.NVFP4
    for dtype, head_dim in ((bf16, 128), (fp16, 256), (fp8, 64)):
        for block_scales in BlockScales:
            yield "quantize_append", append_macros(dtype, nvfp4, head_dim, 64, block_scales)
        for has_unit_scales in (True, False):
            yield "gather_dequantize", GatherVariant(nvfp4, dtype, head_dim, 64, has_unit_scales, 32).macros()
    for page_format in (PageFormat.FP8, PageFormat.BF16):
        yield "quantize_append", append_macros(fp16, page_format, 128, 64, BlockScales.LARGEST)
        yield "gather_dequantize", GatherVariant(page_format, bf16, 128, 64, True, 32).macros()
    for has_unit_scales in (True, False):
        yield "gather_dequantize", GatherVariant(nvfp4, fp8, 128, 64, has_unit_scales, 64).macros()
    for dtype, head_dim in ((bf16, 128), (fp16, 64), (bf16, 256)):
        yield "balance_heads", balance_macros(dtype, head_dim)
    for dtype in (bf16, fp16):
        for multiply in (*_MULTIPLY_FEW.values(), *_MULTIPLY_MANY.values()):
            yield "multiply_heads", multiply.macros(dtype)
    shared_bytes = SHARED_BYTES_A_BLOCK[architecture]
    for head_dim, group, query_dtype, page_size in _COMPILED_DECODES:
        variant = decode_variant(head_dim, group, shared_bytes)
        yield "decode_attention", variant.macros(query_dtype, page_size)
    yield "read_sweep", ()
