"""The open pages of a worker: the last, not yet full page of every running sequence, in the worker's own memory.

Its tokens are kept more exactly than pages keep them. When the page is full, it is quantised once, whole.
"""

from __future__ import annotations

import heapq

import torch

from kvtier.ops import OpenPages
from kvtier.ops.reference.fp8 import to_e4m3
from kvtier.pages.layout import PageLayout
from kvtier.worker.options import OpenPage

_DTYPES = {OpenPage.BF16: torch.bfloat16, OpenPage.FP8: torch.float8_e4m3fn}


class OpenPageStore:
    """One slot for each sequence that may run, with room for a page in every layer.

    A sequence takes a slot when it begins to run and gives it back when it no longer does; what a slot held before is
    never read. A place is `slot * page_size + offset in the page`. K and V are transformed like those in pages. With
    `OpenPage.OFF` nothing is kept: every token goes to its page at once.

    Attributes:
        num_slots: slots that there are.
        unread_place: a place of no slot, for tokens that nobody will read.

    Shapes, with N tokens, KV heads Hkv and head dimension D: K and V of tokens are one tensor `(2, N, Hkv, D)`.
    """

    def __init__(
        self, layout: PageLayout, open_page: OpenPage, num_slots: int, device: torch.device | None = None
    ) -> None:
        """In the memory of `device`, that of the model; None is the CPU."""
        self._page_size = layout.page_size
        self._free = list(range(num_slots))
        self._dtype = _DTYPES.get(open_page)
        self.num_slots = num_slots
        self.unread_place = num_slots * layout.page_size
        num_places = 0 if self._dtype is None else self.unread_place + 1
        shape = (layout.num_layers, 2, num_places, layout.num_kv_heads, layout.head_dim)
        self._tokens = torch.zeros(shape, dtype=self._dtype or torch.bfloat16, device=device)

    def take_slot(self) -> int:
        """The lowest free slot; there is one for every sequence that may run."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Frees a slot that was taken."""
        assert slot not in self._free
        heapq.heappush(self._free, slot)

    @property
    def is_off(self) -> bool:
        """Whether every token goes to its page at once."""
        return self._dtype is None

    def num_in_pages(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a sequence are in pages; those behind are in its open page."""
        return num_tokens if self.is_off else num_tokens // self._page_size * self._page_size

    def rounded(self, tokens: torch.Tensor) -> torch.Tensor:
        """What an open page gives back for `tokens`, in their dtype; the tokens themselves when there is none."""
        match self._dtype:
            case None:
                return tokens
            case torch.float8_e4m3fn:
                return to_e4m3(tokens).to(tokens.dtype)
            case dtype:
                return tokens.to(dtype).to(tokens.dtype)

    def write(self, layer: int, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps `tokens`, which were `rounded`, at `places` `(N,)` int64, all different but for `unread_place`."""
        # Bytes are moved, not values, here and below: torch 2.6 cannot index FP8 on CPU.
        self._bytes(layer)[:, places] = tokens.to(self._tokens.dtype).view(torch.uint8)

    def read(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """The tokens at `places` `(N,)` int64, in bfloat16, which holds those of every kind exactly."""
        return self._bytes(layer)[:, places].view(self._tokens.dtype).to(torch.bfloat16)

    def tail(self, layer: int, slots: torch.Tensor, lengths: torch.Tensor) -> OpenPages | None:
        """The first `lengths` tokens of the open pages in `slots`, as decodes attend to them; None when there are none.

        Both `(B,)`, of int64 and int32.
        """
        if self.is_off:
            return None
        pages = torch.unflatten(self._bytes(layer)[:, : self.unread_place], 1, (-1, self._page_size))[:, slots]
        key, value = pages.view(self._tokens.dtype).to(torch.bfloat16)
        return OpenPages(key, value, lengths)

    def first_slots(self, layer: int, num_slots: int) -> torch.Tensor:
        """K and V `(2, num_slots, page_size, Hkv, D)` of slots 0 and following: the memory itself, in its own dtype."""
        places = self._tokens[layer, :, : num_slots * self._page_size]
        return torch.unflatten(places, 1, (num_slots, self._page_size))

    def _bytes(self, layer: int) -> torch.Tensor:
        return self._tokens[layer].view(torch.uint8)
