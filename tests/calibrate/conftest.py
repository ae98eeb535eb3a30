"""Fixtures of the tests of the calibration."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads of tiny models only wait for each other."""
    torch.set_num_threads(1)
