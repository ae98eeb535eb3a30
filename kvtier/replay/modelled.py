"""The modelled worker: real calls to the daemon for pages that stand for a model's, and virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvtier.client import AsyncSession
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.replay.engine import TIMEOUT_S, Attachment
from kvtier.replay.geometry import LLAMA_3_1_8B, SHRUNK, Geometry
from kvtier.replay.load import Load
from kvtier.replay.options import Memory, Rates, RedisChoice
from kvtier.replay.simulation import Simulation
from kvtier.replay.tally import Tally
from kvtier.replay.tokens import VOCAB_SIZE
from kvtier.replay.worker import ReplayWorker


@dataclass(frozen=True)
class ModelledEngine:
    """An `Engine` for a model that is too large to run here, of this geometry and at these rates."""

    geometry: Geometry = LLAMA_3_1_8B
    page_size: int = 64
    rates: Rates = Rates()

    @property
    def name(self) -> str:
        return "modelled"

    @property
    def heading(self) -> str:
        return (
            f"modelled worker, prefill {self.rates.prefill_tokens_per_s:,g} tokens/s, decode "
            f"{self.rates.decode_tokens_per_s:,g} tokens/s a sequence, geometry {self.geometry}"
        )

    @property
    def device(self) -> str:
        return "auto"

    @property
    def shrink_factor(self) -> int:
        return self.geometry.shrink_factor

    def layout(self, page_format: PageFormat) -> PageLayout:
        return self.geometry.layout(page_format, self.page_size)

    def identity(self, page_format: PageFormat) -> CacheIdentity:
        return CacheIdentity("replay", "none", VOCAB_SIZE, SHRUNK.layout(page_format, self.page_size))

    def check(self, memory: Memory) -> None:
        for page_format in memory.formats:
            self.rates.check_promotion(self.layout(page_format).token_bytes, memory.redis != RedisChoice.NONE)

    def run(self, attachment: Attachment, load: Load, tally: Tally) -> None:
        asyncio.run(self._run(attachment, load, tally))

    async def _run(self, attachment: Attachment, load: Load, tally: Tally) -> None:
        address, page_format, namespace = attachment
        async with await AsyncSession.connect(address, self.identity(page_format), timeout_s=TIMEOUT_S) as session:
            worker = ReplayWorker(session, namespace)
            await Simulation(worker, load, self.rates, self.layout(page_format).token_bytes, tally).run()
