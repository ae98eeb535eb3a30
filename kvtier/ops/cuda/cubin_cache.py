"""Compiled kernels on disk: one file an entry, verified whenever it is read.

A file holds a magic number with the version of this format, the entry's key, the SHA-256 of the cubin, and the cubin.
Whatever does not fit (damaged, cut short, of another key or format, of another user) is a miss: the caller compiles
again and replaces it. Files appear by rename, so readers and writers of several processes never see half an entry.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAGIC = b"kvtier cubin 1\n\x00"
DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


def default_directory() -> Path:
    """Where compiled kernels are kept, in the user's cache directory as XDG defines it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier" / "kernels"


def entry_key(parts: Sequence[str]) -> bytes:
    """The name of what is compiled from `parts`: source texts, options, architecture and compiler version."""
    digest = hashlib.sha256(MAGIC)
    for part in parts:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)  # lengths keep ("ab", "c") apart from ("a", "bc")
    return digest.digest()


class CubinCache:
    """The entries in one directory, which is created, for this user alone, when the first one is written.

    A directory that cannot be written costs time, not function: it is logged, and every process compiles.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, key: bytes) -> Path:
        """Where the entry of `key` is kept."""
        return self._directory / f"{key.hex()}.cubin"

    def read(self, key: bytes) -> bytes | None:
        """The cubin, or None when there is no entry or not exactly the one that was written for `key`."""
        try:
            with self.path(key).open("rb") as file:
                is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
                entry = file.read()
        except OSError:
            return None
        header = MAGIC + key
        cubin = entry[len(header) + DIGEST_BYTES :]
        if is_ours and entry == header + hashlib.sha256(cubin).digest() + cubin:
            return cubin
        logger.warning("the compiled kernel %s is damaged or not ours; compiling it anew", self.path(key))
        return None

    def write(self, key: bytes, cubin: bytes) -> None:
        """Keeps `cubin` under `key`, replacing what is there."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(MAGIC + key + hashlib.sha256(cubin).digest() + cubin)
            os.replace(file.name, self.path(key))
        except OSError as error:
            logger.warning("the compiled kernel %s is not kept: %s", self.path(key), error)
