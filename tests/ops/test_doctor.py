"""`kvtier doctor` on a machine without a GPU, and what it says when something computes wrongly."""

from __future__ import annotations

import pytest
import torch

from kvtier.ops.doctor import Check, Report, examine


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_is_healthy() -> None:
    report = examine()
    assert report.is_healthy
    text = "\n".join(report.lines())
    assert "no NVIDIA GPU: everything runs on the CPU" in text
    assert "decode_attention, nvfp4 pages  torch reference: there is no NVIDIA GPU" in text
    assert "quantize_append                ok: 0 of " in text
    assert report.to_json()["healthy"] is True
    assert report.to_json()["choices"]["gather_dequantize"]["implementation"] == "torch reference"


def test_a_wrong_result_is_not_healthy() -> None:
    wrong = Report(
        [], {}, [Check("quantize_append", True, "", 0.0), Check("decode_attention", False, "error 1", 0.001)]
    )
    assert not wrong.is_healthy
    assert "decode_attention  WRONG: error 1, 1 ms" in "\n".join(wrong.lines())
