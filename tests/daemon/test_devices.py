"""Which memory the device pools of a daemon lie in, on a machine without a GPU."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest
from serving import IDENTITY, PAGE_BYTES, attach, only_cache, small_config

from kvtier.daemon.devices import SharedMemoryOnly, choose_devices
from kvtier.daemon.server import running
from kvtier.errors import ConfigurationError, InvalidRequestError
from kvtier.tiers.shared_memory import free_bytes

needs_no_gpu = pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a GPU driver")


@pytest.mark.parametrize("device", ["shared-memory", pytest.param("auto", marks=needs_no_gpu)])
def test_shared_memory_serves_where_no_gpu_is_wanted_or_there(device: str) -> None:
    devices = choose_devices(device)
    assert isinstance(devices, SharedMemoryOnly)
    first, second = devices.of_ranks([], 2)
    assert first is second
    with pytest.raises(InvalidRequestError, match="device_uuids has 'GPU-1', .* load the model on the CPU"):
        devices.of_ranks(["GPU-1"], 1)


@needs_no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "GPU-2f6e1c3a-0000-11aa-22bb-aabbccddeeff"])
def test_a_gpu_that_is_wanted_and_not_there_is_an_error_with_advice(device: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        choose_devices(device)
    assert f"device is '{device}', but this process cannot use a GPU: " in str(refused.value)
    assert "install the NVIDIA driver and 'kvtier[gpu]', or set device to shared-memory" in str(refused.value)


@needs_no_gpu
async def test_a_daemon_does_not_start_without_the_gpu_it_should_use(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot use a GPU"):
        async with running(small_config(directory, device="cuda")):
            pass
    async with running(small_config(directory)):  # and leaves nothing behind that the next one trips over
        pass


async def test_a_share_is_of_what_is_free_when_the_first_worker_attaches(directory: Path) -> None:
    free_pages = free_bytes() / PAGE_BYTES
    share = f"{100 * 1000 / free_pages:.9f}%"
    config = small_config(directory, device_bytes=share)
    async with running(config) as operator, await attach(directory, IDENTITY) as session:
        assert 900 < session.pool.num_pages < 1100
        assert only_cache(operator).device.pages == session.pool.num_pages
