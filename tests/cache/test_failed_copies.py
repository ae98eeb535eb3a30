"""Copies that fail, on the GPU or to Redis: pages are missed and counted, never wrong, and nothing stays held."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from serving import (
    PAGE_SIZE,
    Valkey,
    assert_true_pages,
    attach,
    eventually,
    small_config,
    some_tokens,
    state_of,
    store,
)

from kvtier.daemon.devices import SharedMemoryDevice
from kvtier.daemon.operator import Operator
from kvtier.daemon.server import running
from kvtier.errors import DaemonError, GpuError
from kvtier.index.pool import SlotArray
from kvtier.metrics import Metrics
from kvtier.results import TokensByTier
from kvtier.tiers.base import Route, Tier
from kvtier.tiers.device import SharedMemoryDevicePool
from kvtier.tiers.host import HostPool
from kvtier.tiers.redis import RedisTier
from kvtier.v1 import admin_pb2, admin_pb2_grpc

FIRST, SECOND = some_tokens(10, seed=1), some_tokens(10, seed=2)


class FailingPool(SharedMemoryDevicePool):
    """Does half of a copy and fails, as long as the copies of that route are broken."""

    broken: set[Route] = set()

    def read_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        part = self._part(Route.DEVICE_TO_HOST, slots)
        super().read_pages(slots[part], host, host_slots[part])
        self._fail(Route.DEVICE_TO_HOST)

    def write_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        part = self._part(Route.HOST_TO_DEVICE, slots)
        super().write_pages(slots[part], host, host_slots[part])
        self._fail(Route.HOST_TO_DEVICE)

    def _part(self, route: Route, slots: SlotArray) -> slice:
        return slice(slots.size // 2 if route in self.broken else None)

    def _fail(self, route: Route) -> None:
        if route in self.broken:
            raise GpuError("cuMemcpyBatchAsync failed: CUDA_ERROR_LAUNCH_FAILED")


@pytest.fixture(autouse=True)
def failing_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingPool, "broken", set())
    monkeypatch.setattr(SharedMemoryDevice, "open_pool", lambda _, *arguments: FailingPool(*arguments))


def failed_pages(operator: Operator, route: Route) -> float:
    (cache,) = operator.registry
    metrics: Metrics = cache._metrics
    return metrics.transfer_pages.labels(route, "failed")._value.get()


async def assert_nothing_is_held(operator: Operator) -> None:
    (cache,) = operator.registry
    await eventually(lambda: cache.num_held(Tier.DEVICE) == cache.num_held(Tier.HOST) == 0)
    assert state_of(operator).caches[0].leases == 0


async def test_pages_that_cannot_be_spilled_are_dropped(directory: Path) -> None:
    config = small_config(directory, device_pages=16, host_pages=32)
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", FIRST)
        FailingPool.broken = {Route.DEVICE_TO_HOST}
        await store(session, "tenant", SECOND)
        assert failed_pages(operator, Route.DEVICE_TO_HOST) == 4
        lease = await session.acquire("tenant", FIRST, wait_s=5)
        assert lease.matched_tokens == TokensByTier(6 * PAGE_SIZE, 0, 0)
        assert_true_pages(session, lease, "tenant", FIRST)
        await lease.release()
        await assert_nothing_is_held(operator)


async def test_pages_that_cannot_be_promoted_stay_where_they_are(directory: Path) -> None:
    config = small_config(directory, device_pages=16, host_pages=32)
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", FIRST)
        await store(session, "tenant", SECOND)  # four pages of the first prompt are in host memory now
        FailingPool.broken = {Route.HOST_TO_DEVICE}
        lease = await session.acquire("tenant", FIRST, wait_s=5)
        assert lease.matched_tokens == TokensByTier(6 * PAGE_SIZE, 0, 0)
        assert lease.left_tokens == TokensByTier(0, 4 * PAGE_SIZE, 0)
        await lease.release()
        assert failed_pages(operator, Route.HOST_TO_DEVICE) == 4
        await assert_nothing_is_held(operator)

        FailingPool.broken = set()
        lease = await session.acquire("tenant", FIRST, wait_s=5)
        assert lease.matched_tokens == TokensByTier(6 * PAGE_SIZE, 4 * PAGE_SIZE, 0)
        assert_true_pages(session, lease, "tenant", FIRST)
        await lease.release()
        await assert_nothing_is_held(operator)


async def fault(*arguments: object) -> None:
    raise ValueError("a fault that nobody expects")


async def test_a_fault_while_pages_are_written_to_redis_leaves_nothing_held(
    directory: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", FIRST)
        await store(session, "tenant", SECOND)
        with monkeypatch.context() as patch:
            patch.setattr(RedisTier, "put", fault)
            for _ in range(5):
                with pytest.raises(DaemonError, match="ValueError"):
                    await session.acquire("tenant", b"", reserve_pages=16)
        await assert_nothing_is_held(operator)
        await store(session, "tenant", some_tokens(16, seed=10))


async def test_a_fault_in_the_last_drain_does_not_keep_the_server_up(
    directory: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with grpc.aio.insecure_channel(f"unix:{directory}/kvtier.sock") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(ValueError, match="nobody expects"):
            async with running(small_config(directory, redis=valkey.url)), await attach(directory) as session:
                await store(session, "tenant", FIRST)
                assert len((await stub.GetStatistics(admin_pb2.GetStatisticsRequest())).caches) == 1
                monkeypatch.setattr(RedisTier, "put", fault)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetStatistics(admin_pb2.GetStatisticsRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
