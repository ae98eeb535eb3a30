"""Sessions on a modelled GPU and a real daemon, against times worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from serving import PAGE_SIZE, attach, directory, small_config, some_tokens

from kvtier.client import TokensByTier
from kvtier.daemon.server import running
from kvtier.errors import InvalidRequestError
from kvtier.replay.endless import EndlessCache
from kvtier.replay.load import Load
from kvtier.replay.options import Rates, Workload
from kvtier.replay.simulation import Simulation
from kvtier.replay.tally import Served, Tally
from kvtier.replay.trace import Request, Session
from kvtier.replay.worker import ReplayWorker

__all__ = ["directory"]

# A token is computed in 0.1 s, and a page comes from host memory in 1 s.
RATES = Rates(prefill_tokens_per_s=10, decode_tokens_per_s=2, host_bytes_per_s=2 * PAGE_SIZE)
TOKEN_BYTES = 2


def session_of(name: str, *requests: Request) -> Session:
    return Session(name, lambda: iter(requests))


def request(num_tokens: int, seed: int, output_tokens: int = 1, think_s: float = 0.0) -> Request:
    return Request(some_tokens(num_tokens // PAGE_SIZE + 1, seed)[:num_tokens], output_tokens, think_s)


class Outcome(Tally):
    """A tally that also keeps what it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.served: list[Served] = []
        self.num_sessions = 0

    def add(self, served: Served) -> None:
        super().add(served)
        self.served.append(served)


async def simulate(
    directory: Path, sessions: list[Session], concurrency: int, device_pages: int = 64, **workload: float
) -> Outcome:
    outcome = Outcome()
    async with running(small_config(directory, device_pages)), await attach(directory) as session:
        load = Load(sessions, Workload(Path("-"), **{"start_interval_s": 0.0, **workload}), concurrency, PAGE_SIZE)
        await Simulation(ReplayWorker(session, "replay"), load, RATES, TOKEN_BYTES, outcome).run()
    outcome.num_sessions = load.num_begun
    return outcome


async def test_two_sessions_queue_for_the_gpu_and_a_third_takes_the_first_free_place(directory: Path) -> None:
    sessions = [session_of(str(seed), request(100, seed, output_tokens=11)) for seed in range(3)]
    outcome = await simulate(directory, sessions, concurrency=2)
    # Computed from 0 to 10 and from 10 to 20, each reply takes 5 s more. The third arrives at 15 and is computed from
    # 20 on; at 25 the second place is free and nobody is left to take it.
    assert [served.first_token_s for served in outcome.served] == [10, 20]
    assert (outcome.num_sessions, outcome.duration_s, outcome.prefill_s) == (3, 25, 30)


async def test_a_session_thinks_and_finds_the_turn_before(directory: Path) -> None:
    second = request(160, seed=1, output_tokens=11, think_s=7.0)
    first = Request(second.prompt[:100], 11, 0.0)
    outcome = await simulate(directory, [session_of("a", first, second)], concurrency=1, think_time_scale=2.0)
    assert [served.found for served in outcome.served] == [TokensByTier(), TokensByTier(device=96)]
    assert [served.findable_tokens for served in outcome.served] == [0, 96]
    assert [served.first_token_s for served in outcome.served] == pytest.approx([10, 6.4])
    assert outcome.duration_s == pytest.approx(10 + 5 + 14 + 6.4 + 5)


async def test_the_first_sessions_start_one_after_the_other(directory: Path) -> None:
    sessions = [session_of(str(seed), request(40, seed)) for seed in range(3)]
    outcome = await simulate(directory, sessions, concurrency=2, start_interval_s=6.0)
    # From 0 to 4; the third session takes the first place at 4; the second starts at 6 and waits until 8.
    assert [served.first_token_s for served in outcome.served] == [4, 4]
    assert outcome.duration_s == 8


async def test_a_request_waits_for_pages_and_for_their_transfer(directory: Path) -> None:
    grown = request(11 * PAGE_SIZE, seed=1)
    sessions = [
        session_of("a", Request(grown.prompt[: 10 * PAGE_SIZE], 1, 0.0), grown),
        session_of("b", request(10 * PAGE_SIZE, seed=2), request(PAGE_SIZE, seed=3, think_s=1000)),
    ]
    outcome = await simulate(directory, sessions, concurrency=2, device_pages=16)
    # A's first prompt takes 11 of 16 pages until 16 s. Then B's takes them, so that five of A's pages go to host
    # memory, and holds them until 32 s. A's second prompt, here since 16 s, waits for that, brings the five up in 5 s
    # and computes one page.
    assert [served.first_token_s for served in outcome.served] == pytest.approx([16, 32, 16 + 5 + 1.6])
    assert [served.found for served in outcome.served] == [TokensByTier(), TokensByTier(), TokensByTier(80, 80)]
    assert outcome.duration_s == pytest.approx(38.6)


async def test_a_prompt_larger_than_the_pool_is_refused_and_the_session_goes_on(directory: Path) -> None:
    session = session_of("a", request(20 * PAGE_SIZE, seed=1), request(PAGE_SIZE, seed=2, think_s=3))
    outcome = await simulate(directory, [session], concurrency=1, device_pages=16)
    assert outcome.num_refused == 1
    assert [served.first_token_s for served in outcome.served] == pytest.approx([1.6])
    assert outcome.duration_s == pytest.approx(4.6)


async def test_a_prompt_that_is_cached_whole_computes_its_last_page(directory: Path) -> None:
    prompt = request(4 * PAGE_SIZE, seed=1)
    outcome = await simulate(directory, [session_of("a", prompt, prompt)], concurrency=1)
    assert [served.found.total for served in outcome.served] == [0, 3 * PAGE_SIZE]
    assert [served.findable_tokens for served in outcome.served] == [0, 3 * PAGE_SIZE]


def test_attention_over_a_long_context_takes_its_time() -> None:
    rates = Rates(prefill_tokens_per_s=100, half_rate_context=1000)
    assert rates.prefill_s(0, 1000) == pytest.approx(10 * 1.5)
    assert rates.prefill_s(1000, 1100) == pytest.approx(1 * 2.05)
    assert Rates(prefill_tokens_per_s=100).prefill_s(1000, 1100) == pytest.approx(1)


def test_what_comes_from_redis_crosses_the_link_from_host_memory_too() -> None:
    rates = Rates(host_bytes_per_s=50, redis_bytes_per_s=5)
    assert rates.transfer_s(TokensByTier(1000, 10, 20), token_bytes=2) == pytest.approx(60 / 50 + 40 / 5)


def test_a_tier_that_is_slower_than_computing_is_not_replayed() -> None:
    rates = Rates(prefill_tokens_per_s=1000, host_bytes_per_s=2000, redis_bytes_per_s=1000)
    rates.check_promotion(token_bytes=1, has_redis=False)
    with pytest.raises(InvalidRequestError, match="takes 1500 us from redis to the device and 1000 us to compute"):
        rates.check_promotion(token_bytes=1, has_redis=True)


def test_a_cache_without_end_finds_the_longest_prefix() -> None:
    endless = EndlessCache(PAGE_SIZE)
    tokens = some_tokens(6, seed=1)
    endless.add(endless.prefixes(tokens[: 4 * PAGE_SIZE + 3]))
    changed = tokens.copy()
    changed[2 * PAGE_SIZE] += 1
    swapped = np.concatenate([tokens[PAGE_SIZE : 2 * PAGE_SIZE], tokens[:PAGE_SIZE]])
    found = [endless.find(endless.prefixes(prompt)) for prompt in (tokens, changed, swapped, tokens[:PAGE_SIZE])]
    assert found == [4 * PAGE_SIZE, 2 * PAGE_SIZE, 0, PAGE_SIZE]
