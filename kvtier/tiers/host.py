"""The host pool: page images in shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from concurrent.futures import Future

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared_memory import ByteArray, SharedMemory

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 256 << 20
_LOG_EVERY_S = 10.0


class HostPool:
    """`num_pages` page images. `pages` has shape (num_pages, page_bytes), uint8.

    Its memory is taken in the background, which needs a second a gigabyte, so that nobody waits for all of it: the
    first `ready_pages` may be used. Their number grows until it is `num_pages`; should the machine run out of memory
    before, it stays where it is, and the log says so.

    `cpus` take it, so that the machine gives memory that is near them; any CPU when there are none.

    Raises `ConfigurationError` when the machine does not have the memory.
    """

    def __init__(
        self,
        name: str,
        num_pages: int,
        page_bytes: int,
        cpus: frozenset[int] = frozenset(),
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._cpus = cpus
        self._chunk_bytes = chunk_bytes
        self._shared = SharedMemory(name, num_pages * page_bytes, taken_bytes=0)
        self.pages: ByteArray = self._shared.memory.reshape(num_pages, page_bytes)
        self._is_closing = threading.Event()
        self._first_chunk: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvtier-host-pool", daemon=True)
        self._thread.start()
        try:
            self._first_chunk.result()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        if self._cpus:
            with contextlib.suppress(OSError):  # this process may not run there: any memory will do
                os.sched_setaffinity(0, self._cpus)  # of this thread
        try:
            self._shared.take(min(self._chunk_bytes, self._shared.num_bytes))
        except BaseException as error:  # for whoever makes the pool
            self._first_chunk.set_exception(error)
            return
        self._first_chunk.set_result(None)
        self._grow()

    def _grow(self) -> None:
        shared = self._shared
        started = told = time.monotonic()
        while shared.taken_bytes < shared.num_bytes and not self._is_closing.is_set():
            try:
                shared.take(min(shared.taken_bytes + self._chunk_bytes, shared.num_bytes))
            except ConfigurationError as error:
                _log.warning("the host pool stays at %d of %d bytes: %s", shared.taken_bytes, shared.num_bytes, error)
                shared.give_up_rest()
                return
            now = time.monotonic()
            if now - told >= _LOG_EVERY_S or shared.taken_bytes == shared.num_bytes:
                told = now
                _log.info(
                    "took %d of %d bytes of host memory in %.1f s", shared.taken_bytes, shared.num_bytes, now - started
                )

    @property
    def ready_bytes(self) -> int:
        """The first so many bytes may be used."""
        return self._shared.taken_bytes

    @property
    def final_bytes(self) -> int:
        """What `ready_bytes` grows to: less than all once the machine has run out of memory."""
        return self._shared.num_bytes

    @property
    def ready_pages(self) -> int:
        """The first so many pages may be used."""
        return self.ready_bytes // self.page_bytes

    @property
    def address(self) -> int:
        """Where the first page lies in this process."""
        return self.pages.ctypes.data

    def image(self, slot: int) -> memoryview:
        """The bytes of one page; writing to it writes the pool."""
        return memoryview(self.pages[slot])

    def close(self) -> None:
        """Gives the memory back."""
        self._is_closing.set()
        self._thread.join()
        self._shared.close()
