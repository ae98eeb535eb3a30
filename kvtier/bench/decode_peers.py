"""The peers of `kvtier bench decode`: FlashInfer's fa2 and XQA decode, where FlashInfer is installed."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvtier.bench.decode_cases import Contender, Decoder, Inputs
from kvtier.pages.layout import PageFormat
from kvtier.pages.views import LayerView

_WORKSPACE_BYTES = 512 << 20
_XQA_MAJORS = (9, 10, 12)  # compute capabilities
_XQA_NVFP4_MAJOR = 12


def installed_peers(device: torch.device) -> list[Contender]:
    """Every peer that can run on `device`."""
    if find_spec("flashinfer") is None:
        return []
    major, _ = torch.cuda.get_device_capability(device)
    peers = [Contender("flashinfer fa2", page_format, _prepare_fa2, dense=True) for page_format in PageFormat]
    if major in _XQA_MAJORS:
        formats = [PageFormat.FP8, PageFormat.BF16] + ([PageFormat.NVFP4] if major == _XQA_NVFP4_MAJOR else [])
        peers += [Contender("flashinfer xqa", page_format, _prepare_xqa, dense=True) for page_format in formats]
    return peers


def _workspace(inputs: Inputs) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.query.device)


def _block_scales(view: LayerView) -> tuple[torch.Tensor, torch.Tensor] | None:
    return (view.k_scales, view.v_scales) if view.k_scales.numel() else None


def _prepare_fa2(inputs: Inputs) -> Decoder:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    case, data = inputs.case, inputs.views[0].k_data
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(inputs), "HND", use_tensor_cores=True, backend="fa2")
    wrapper.plan(
        torch.arange(case.load.batch + 1, dtype=torch.int32) * case.pages_a_sequence,
        inputs.page_table.flatten(),
        torch.full((case.load.batch,), (case.load.context - 1) % case.page_size + 1, dtype=torch.int32),
        case.geometry.num_query_heads,
        case.geometry.num_kv_heads,
        case.geometry.head_dim,
        case.page_size,
        q_data_type=inputs.query.dtype,
        kv_data_type=data.dtype,
        sm_scale=inputs.softmax_scale,
    )
    out = torch.empty_like(inputs.query)

    def decode(view: LayerView) -> torch.Tensor:
        scales = _block_scales(view)
        nvfp4 = {} if scales is None else {"kv_cache_sf": scales, "k_scale": 1.0, "v_scale": 1.0}
        wrapper.run(inputs.query, (view.k_data, view.v_data), out=out, **nvfp4)
        return out

    return decode


def _prepare_xqa(inputs: Inputs) -> Decoder:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    workspace, out = _workspace(inputs), torch.empty_like(inputs.query)

    def decode(view: LayerView) -> torch.Tensor:
        scales = _block_scales(view)
        xqa_batch_decode_with_kv_cache(
            inputs.query,
            (view.k_data, view.v_data),
            workspace,
            inputs.page_table,
            inputs.lengths,
            inputs.case.load.context,
            bmm1_scale=inputs.softmax_scale,
            bmm2_scale=1.0,
            out=out,
            kv_layout="HND",
            kv_cache_sf=scales,
        )
        return out

    return decode
