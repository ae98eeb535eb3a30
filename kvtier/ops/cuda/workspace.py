"""Scratch memory of the decode kernel."""

from __future__ import annotations

import torch

from kvtier.ops.cuda.tensors import num_multiprocessors
from kvtier.ops.cuda.variants import MAX_SCRATCH_FLOATS_A_BLOCK


class DecodeWorkspace:
    """Partial results of a decode and the counters of who has arrived; about 22 MB on an H200.

    Decodes that run one after the other on one stream, such as those of all layers, share one workspace. A CUDA graph
    that captured a decode uses its workspace at every replay, so it must live as long as the graph.

    NOTE: decodes that may run at the same time need workspaces of their own.
    """

    def __init__(self, device: torch.device, max_sequences: int, num_kv_heads: int) -> None:
        """For batches of up to `max_sequences` on a CUDA device."""
        num_floats = num_multiprocessors(device) * MAX_SCRATCH_FLOATS_A_BLOCK
        self.partials = torch.empty(num_floats, dtype=torch.float32, device=device)
        # NOTE: every decode expects zeros and leaves zeros.
        self.arrivals = torch.zeros(max_sequences * num_kv_heads, dtype=torch.int32, device=device)
