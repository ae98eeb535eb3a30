"""The pool in GPU memory: bytes up and down, whatever their size and place, and in both directions at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from gpu_pages import read_all, write_pages

from kvtier.cuda_driver import Gpu, gpus, parse_cpus
from kvtier.errors import ConfigurationError
from kvtier.index.pool import SlotArray, slot_array
from kvtier.tiers.cuda_device import CudaDevicePool
from kvtier.tiers.host import HostPool

NUM_PAGES = 48
PAGE_BYTES = {"300 KiB and a bit": 300 * 1024 + 16, "1 MiB": 1 << 20, "128K Llama 8B": 2_359_296}
PIN_CHUNK_BYTES = 4 << 20


class Pools:
    """A pool on the GPU and one in host memory, with the bytes that are in them."""

    def __init__(self, gpu: Gpu, page_bytes: int) -> None:
        self.device = CudaDevicePool(gpu, NUM_PAGES, page_bytes, PIN_CHUNK_BYTES)
        self.host = HostPool(f"kvtier-test-gpu-{threading.get_native_id()}", NUM_PAGES, page_bytes)
        random = np.random.default_rng(page_bytes)
        self.device_images = random.integers(0, 256, (NUM_PAGES, page_bytes), dtype=np.uint8)
        self.host.pages[:] = random.integers(0, 256, (NUM_PAGES, page_bytes), dtype=np.uint8)
        self.host_images = self.host.pages.copy()
        write_pages(self.device.memory, np.arange(NUM_PAGES), self.device_images)

    def pin(self) -> None:
        self.device.pin(self.host)
        assert self.device._pinning is not None
        self.device._pinning.wait()
        assert self.device.pinned_bytes == self.host.pages.nbytes

    def spill(self, device_slots: SlotArray, host_slots: SlotArray) -> None:
        self.device.read_pages(device_slots, self.host, host_slots)
        self.host_images[host_slots] = self.device_images[device_slots]

    def promote(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        self.device.write_pages(device_slots, self.host, host_slots)
        self.device_images[device_slots] = self.host_images[host_slots]

    def check(self) -> None:
        """Every page of both pools, those that were not moved too."""
        assert np.array_equal(self.host.pages, self.host_images)
        assert np.array_equal(read_all(self.device.memory), self.device_images)

    def close(self) -> None:
        self.device.close()
        self.host.close()


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return gpus()[0]


@pytest.fixture
def open_pools(gpu: Gpu) -> Iterator[Callable[[int], Pools]]:
    opened: list[Pools] = []

    def open_one(page_bytes: int) -> Pools:
        opened.append(Pools(gpu, page_bytes))
        return opened[-1]

    yield open_one
    for pools in opened:
        pools.close()


def transfers(seed: int) -> list[tuple[SlotArray, SlotArray]]:
    """Pairs of slot sets: none, one, many in a row, all shuffled, some in runs, some anywhere."""
    random = np.random.default_rng(seed)
    shuffled = slot_array(random.permutation(NUM_PAGES))
    row = slot_array(np.arange(NUM_PAGES))
    runs = slot_array(np.r_[20:29, 3:7, 40:48])
    return [
        (row[:0], row[:0]),
        (row[5:6], row[40:41]),
        (row[5:40], row[6:41]),
        (shuffled, slot_array(random.permutation(NUM_PAGES))),
        (runs, runs[::-1].copy()),
        (shuffled[:17], row[20:37]),
    ]


@pytest.mark.parametrize("state", ["pageable", "while it is pinned", "pinned"])
@pytest.mark.parametrize("size", PAGE_BYTES)
def test_pages_arrive_byte_for_byte_and_others_stay(size: str, state: str, open_pools: Callable[[int], Pools]) -> None:
    pools = open_pools(PAGE_BYTES[size])
    if state == "pinned":
        pools.pin()
    elif state == "while it is pinned":
        pools.device.pin(pools.host)
    for device_slots, host_slots in transfers(seed=1):
        pools.spill(device_slots, host_slots)
        pools.check()
    for device_slots, host_slots in transfers(seed=2):
        pools.promote(host_slots, device_slots)
        pools.check()


def test_both_directions_at_once_and_several_threads_each(open_pools: Callable[[int], Pools]) -> None:
    pools = open_pools(PAGE_BYTES["300 KiB and a bit"])
    pools.pin()
    random = np.random.default_rng(3)
    down_device, up_device = np.split(slot_array(random.permutation(NUM_PAGES)), 2)
    down_host, up_host = np.split(slot_array(random.permutation(NUM_PAGES)), 2)
    failures: list[BaseException] = []

    def repeat(move: Callable[[SlotArray, SlotArray], None], sources: SlotArray, targets: SlotArray) -> None:
        try:
            for _ in range(40):
                move(sources, targets)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [
        threading.Thread(target=repeat, args=(move, sources[half], targets[half]))
        for half in (slice(None, 12), slice(12, None))
        for move, sources, targets in ((pools.spill, down_device, down_host), (pools.promote, up_host, up_device))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    pools.check()


def test_a_pool_that_does_not_fit_says_what_is_there(gpu: Gpu) -> None:
    free_bytes, total_bytes = gpu.memory_info()
    page_bytes = 1 << 20
    num_pages = total_bytes // page_bytes + 1
    with pytest.raises(ConfigurationError) as refused:
        CudaDevicePool(gpu, num_pages, page_bytes)
    message = str(refused.value)
    assert f"{num_pages * page_bytes:,} bytes ({num_pages:,} pages of {page_bytes:,}) does not fit on {gpu}" in message
    assert f"of {total_bytes:,} bytes are free; give the daemon less --device-bytes" in message
    assert gpu.memory_info().free_bytes == pytest.approx(free_bytes, rel=0.05)  # and nothing is lost by asking


def test_closing_gives_the_memory_back(gpu: Gpu) -> None:
    before = gpu.memory_info().free_bytes
    pools = Pools(gpu, PAGE_BYTES["1 MiB"])
    pools.pin()
    assert gpu.memory_info().free_bytes <= before - NUM_PAGES * (1 << 20)
    pools.close()
    assert gpu.memory_info().free_bytes >= before - (8 << 20)


def test_a_tensor_of_the_pool_is_the_pool(open_pools: Callable[[int], Pools]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    pools = open_pools(PAGE_BYTES["1 MiB"])
    tensor = torch.as_tensor(pools.device.memory)
    assert (tensor.data_ptr(), tensor.device.type, tensor.dtype) == (pools.device.memory.address, "cuda", torch.uint8)
    assert tensor.shape == (NUM_PAGES, 1 << 20)
    np.testing.assert_array_equal(tensor[7].cpu().numpy(), pools.device_images[7])
    tensor[9] = 5
    torch.cuda.synchronize()
    pools.device_images[9] = 5
    pools.check()


def test_the_cpus_near_a_gpu_are_cpus_of_this_machine(device: torch.device) -> None:
    assert parse_cpus("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert parse_cpus("\n") == frozenset()
    near = gpus()[device.index].local_cpus()
    print("near", device, sorted(near))
    assert near <= set(range(os.cpu_count() or 0))
