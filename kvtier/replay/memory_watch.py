"""Memory and open files of daemon and worker over the time of a replay, to see whether something leaks.

What is full or warm stops growing; a leak grows in the second half of a replay as it did in the first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

_SAMPLES = 200  # of a replay
_LEAST_SAMPLES = 4  # one for each quarter of it
_STATUS_FIELDS = {"RssAnon": "private_bytes", "VmRSS": "rss_bytes"}
_KIB = 1024


class Growth(NamedTuple):
    """One figure over the time of a replay: its first and last reading, and its growth a minute in each half.

    The growth in a half is the mean of its second part less that of its first, by the time between their middles.
    """

    name: str
    first: float
    last: float
    first_half_per_min: float
    second_half_per_min: float

    @classmethod
    def of(cls, name: str, readings: array[float], duration_s: float) -> Growth:
        """From at least four readings at equal steps."""
        means = [float(part.mean()) for part in np.array_split(np.array(readings), _LEAST_SAMPLES)]
        quarter_min = duration_s / 4 / 60
        halves = ((means[1] - means[0]) / quarter_min, (means[3] - means[2]) / quarter_min)
        return cls(name, readings[0], readings[-1], *halves)


class MemoryWatch:
    """Reads figures of processes and of a GPU at equal steps, from entering to leaving the context.

    Args:
        processes: their ids by name.
        device: of the pool, as a daemon's setting; a GPU's memory is read where it is one.
        duration_s: how long it will watch.
    """

    def __init__(self, processes: dict[str, int], device: str, duration_s: float) -> None:
        self._processes = processes
        self._device = device
        self._duration_s = duration_s
        self._readings: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvtier-memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self) -> tuple[Growth, ...]:
        """Every figure, after the context."""
        items = self._readings.items()
        return tuple(
            Growth.of(name, values, self._duration_s) for name, values in items if len(values) >= _LEAST_SAMPLES
        )

    def _watch(self) -> None:
        # A process that has ended is missed by whoever needs it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while not self._ended.is_set():
                self._read()
                self._ended.wait(self._duration_s / _SAMPLES)
            self._read()

    def _read(self) -> None:
        for process, pid in self._processes.items():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                field, _, value = line.partition(":")
                if field in _STATUS_FIELDS:
                    self._readings[f"{process}_{_STATUS_FIELDS[field]}"].append(int(value.split()[0]) * _KIB)
            self._readings[f"{process}_open_files"].append(len(os.listdir(f"/proc/{pid}/fd")))
        if self._device.startswith("cuda"):
            import torch

            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            self._readings["gpu_used_bytes"].append(total_bytes - free_bytes)
