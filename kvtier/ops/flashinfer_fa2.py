"""Decode attention of FP8 and BF16 pages by FlashInfer's fa2 kernels: the fallback formats, and the yardstick.

FlashInfer plans on the host which thread block attends to what. A single call plans for itself, so it waits for the GPU
and cannot be captured in a CUDA graph; a `PlannedDecode` is planned before a step, for all of its layers, and can. The
first call for a case compiles, with nvcc, unless the package flashinfer-jit-cache brings the case along.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

from kvtier.ops.reference.attention import AttentionResult, OpenPages, merge_attention, open_page_attention
from kvtier.ops.reference.codec import GlobalScales, page_format_of
from kvtier.pages.layout import PageFormat
from kvtier.pages.views import LayerView

_WORKSPACE_BYTES = 384 << 20


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Scratch of all decodes of a device, which run one after the other."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _make_wrapper(device: torch.device, **graph_buffers: torch.Tensor) -> BatchDecodeWithPagedKVCacheWrapper:
    is_captured = bool(graph_buffers)
    return BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device), "HND", use_cuda_graph=is_captured, use_tensor_cores=True, backend="fa2", **graph_buffers
    )


@functools.cache
def _wrapper_of_single_calls(device: torch.device) -> BatchDecodeWithPagedKVCacheWrapper:
    return _make_wrapper(device)


def decode_attention(
    query: torch.Tensor,
    view: LayerView,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scales: GlobalScales,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    tail: OpenPages | None = None,
) -> AttentionResult:
    """As `kvtier.ops.decode_attention`, for pages in FP8 or BF16; there is no window when there is a `tail`."""
    wrapper = _wrapper_of_single_calls(query.device)
    decode = PlannedDecode(wrapper, query, view, softmax_scale, sliding_window, logit_softcap)
    decode.plan(page_table.cpu().numpy(), lengths.cpu().numpy())
    return decode.attend(query, view, lengths, scales, tail)


class PlannedDecode:
    """Decodes of one kind for a fixed number of sequences: planned on the host, then run in any number of layers."""

    def __init__(
        self,
        wrapper: BatchDecodeWithPagedKVCacheWrapper,
        query: torch.Tensor,
        view: LayerView,
        softmax_scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
    ) -> None:
        """For queries and layers like these."""
        num_kv_heads, self._page_size = view.k_data.shape[1:3]
        self._wrapper = wrapper
        self._softmax_scale, self._logit_softcap = softmax_scale, logit_softcap
        self._settings = {
            "num_qo_heads": query.shape[1],
            "num_kv_heads": num_kv_heads,
            "head_dim": query.shape[-1],
            "page_size": self._page_size,
            "q_data_type": query.dtype,
            "kv_data_type": view.k_data.dtype,
            "sm_scale": softmax_scale,
            "window_left": -1 if sliding_window is None else sliding_window - 1,
            "logits_soft_cap": logit_softcap,
        }

    @classmethod
    def capturable(
        cls,
        query: torch.Tensor,
        view: LayerView,
        max_pages: int,
        softmax_scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
    ) -> PlannedDecode:
        """One for sequences of up to `max_pages`; a graph that captured it goes by the newest plan at every replay."""
        sizes = {"indptr": len(query) + 1, "indices": len(query) * max_pages, "last_page_len": len(query)}
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=query.device)
            for name, size in sizes.items()
        }
        wrapper = _make_wrapper(query.device, **buffers)
        return cls(wrapper, query, view, softmax_scale, sliding_window, logit_softcap)

    def plan(self, page_table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
        """Plans for a page table and lengths as `decode_attention` takes them, in host memory."""
        num_pages = -(-lengths // self._page_size)
        indptr = np.concatenate(([0], num_pages.cumsum())).astype(np.int32)
        in_use = np.arange(page_table.shape[1]) < num_pages[:, None]
        last_page_lengths = ((lengths - 1) % self._page_size + 1).astype(np.int32)
        tables = (indptr, page_table[in_use], last_page_lengths)
        # NOTE: its buffers may have been made in inference mode, and may be changed in no other then.
        with torch.inference_mode():
            self._wrapper.plan(*(torch.from_numpy(table) for table in tables), **self._settings)

    def attend_to_pages(self, query: torch.Tensor, view: LayerView, scales: GlobalScales) -> torch.Tensor:
        """`(B, Hq, D)`; undefined where a sequence has no tokens."""
        out: torch.Tensor = self._wrapper.run(
            query.contiguous(), (view.k_data, view.v_data), **_multipliers(view, scales)
        )
        return out

    def attend(
        self, query: torch.Tensor, view: LayerView, lengths: torch.Tensor, scales: GlobalScales, tail: OpenPages | None
    ) -> AttentionResult:
        """Attention to pages and open pages; `lengths` are those of the plan, in the memory of the GPU."""
        data = (view.k_data, view.v_data)
        out, lse = self._wrapper.run(query.contiguous(), data, return_lse=True, **_multipliers(view, scales))
        is_empty = (lengths == 0).unsqueeze(1)  # FlashInfer's lse of no keys is a large number, and its base is 2
        pages = AttentionResult(
            out.masked_fill(is_empty.unsqueeze(2), 0), (lse * math.log(2)).masked_fill(is_empty, -torch.inf)
        )
        if tail is None:
            return pages
        return merge_attention(pages, open_page_attention(query, tail, self._softmax_scale, self._logit_softcap))


def _multipliers(view: LayerView, scales: GlobalScales) -> dict[str, float]:
    return {"k_scale": scales.k, "v_scale": scales.v} if page_format_of(view) is PageFormat.FP8 else {}
