"""Decode attention over tables that stay where they are in memory, so that a CUDA graph can be captured of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.ops import dispatch
from kvtier.ops.cuda.workspace import DecodeWorkspace
from kvtier.ops.dispatch import Implementation, platform_of
from kvtier.ops.reference import attention
from kvtier.ops.reference.attention import OpenPages
from kvtier.ops.reference.codec import GlobalScales, page_format_of
from kvtier.pages.views import LayerView

if TYPE_CHECKING:
    from kvtier.ops.flashinfer_fa2 import PlannedDecode


class DecodeTables(NamedTuple):
    """A page table `(B, max_pages)` and lengths `(B,)`, int32, in the memory of the device and as the host has them.

    NOTE: between one step and the next their values change, and never their addresses.
    """

    page_table: torch.Tensor
    lengths: torch.Tensor
    host_page_table: npt.NDArray[np.int32]
    host_lengths: npt.NDArray[np.int32]


class FixedDecode:
    """The decodes of all layers of a step.

    After the first step, which must not be captured, everything that a later one needs has been compiled and allocated.
    A captured graph uses the memory of this object, so it must live as long as the graph.

    Attributes:
        is_capturable: whether what has run so far, and kvtier's other operations, read nothing back from the GPU.
    """

    def __init__(self, tables: DecodeTables) -> None:
        self.is_capturable = platform_of(tables.lengths.device).has_cuda_core
        self._tables = tables
        self._workspace: DecodeWorkspace | None = None
        self._planned: dict[tuple[object, ...], PlannedDecode] = {}

    def plan(self) -> None:
        """Does what has to be done on the host before a step, once the tables have their values."""
        for planned in self._planned.values():
            planned.plan(self._tables.host_page_table, self._tables.host_lengths)

    def attend(
        self,
        query: torch.Tensor,
        view: LayerView,
        scales: GlobalScales,
        softmax_scale: float,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
        tail: OpenPages | None = None,
    ) -> torch.Tensor:
        """Attention of one layer `(B, Hq, D)`; see `kvtier.ops.decode_attention`.

        It is undefined where a sequence has no tokens.
        """
        num_kv_heads = view.k_data.shape[1]
        attention.check_heads_and_window(query.shape[1], num_kv_heads, sliding_window)
        case = dispatch.DecodeCase(
            page_format_of(view),
            query.shape[-1],
            query.shape[1] // num_kv_heads,
            query.dtype,
            tail is not None,
            sliding_window is not None,
        )
        page_table, lengths = self._tables.page_table, self._tables.lengths
        pages = (query, view, page_table, lengths, scales, softmax_scale, sliding_window, logit_softcap, tail)
        match dispatch.choose_decode(platform_of(query.device), case).implementation:
            case Implementation.KERNEL:
                from kvtier.ops.cuda import decode as cuda_decode

                if self._workspace is None:
                    self._workspace = DecodeWorkspace(query.device, len(query), num_kv_heads)
                return cuda_decode.decode_attention(*pages, self._workspace).out
            case Implementation.FLASHINFER:
                planned = self._planned_for(query, view, softmax_scale, sliding_window, logit_softcap)
                if tail is None:
                    return planned.attend_to_pages(query, view, scales)
                return planned.attend(query, view, lengths, scales, tail).out
            case _:
                self.is_capturable = False
                return attention.decode_attention(*pages).out

    def _planned_for(
        self,
        query: torch.Tensor,
        view: LayerView,
        softmax_scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
    ) -> PlannedDecode:
        """The decode of this kind, planned for this step."""
        from kvtier.ops.flashinfer_fa2 import PlannedDecode

        kind = (softmax_scale, sliding_window, logit_softcap)
        planned = self._planned.get(kind)
        if planned is None:
            planned = PlannedDecode.capturable(query, view, self._tables.page_table.shape[1], *kind)
            planned.plan(self._tables.host_page_table, self._tables.host_lengths)
            self._planned[kind] = planned
        return planned
