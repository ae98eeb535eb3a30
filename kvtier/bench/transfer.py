"""`kvtier bench transfer`: pages between GPU and host memory, beside one bare copy of pinned memory in the same run.

Rounds of everything that is compared are interleaved, so that noise of the machine meets all alike; figures are medians
over rounds. Pages lie in random order in both pools: no two are neighbours but by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvtier.errors import ConfigurationError
from kvtier.index.pool import SlotArray, slot_array
from kvtier.metrics import Metrics
from kvtier.tiers.host import HostPool
from kvtier.tiers.mover import Mover, RankPools

if TYPE_CHECKING:
    from kvtier.cuda_driver import Gpu

PREFIX_PAGES = 2048
PREFIX_PAGE_BYTES = 2_359_296  # 64 tokens of Llama-3.1-8B in NVFP4
_MOVED_PAGES = 1024
_PAGE_SIZES = {"1mib": 1 << 20, "300kib": 300 << 10}
_BARE_BYTES = 512 << 20
_FILLED_BYTES = 64 << 20

Case = Callable[[], Awaitable[None]]


class Pools(NamedTuple):
    """A device pool, a pinned host pool of as many pages, and a mover between them."""

    mover: Mover
    device_slots: SlotArray  # all of them, in random order; and so are
    host_slots: SlotArray


def find_gpu() -> Gpu:
    """The first GPU; raises `ConfigurationError` where there is none, or nothing to reach it with."""
    try:
        from kvtier.cuda_driver import gpus
    except ImportError as error:
        raise ConfigurationError(f"this benchmark needs a GPU and 'kvtier[gpu]' ({error})") from error
    return gpus()[0]


@contextlib.contextmanager
def open_pools(gpu: Gpu, num_pages: int, page_bytes: int) -> Iterator[Pools]:
    """Pools with random bytes, for the time of a block; host memory is pinned."""
    from kvtier.tiers.cuda_device import CudaDevicePool

    host = HostPool(f"kvtier-bench-{os.getpid()}", num_pages, page_bytes)
    try:
        random = np.random.default_rng(7)
        block = random.integers(0, 256, _FILLED_BYTES, dtype=np.uint8)
        flat = host.pages.reshape(-1)
        for start in range(0, flat.size, block.size):
            part = flat[start : start + block.size]
            part[:] = block[: part.size]
        device = CudaDevicePool(gpu, num_pages, page_bytes)
        try:
            device.pin(host)
            while device.pinned_bytes < flat.size:
                time.sleep(0.01)
            mover = Mover([RankPools(b"", 0, device, host)], None, Metrics())
            yield Pools(mover, slot_array(random.permutation(num_pages)), slot_array(random.permutation(num_pages)))
            mover.close()
        finally:
            device.close()
    finally:
        host.close()


@contextlib.contextmanager
def bare_copies(gpu: Gpu) -> Iterator[tuple[Case, Case]]:
    """One copy of 512 MiB of pinned memory down, and one up, for the time of a block."""
    from cuda.bindings import driver

    from kvtier.cuda_driver import check

    with gpu.current():
        host = int(check(driver.cuMemAllocHost(_BARE_BYTES), "cuMemAllocHost"))
        device = int(check(driver.cuMemAlloc(_BARE_BYTES), "cuMemAlloc"))
        stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")

    def copy(target: int, source: int) -> None:
        with gpu.current():
            check(driver.cuMemcpyAsync(target, source, _BARE_BYTES, stream), "cuMemcpyAsync")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")

    async def down() -> None:
        copy(host, device)

    async def up() -> None:
        copy(device, host)

    try:
        yield down, up
    finally:
        with gpu.current():
            check(driver.cuStreamDestroy(stream), "cuStreamDestroy")
            check(driver.cuMemFree(device), "cuMemFree")
            check(driver.cuMemFreeHost(host), "cuMemFreeHost")


async def median_seconds(rounds: int, cases: dict[str, Case]) -> dict[str, float]:
    """Median seconds of each case over interleaved rounds, after one that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            await case()
            if number:
                samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


async def _measure_moves(gpu: Gpu, name: str, page_bytes: int, rounds: int) -> dict[str, float]:
    """Spill and promotion of 1,024 pages, alone and together."""
    with open_pools(gpu, 2 * _MOVED_PAGES, page_bytes) as pools, bare_copies(gpu) as (down, up):
        spilled, promoted = slice(None, _MOVED_PAGES), slice(_MOVED_PAGES, None)

        async def spill() -> None:
            await pools.mover.spill(pools.device_slots[spilled], pools.host_slots[spilled])

        async def promote() -> None:
            await pools.mover.promote(pools.host_slots[promoted], pools.device_slots[promoted])

        async def both() -> None:
            await asyncio.gather(spill(), promote())

        cases: dict[str, Case] = {"bare_down": down, "bare_up": up, "spill": spill, "promote": promote, "both": both}
        seconds = await median_seconds(rounds, cases)
    moved = _MOVED_PAGES * page_bytes
    num_bytes = {"bare_down": _BARE_BYTES, "bare_up": _BARE_BYTES, "spill": moved, "promote": moved, "both": 2 * moved}
    rate = {case: num_bytes[case] / seconds[case] / 1e9 for case in cases}
    return {
        **{f"{name}_{case}_gbps": value for case, value in rate.items()},
        f"{name}_spill_over_bare": rate["spill"] / rate["bare_down"],
        f"{name}_promote_over_bare": rate["promote"] / rate["bare_up"],
        f"{name}_both_over_one": rate["both"] / max(rate["spill"], rate["promote"]),
    }


async def _measure_prefix(gpu: Gpu, rounds: int) -> dict[str, float]:
    """Promotion of all pages of a 128K-token prefix."""
    with open_pools(gpu, PREFIX_PAGES, PREFIX_PAGE_BYTES) as pools, bare_copies(gpu) as (_, up):

        async def promote() -> None:
            await pools.mover.promote(pools.host_slots, pools.device_slots)

        seconds = await median_seconds(rounds, {"bare": up, "promote": promote})
    bare = seconds["bare"] * PREFIX_PAGES * PREFIX_PAGE_BYTES / _BARE_BYTES
    return {
        "prefix_128k_bare_ms": bare * 1e3,
        "prefix_128k_promote_ms": seconds["promote"] * 1e3,
        "prefix_128k_promote_over_bare": seconds["promote"] / bare,
    }


def run(rounds: int = 15, with_decode: bool = False) -> dict[str, Any]:
    """Figures of transfers: rates in GB/s, times in milliseconds; see the keys.

    `with_decode`: also what a decode step takes while pages move; needs torch. Raises `ConfigurationError` or
    `GpuError` without a GPU.
    """
    from kvtier.bench.transfer_acquire import measure_acquire

    gpu = find_gpu()
    figures: dict[str, Any] = {"gpu": gpu.name, "rounds": rounds}
    for name, page_bytes in _PAGE_SIZES.items():
        figures |= asyncio.run(_measure_moves(gpu, name, page_bytes, rounds))
    figures |= asyncio.run(_measure_prefix(gpu, rounds))
    figures |= measure_acquire(gpu, figures["prefix_128k_bare_ms"])
    if with_decode:
        from kvtier.bench.transfer_decode import measure_decode

        figures |= measure_decode()
    return figures
