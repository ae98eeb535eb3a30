"""`kvtier bench transfer` where it cannot run."""

from __future__ import annotations

import ctypes.util

import pytest

from kvtier.bench.transfer import run
from kvtier.errors import ConfigurationError, GpuError


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a GPU driver")
def test_it_says_what_is_missing() -> None:
    with pytest.raises((ConfigurationError, GpuError), match="needs a GPU and 'kvtier|the NVIDIA driver is missing"):
        run()
