"""What every configuration is compared with: the model as it is, its K and V never quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.ops import prefill_attention
from kvtier.worker import WorkerModel
from kvtier.worker.attention import LayerCall


class ExactContext:
    """One sequence, whose K and V stay in the dtype in which the model computed them."""

    def __init__(self, model: WorkerModel, num_tokens: int) -> None:
        """With room for `num_tokens`."""
        geometry = model.geometry
        shape = (geometry.num_layers, num_tokens, geometry.num_kv_heads, geometry.head_dim)
        self._model = model
        self._key = torch.empty(shape, dtype=model.dtype)
        self._value = torch.empty(shape, dtype=model.dtype)
        self._new = slice(0)

    def logits(self, tokens: Sequence[int], start: int, wanted: bool) -> torch.Tensor:
        """See `kvtier.evaluate.scoring.Context`."""
        self._new = slice(start, start + len(tokens))
        with torch.inference_mode():
            output = self._model.module(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.arange(start, self._new.stop).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.arange(len(tokens) if wanted else 0),
                kvtier_batch=self,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `AttentionBatch`."""
        key, value = self._key[call.layer], self._value[call.layer]
        key[self._new], value[self._new] = call.key, call.value
        return prefill_attention(
            call.query,
            key[: self._new.stop],
            value[: self._new.stop],
            call.softmax_scale,
            call.sliding_window,
            call.logit_softcap,
        )
