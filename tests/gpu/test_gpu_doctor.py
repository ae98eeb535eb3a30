"""`kvtier doctor` on a GPU: what it chose, and that its self-test passes."""

from __future__ import annotations

import torch

from kvtier.ops.dispatch import Implementation
from kvtier.ops.doctor import examine


def test_the_doctor_finds_the_kernels_healthy(device: torch.device) -> None:
    report = examine()
    facts = dict(report.facts)
    assert torch.cuda.get_device_name(device) in facts["device"]
    assert facts["driver"].startswith("up to CUDA 1")
    chosen = {operation: choice.implementation for operation, choice in report.choices.items()}
    assert chosen["quantize_append"] is chosen["gather_dequantize"] is Implementation.KERNEL
    assert chosen["transform, recipe balanced"] is chosen["transform, recipe full"] is Implementation.KERNEL
    assert chosen["decode_attention, nvfp4 pages"] is Implementation.KERNEL
    assert [check.name for check in report.checks if check.passed] == [
        "transform, recipe balanced",
        "transform, recipe full",
        "quantize_append",
        "gather_dequantize",
        "decode_attention",
    ]
