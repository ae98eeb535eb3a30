"""The contract between a replay and who serves its requests: a modelled worker, or a real one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.replay.load import Load
from kvtier.replay.options import Memory
from kvtier.replay.tally import Tally

TIMEOUT_S = 60.0
"""Deadline of a call to the daemon: making room for a long prompt moves many pages."""


class Attachment(NamedTuple):
    """What an engine attaches to: the daemon at `address`, with pages of a format, as the tenant `namespace`."""

    address: str
    page_format: PageFormat
    namespace: str


class Engine(Protocol):
    """Who serves the requests of a replay.

    Attributes:
        name: "modelled" or "real", for the figures.
        heading: what it is, for people.
        device: where a daemon's pool must be for it, as the daemon's setting of this name.
        shrink_factor: how many times larger a page of the model is than one in the daemon's pool, in every format.
    """

    @property
    def name(self) -> str: ...

    @property
    def heading(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def shrink_factor(self) -> int: ...

    def layout(self, page_format: PageFormat) -> PageLayout:
        """Pages of the model."""

    def identity(self, page_format: PageFormat) -> CacheIdentity:
        """What it attaches with."""

    def check(self, memory: Memory) -> None:
        """Raises `InvalidRequestError` where it makes no sense with this memory."""

    def run(self, attachment: Attachment, load: Load, tally: Tally) -> None:
        """Serves a load until a place is free that no session is left for, or its time is up; what happened goes to
        `tally`.
        """
