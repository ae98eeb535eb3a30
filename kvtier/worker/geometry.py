"""Whether kvtier can run a model, and the geometry of its KV cache.

What the configuration says is checked first; then one forward pass over two tokens shows what every layer really asks
of its attention. So a model is refused when it is loaded, with the reason, and never runs with wrong attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import BLOCK_SIZE
from kvtier.worker.attention import LayerCall

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_PROBE_TOKENS = 2


class ModelGeometry(NamedTuple):
    """Geometry of the KV cache of a model, and its window in tokens by layer (None: the layer sees everything)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]


class _Probe:
    """An attention batch that keeps what the layers ask for."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append(call)
        return torch.zeros_like(call.query)


def inspect_model(module: PreTrainedModel) -> ModelGeometry:
    """Geometry of `module`, which runs with kvtier's attention already.

    Raises:
        InvalidRequestError: kvtier cannot run this model; the message names why.
    """
    config = module.config.get_text_config().to_dict()
    _check_config(config)
    probe = _Probe()
    tokens = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=module.device)
    positions = torch.arange(_PROBE_TOKENS, device=module.device).unsqueeze(0)
    with torch.inference_mode():
        module(input_ids=tokens, position_ids=positions, use_cache=False, kvtier_batch=probe)
    return _geometry(probe.calls, config)


def check_architecture(module: PreTrainedModel) -> None:
    """Raises `InvalidRequestError` for a class of models that has more state than K and V, or attention of its own."""
    name = type(module).__name__
    if module.config.is_encoder_decoder:
        raise InvalidRequestError(f"{name} is an encoder-decoder; kvtier runs decoder-only models")
    if module._is_stateful:
        raise InvalidRequestError(f"{name} has recurrent or linear-attention layers, whose state is not K and V")
    if not module._supports_attention_backend:
        raise InvalidRequestError(f"{name} does not use the attention interface through which kvtier runs models")


def _check_config(config: dict[str, Any]) -> None:
    name = config["model_type"]
    if config.get("kv_lora_rank"):
        raise InvalidRequestError(f"{name} has multi-head latent attention (kv_lora_rank); kvtier caches K and V heads")
    if config.get("use_bidirectional_attention"):
        raise InvalidRequestError(f"{name} has bidirectional attention; kvtier runs causal attention only")
    other_types = sorted(set(config.get("layer_types") or ()) - _LAYER_TYPES)
    if other_types:
        raise InvalidRequestError(
            f"{name} has layers of type {', '.join(other_types)}; kvtier runs {' and '.join(sorted(_LAYER_TYPES))}"
        )
    for rope_type in _rope_types(config.get("rope_parameters") or {}):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise InvalidRequestError(
                f"{name} has {rope_type} rotary embeddings: the keys of the same tokens change with the length of the "
                "sequence, so they cannot be cached by prefix"
            )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Types of the rotary embeddings; `parameters` is one dictionary, or one for each layer type."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(rope.get("rope_type", "default")) for rope in (nested or [parameters])}


def _geometry(calls: list[LayerCall], config: dict[str, Any]) -> ModelGeometry:
    name, num_layers = config["model_type"], config["num_hidden_layers"]
    if [call.layer for call in calls] != list(range(num_layers)):
        raise InvalidRequestError(
            f"{name} has {num_layers} layers, of which {len(calls)} called the attention function; "
            "kvtier runs models in which every layer does so once, in order"
        )
    shapes = {(call.key.shape, call.value.shape) for call in calls}
    if len(shapes) > 1:
        raise InvalidRequestError(f"{name} has layers with different KV heads or head dimensions; pages hold one size")
    key_shape, value_shape = shapes.pop()
    if key_shape != value_shape:
        raise InvalidRequestError(f"{name} has keys and values of different sizes; pages hold one size for both")
    _, num_kv_heads, head_dim = key_shape
    if head_dim % BLOCK_SIZE:
        raise InvalidRequestError(f"{name} has head dimension {head_dim}; it must be a multiple of {BLOCK_SIZE}")
    windows = tuple(call.sliding_window for call in calls)
    _check_windows(windows, config)
    return ModelGeometry(num_layers, num_kv_heads, head_dim, windows)


def _check_windows(windows: tuple[int | None, ...], config: dict[str, Any]) -> None:
    """Raises when a layer that should have a window did not pass it on: some models state it in their mask alone."""
    for layer, layer_type in enumerate(config.get("layer_types") or ()):
        if layer_type == "sliding_attention" and windows[layer] is None:
            raise InvalidRequestError(
                f"layer {layer} of {config['model_type']} has a sliding window that it does not pass to its attention "
                "function, so kvtier would ignore it"
            )
