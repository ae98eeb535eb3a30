"""Page-locks host memory piece by piece in the background, so that nobody waits for all of it.

Copies to and from page-locked ("pinned") memory go straight through the GPU's copy engines; other memory the driver
copies first, or afterwards. Pinning takes the machine 50 ms a gigabyte and more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvtier.errors import GpuError

_log = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_POLL_S = 0.05


class Registrar(Protocol):
    """Pins memory of this process, given by address; raises `GpuError` when it may not, or cannot."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins a range."""

    def unregister(self, address: int) -> None:
        """Ends what `register` of the same address began."""


class Pinning:
    """Pins the memory from `address` on, in chunks of `chunk_bytes`, from the first to the last.

    `ready_bytes` tells how many bytes may be touched by now, `final_bytes` how many it will be: in the end the one has
    grown, or the other fallen, until they are the same. After each chunk it rests for as long as that took: while the
    machine pins, other threads wait for new memory. When a chunk cannot be pinned, it and those behind it stay as they
    are: the log says why.
    """

    def __init__(
        self,
        registrar: Registrar,
        address: int,
        chunk_bytes: int,
        final_bytes: Callable[[], int],
        ready_bytes: Callable[[], int],
    ) -> None:
        self._registrar = registrar
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._final_bytes = final_bytes
        self._ready_bytes = ready_bytes
        self._is_closing = threading.Event()
        self.pinned_bytes = 0  # NOTE: always a whole number of chunks, or all; grows until it is closed
        self._thread = threading.Thread(target=self._run, name="kvtier-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        started = told = time.monotonic()
        while self.pinned_bytes < (final_bytes := self._final_bytes()) and not self._is_closing.is_set():
            chunk = min(self._chunk_bytes, final_bytes - self.pinned_bytes)
            if self._ready_bytes() < self.pinned_bytes + chunk:
                self._is_closing.wait(_POLL_S)
                continue
            began = time.monotonic()
            try:
                self._registrar.register(self._address + self.pinned_bytes, chunk)
            except GpuError as error:
                _log.warning(
                    "only %d of %d bytes of host memory are pinned, copies from and to the rest are slower: %s; raise "
                    "the limit of locked memory (ulimit -l), or give the daemon less --host-bytes",
                    self.pinned_bytes,
                    final_bytes,
                    error,
                )
                return
            self.pinned_bytes += chunk
            now = time.monotonic()
            self._is_closing.wait(now - began)
            if now - told >= _LOG_EVERY_S or self.pinned_bytes == final_bytes:
                told = now
                _log.info(
                    "pinned %d of %d bytes of host memory in %.1f s", self.pinned_bytes, final_bytes, now - started
                )

    def wait(self) -> None:
        """Returns when all is pinned that will be."""
        self._thread.join()

    def close(self) -> None:
        """Ends with the chunk under way, and gives back what is pinned."""
        self._is_closing.set()
        self.wait()
        for offset in range(0, self.pinned_bytes, self._chunk_bytes):
            self._registrar.unregister(self._address + offset)
        self.pinned_bytes = 0
