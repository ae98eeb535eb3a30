"""The operations on pages, each run by what is best on the device of its tensors; `dispatch` says what and why.

One layer of the pool is a `kvtier.pages.views.LayerView`. The torch references in `kvtier.ops.reference` run on any
device and say what every kernel must compute; `nvfp4` is the codec alone. `kvtier doctor` prints what was chosen.
"""

from kvtier.ops.cuda.workspace import DecodeWorkspace
from kvtier.ops.fixed_decode import DecodeTables, FixedDecode
from kvtier.ops.operations import (
    decode_attention,
    gather_dequantize,
    prefill_attention,
    quantize_append,
    transform_keys,
    transform_queries,
)
from kvtier.ops.recipe import LayerRecipe, layer_recipes
from kvtier.ops.reference import nvfp4
from kvtier.ops.reference.append import LEFT_OUT
from kvtier.ops.reference.attention import AttentionResult, OpenPages, merge_attention
from kvtier.ops.reference.codec import GlobalScales, round_trip
from kvtier.ops.reference.gather import Workspace

__all__ = [
    "LEFT_OUT",
    "AttentionResult",
    "DecodeTables",
    "DecodeWorkspace",
    "FixedDecode",
    "GlobalScales",
    "LayerRecipe",
    "OpenPages",
    "Workspace",
    "decode_attention",
    "gather_dequantize",
    "layer_recipes",
    "merge_attention",
    "nvfp4",
    "prefill_attention",
    "quantize_append",
    "round_trip",
    "transform_keys",
    "transform_queries",
]
