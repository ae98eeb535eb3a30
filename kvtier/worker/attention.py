"""The attention function that transformers calls, once a layer, for every forward pass of a worker.

A model runs with `attn_implementation="kvtier"` and gets its batch as the keyword argument `kvtier_batch`, which
transformers hands through to every attention module. No mask is built: transformers skips masks for an attention
implementation without a mask function, and a batch knows which token may see which.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from kvtier.errors import InvalidRequestError

ATTENTION_NAME = "kvtier"

_KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})  # transformers passes them to every attention function
_SINK_ARGUMENTS = frozenset({"s_aux", "sinks"})


class LayerCall(NamedTuple):
    """What one attention module asks for.

    Shapes, with T packed tokens, Hq query heads, Hkv KV heads and head dimension D: `query` is `(T, Hq, D)`, `key` and
    `value` are `(T, Hkv, D)`, after the rotary embedding. `sliding_window` is the number of tokens that a token sees,
    itself included; None is all of them.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    softmax_scale: float
    sliding_window: int | None
    logit_softcap: float | None


class AttentionBatch(Protocol):
    """The sequences of one forward pass."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The attention output `(T, Hq, D)` of one layer, in the dtype of the query."""
        ...


class ModelBatch(AttentionBatch, Protocol):
    """The same, with what the model is called with.

    Attributes:
        input_ids, position_ids: `(1, T)` int64.
        last_rows: int64, the rows of the packed row where the logits of the next tokens are.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    last_rows: torch.Tensor


def register_attention() -> None:
    """Makes `attn_implementation="kvtier"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kvtier_batch: AttentionBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one module; tensors come as `(1, heads, T, D)` and the output goes back as `(1, T, heads, D)`."""
    _check_arguments(module, attention_mask, is_causal, others)
    output = kvtier_batch.attend(
        LayerCall(
            layer=module.layer_idx,  # type: ignore[arg-type]
            query=query[0].transpose(0, 1),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            logit_softcap=softcap,
        )
    )
    return output.unsqueeze(0), None


def _check_arguments(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, is_causal: bool | None, others: dict[str, Any]
) -> None:
    """Raises `InvalidRequestError` for anything that would change the attention without kvtier knowing how."""
    where = type(module).__name__
    if attention_mask is not None:
        raise InvalidRequestError(f"{where} brings its own attention mask; kvtier runs plain causal attention only")
    if is_causal is False:
        raise InvalidRequestError(f"{where} is bidirectional; kvtier runs causal attention only")
    unknown = sorted(name for name, argument in others.items() if isinstance(argument, torch.Tensor))
    for name in (name for name in unknown if name not in _KNOWN_TENSORS):
        if name in _SINK_ARGUMENTS:
            raise InvalidRequestError(f"{where} has attention sinks ({name}); kvtier's kernels do not support them")
        raise InvalidRequestError(f"{where} passes {name!r} to its attention; kvtier does not know this argument")
