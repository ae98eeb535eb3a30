"""The modelled model's pages, and the small ones that stand for them.

A page of a real model has megabytes, of which this machine need not have as many. What matters to the cache is how many
pages there are, so a replay uses pages of one layer, one head and 16 values, and divides the bytes of the pools by the
same factor. The formats keep their exact ratio: 16 values take 9, 16 or 32 bytes in NVFP4, FP8 and BF16.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import BLOCK_SIZE, PageFormat, PageLayout


class Geometry(NamedTuple):
    """What decides the size of a model's KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """From LAYERS/KVHEADS/HEADDIM; raises `InvalidRequestError`."""
        try:
            layers, heads, head_dim = map(int, text.split("/"))
        except ValueError as error:
            raise InvalidRequestError(f"{text!r} is no geometry; write LAYERS/KVHEADS/HEADDIM, as 32/8/128") from error
        geometry = cls(layers, heads, head_dim)
        geometry.layout(PageFormat.NVFP4, page_size=64)
        return geometry

    def layout(self, page_format: PageFormat, page_size: int) -> PageLayout:
        """Pages of this model; raises `InvalidRequestError` when there can be none."""
        return PageLayout(page_format, *self, page_size)

    @property
    def shrink_factor(self) -> int:
        """How many times larger a page of this model is than the one that stands for it, in every format."""
        return self.num_layers * self.num_kv_heads * self.head_dim // BLOCK_SIZE

    def __str__(self) -> str:
        return "/".join(map(str, self))


LLAMA_3_1_8B = Geometry(32, 8, 128)
SHRUNK = Geometry(1, 1, BLOCK_SIZE)
