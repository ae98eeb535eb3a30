"""Starting a daemon, and ending it without losing what it has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

import kvtier
from kvtier.config import Config
from kvtier.daemon.devices import choose_devices
from kvtier.daemon.operator import Operator
from kvtier.daemon.registry import CacheRegistry
from kvtier.daemon.service import AdminService, CacheService
from kvtier.daemon.sessions import Sessions
from kvtier.daemon.share import SocketLock
from kvtier.daemon.supervisor import Supervisor
from kvtier.errors import ConfigurationError
from kvtier.metrics import Metrics
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.embedded import EmbeddedRedis
from kvtier.tiers.redis import RedisTier
from kvtier.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc

_log = logging.getLogger(__name__)

_SWEEP_S = 0.5
_STOP_GRACE_S = 0.5

CACHE_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
REDIS_SERVICE = "kvtier.redis"
"""Health of the far tier by the standard health service; the daemon itself serves without it."""

READ_BYTES = 64 << 10
"""What a new connection reads at once, and the most that gRPC does."""


async def serve(config: Config) -> None:
    """Serves until SIGTERM or SIGINT; raises `ConfigurationError` when it cannot start."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(config):
        await stop.wait()
        _log.info("stopping")


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Operator]:
    """A daemon that serves inside the context; on leaving, it writes to Redis what that lacks, and stops."""
    metrics = Metrics()
    supervisor = Supervisor(metrics)
    async with contextlib.AsyncExitStack() as stack:
        lock = SocketLock(config.socket)
        stack.callback(lock.close)
        devices = await asyncio.to_thread(choose_devices, config.device)
        redis = await _open_redis(config, stack)
        memory_prefix = lock.claim_memory_prefix()
        registry = CacheRegistry(config, memory_prefix, devices, redis, supervisor, metrics)
        stack.push_async_callback(registry.close)
        stack.push_async_callback(supervisor.stop)
        sessions = Sessions(uuid.uuid4().hex, config, registry, metrics, memory_prefix)
        stack.push_async_callback(sessions.close)
        operator = Operator(sessions, redis)
        stack.push_async_callback(operator.close)
        metrics.add_gauges(operator.gauges)
        _serve_metrics(config, metrics, stack)

        server, health_servicer = _make_server(config, sessions, operator, metrics)
        _bind(server, config)
        await server.start()
        stack.push_async_callback(_stop, server, health_servicer, operator, config)
        supervisor.start("sweep", lambda: _every(_SWEEP_S, operator.sweep))
        supervisor.start("health", lambda: _watch_health(health_servicer, supervisor, redis))
        if redis is not None:
            supervisor.start("redis-probe", redis.probe)
        _log.info("kvtier %s serves on %s (epoch %s)", kvtier.__version__, config.socket, sessions.epoch)
        yield operator


async def _open_redis(config: Config, stack: contextlib.AsyncExitStack) -> RedisTier | None:
    url = config.redis
    if url == "none":
        return None
    if url == "embedded":
        embedded = await asyncio.to_thread(EmbeddedRedis.start, config.data_dir, int(config.redis_max_bytes))
        url = embedded.url
    redis = RedisTier.open(
        url,
        timeout_s=config.redis_timeout_s,
        num_connections=config.redis_connections,
        max_in_flight_bytes=config.redis_in_flight_bytes,
        ttl_s=config.redis_ttl_s,
    )
    stack.push_async_callback(redis.close)
    return redis


def _serve_metrics(config: Config, metrics: Metrics, stack: contextlib.AsyncExitStack) -> None:
    if config.metrics == "off":
        return
    host, _, port = config.metrics.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"metrics is {config.metrics!r}; give HOST:PORT, or 'off'")
    try:
        http, thread = start_http_server(int(port), host or "127.0.0.1", metrics.registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics on {config.metrics}: {error.strerror}; choose another --metrics address"
        ) from error

    def close() -> None:
        http.shutdown()
        http.server_close()
        thread.join()

    stack.callback(close)


def _make_server(
    config: Config, sessions: Sessions, operator: Operator, metrics: Metrics
) -> tuple[grpc.aio.Server, health.HealthServicer]:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", int(config.max_message_bytes)),
            ("grpc.max_send_message_length", int(config.max_message_bytes)),
            # By default a connection begins with reads of 8 KiB: over 60 of them for the first long prompt.
            ("grpc.experimental.tcp_read_chunk_size", READ_BYTES),
            # A worker that vanished without closing its connection is noticed in time for its leases to end.
            ("grpc.keepalive_time_ms", int(config.lease_ttl_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(config.grace_s * 1000)),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ]
    )
    cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(sessions), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(operator, metrics), server)
    health_servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (CACHE_SERVICE, ADMIN_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    return server, health_servicer


def _bind(server: grpc.aio.Server, config: Config) -> None:
    with _private_files():
        try:
            server.add_insecure_port(f"unix:{config.socket.absolute()}")
        except RuntimeError as error:
            raise ConfigurationError(f"cannot bind {config.socket}; choose another --socket") from error
    if config.listen:
        assert config.tls_key and config.tls_certificate and config.tls_client_ca
        credentials = grpc.ssl_server_credentials(
            [(config.tls_key.read_bytes(), config.tls_certificate.read_bytes())],
            root_certificates=config.tls_client_ca.read_bytes(),
            require_client_auth=True,
        )
        try:
            server.add_secure_port(config.listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {config.listen}; choose a free HOST:PORT, and PEM files that belong together"
            ) from error


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


async def _stop(
    server: grpc.aio.Server, health_servicer: health.HealthServicer, operator: Operator, config: Config
) -> None:
    await health_servicer.enter_graceful_shutdown()
    try:
        drained = await operator.drain(config.drain_s)
        _log.info("drained: Redis has %d pages, and lacks %d", drained.stored_pages, drained.unstored_pages)
    finally:
        await server.stop(_STOP_GRACE_S)


async def _every(seconds: float, work: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        work()


async def _watch_health(servicer: health.HealthServicer, supervisor: Supervisor, redis: RedisTier | None) -> None:
    status = health_pb2.HealthCheckResponse
    while True:
        own = status.NOT_SERVING if supervisor.failing else status.SERVING
        for name in ("", CACHE_SERVICE, ADMIN_SERVICE):
            await servicer.set(name, own)
        if redis is not None:
            far = status.SERVING if redis.breaker.state == BreakerState.CLOSED else status.NOT_SERVING
            await servicer.set(REDIS_SERVICE, far)
        await asyncio.sleep(_SWEEP_S)
