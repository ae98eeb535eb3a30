"""The same turn without a cache: a prefill of the whole prompt by transformers alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvtier.worker import WorkerModel
from kvtier.worker.attention import ATTENTION_NAME


def cold_first_token_s(model: WorkerModel, prompt: Sequence[int]) -> float:
    """Seconds to the first token with transformers' own attention and cache on the same weights and threads."""
    module = model.module
    module.set_attn_implementation("sdpa")
    try:
        started_s = time.perf_counter()
        with torch.inference_mode():
            module(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits.argmax()
        return time.perf_counter() - started_s
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
