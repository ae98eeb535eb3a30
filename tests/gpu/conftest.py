"""Tests of the CUDA kernels: collected only where there is a GPU for them, and what `kvtier[gpu]` installs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

HAS_CUDA_CORE = find_spec("cuda") is not None and find_spec("cuda.core") is not None
collect_ignore_glob = [] if torch.cuda.is_available() and HAS_CUDA_CORE else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)
