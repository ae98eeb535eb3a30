"""Fixtures of the tests of the evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_models import save_tiny_model
from single_thread import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer, as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model(directory)
    return directory
