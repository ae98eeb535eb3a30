"""The operations on pages, in torch: references that run on any device and say what every kernel must compute.

One layer of the pool is a `kvtier.pages.views.LayerView`; `nvfp4` is the codec alone. The references read lengths and
page numbers on the host, so on a GPU they wait for it.
"""

from kvtier.ops import nvfp4
from kvtier.ops.append import quantize_append
from kvtier.ops.attention import AttentionResult, decode_attention, merge_attention, prefill_attention
from kvtier.ops.codec import GlobalScales, round_trip
from kvtier.ops.gather import Workspace, gather_dequantize

__all__ = [
    "AttentionResult",
    "GlobalScales",
    "Workspace",
    "decode_attention",
    "gather_dequantize",
    "merge_attention",
    "nvfp4",
    "prefill_attention",
    "quantize_append",
    "round_trip",
]
