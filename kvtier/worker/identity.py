"""What a worker states about its model when it attaches: the parts of the fingerprint that come from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"

_WEIGHT_SUFFIXES = (".safetensors", ".bin")


def weights_digest(directory: Path, gguf_file: str | None = None) -> str:
    """BLAKE2b-128 over the configuration and the weight files that a model is loaded from, as hexadecimal text.

    Names and contents of `config.json` and the weight files of `directory` in order of their names; of one GGUF file,
    which holds its configuration itself, when `gguf_file` is given. It reads every byte: state a revision of your own
    where that takes too long.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvtier weights")
    for path in [directory / gguf_file] if gguf_file else _model_files(directory):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def rope_text(config: dict[str, Any]) -> str:
    """The rotary settings of a configuration as canonical JSON; empty for a model without rotary embeddings."""
    parameters = config.get("rope_parameters")
    return json.dumps(parameters, sort_keys=True, separators=(",", ":")) if parameters else ""


def _model_files(directory: Path) -> Iterable[Path]:
    return sorted(path for path in directory.iterdir() if path.name == CONFIG_NAME or path.suffix in _WEIGHT_SUFFIXES)
