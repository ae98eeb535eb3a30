"""Index tensors from the host to the device of a model in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import accumulate

import torch

_ALIGNMENT_BYTES = 16


def upload(tensors: Items[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """`tensors`, made on the CPU, on `device`: themselves there, else parts of one copy through pinned memory."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    # torch keeps pinned memory for the next time, but not before the copy out of it has ended.
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for part, tensor in zip(_parts(pinned, starts, tensors), tensors, strict=True):
        part.copy_(tensor)
    return _parts(pinned.to(device, non_blocking=True), starts, tensors)


def _parts(packed: torch.Tensor, starts: Items[int], tensors: Items[torch.Tensor]) -> list[torch.Tensor]:
    return [
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]
