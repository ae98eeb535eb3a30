"""What the index must do, said as plainly as possible: a dictionary of pages.

A page is named by its path: `(namespace, (extra, content), ...)`, with one `(extra, content)` for every page up to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from kvtier.pages.chain import next_key, root_key

Path = tuple  # type: ignore[type-arg]
PageKind = tuple[bytes, int]  # (extra, content)

PAGE_SIZE = 16
FINGERPRINT = b"f" * 32


def page_tokens(content: int) -> bytes:
    """Tokens of a page; two pages differ in their last token only."""
    return np.array([7] * (PAGE_SIZE - 1) + [content], dtype="<u4").tobytes()


def tokens_of(*contents: int) -> bytes:
    return b"".join(map(page_tokens, contents))


def namespace_key(namespace: str) -> bytes:
    return root_key(FINGERPRINT, namespace)


def prefixes(start: Path, end: Path) -> list[Path]:
    """The pages behind `start`, up to and with `end`."""
    return [end[:length] for length in range(len(start) + 1, len(end) + 1)]


@dataclass
class Page:
    """Where a page is."""

    on_device: bool = False
    on_host: bool = False
    stored: bool = False
    last_access: int = 0


class PlainModel:
    """Pages by path, and how many holds each has in each pool."""

    def __init__(self) -> None:
        self.pages: dict[Path, Page] = {}
        self.redis: set[Path] = set()
        self.device_holds: Counter[Path] = Counter()
        self.host_holds: Counter[Path] = Counter()
        self._clock = 0
        self._keys: dict[Path, bytes] = {}

    def key(self, path: Path) -> bytes:
        """The chain key of a page, or of a namespace's root."""
        if path not in self._keys:
            if len(path) == 1:
                self._keys[path] = namespace_key(path[0])
            else:
                extra, content = path[-1]
                self._keys[path] = next_key(self.key(path[:-1]), page_tokens(content), extra)
        return self._keys[path]

    # --- what is known -----------------------------------------------------------------------------------------------

    def known(self, start: Path, end: Path) -> list[Path]:
        """The known pages behind `start` on the way to `end`."""
        return list(takewhile(self.pages.__contains__, prefixes(start, end)))

    def children(self, path: Path) -> list[Path]:
        return [other for other in self.pages if len(other) == len(path) + 1 and other[:-1] == path]

    def device_ends(self) -> list[Path]:
        """Pages on the device without a page on the device behind them."""
        inner = {path[:-1] for path, page in self.pages.items() if page.on_device}
        return [path for path, page in self.pages.items() if page.on_device and path not in inner]

    def host_ends(self) -> list[Path]:
        """Pages in host memory alone without any page behind them."""
        inner = {path[:-1] for path in self.pages}
        return [path for path, page in self.pages.items() if not page.on_device and path not in inner]

    def stored_behind(self, start: Path, end: Path) -> list[Path]:
        """The pages behind `start` on the way to `end`, up to the first that Redis lacks."""
        return list(takewhile(self.redis.__contains__, prefixes(start, end)))

    def mirrors(self) -> list[Path]:
        """Pages in both pools whose host slot nothing holds."""
        both = [path for path, page in self.pages.items() if page.on_device and page.on_host]
        return [path for path in both if not self.host_holds[path]]

    # --- what happens ------------------------------------------------------------------------------------------------

    def touch(self, end: Path) -> None:
        self._clock += 1
        for path in prefixes(end[:1], end):
            self.pages[path].last_access = self._clock

    def arrive_on_device(self, path: Path) -> bool:
        """Whether the page takes the slot that it is offered."""
        page = self.pages.setdefault(path, Page())
        taken = not page.on_device
        page.on_device = True
        return taken

    def arrive_on_host(self, path: Path) -> bool:
        """Whether the page takes the slot that it is offered."""
        page = self.pages.setdefault(path, Page())
        taken = not page.on_host
        page.on_host = True
        return taken

    def arrive_in_redis(self, paths: list[Path]) -> None:
        for path in paths:
            self.pages[path].stored = True
        self.redis.update(paths)

    def drop_device(self, paths: list[Path]) -> int:
        """Drops pages from the device, last first, as far as that may go."""
        freed = 0
        for path in reversed(paths):
            page = self.pages[path]
            behind = self.children(path)
            if not page.on_device or self.device_holds[path] or any(self.pages[child].on_device for child in behind):
                break
            if not page.on_host and behind:
                break
            page.on_device = False
            if not page.on_host:
                del self.pages[path]
            freed += 1
        return freed

    def drop_host(self, paths: list[Path]) -> int:
        """Drops pages that are in host memory alone, last first, as far as that may go."""
        freed = 0
        for path in reversed(paths):
            if self.pages[path].on_device or self.host_holds[path] or self.children(path):
                break
            del self.pages[path]
            freed += 1
        return freed

    def remove_namespace(self, namespace: str) -> tuple[int, int, int]:
        """Removes all pages but held ones and those before them; returns numbers: on the device, on the host, kept."""
        ours = [path for path in self.pages if path[0] == namespace]
        held = [path for path in ours if self.device_holds[path] or self.host_holds[path]]
        kept = {path for end in held for path in prefixes(end[:1], end)}
        gone = [self.pages.pop(path) for path in ours if path not in kept]
        return sum(page.on_device for page in gone), sum(page.on_host for page in gone), len(kept)
