"""The gRPC services: conversions only; the work is in `Sessions`, `PrefixCache` and `Operator`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc

from kvtier.daemon.operator import Operator
from kvtier.daemon.requests import measured, prompt_from, tokens_message
from kvtier.daemon.sessions import Sessions
from kvtier.errors import DrainingError, InvalidRequestError, KvtierError
from kvtier.metrics import Metrics
from kvtier.protocol import ERROR_METADATA_KEY
from kvtier.v1 import admin_pb2 as admin
from kvtier.v1 import admin_pb2_grpc, cache_pb2_grpc
from kvtier.v1 import cache_pb2 as pb

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


@contextlib.asynccontextmanager
async def _unary(method: str, metrics: Metrics, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Measures a unary call; a refusal becomes its gRPC status."""
    try:
        with measured(method, metrics):
            yield
    except KvtierError as error:
        metadata = ((ERROR_METADATA_KEY, type(error).__name__),)
        await context.abort(_STATUS_CODES[error.status], str(error), metadata)


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """kvtier.v1.CacheService."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> None:
        await self._sessions.serve(request_iterator, context.write)

    async def Lookup(self, request: pb.LookupRequest, context: grpc.aio.ServicerContext) -> pb.LookupResponse:
        async with _unary("lookup", self._sessions.metrics, context):
            cache = self._sessions.registry.get(request.fingerprint)
            page_size = cache.identity.layout.page_size
            prompt = prompt_from(request.namespace, request.tokens, request.extra_keys, page_size)
            return pb.LookupResponse(tokens=tokens_message(await cache.lookup(prompt)))

    async def Prefetch(self, request: pb.PrefetchRequest, context: grpc.aio.ServicerContext) -> pb.PrefetchResponse:
        async with _unary("prefetch", self._sessions.metrics, context):
            if self._sessions.draining:
                raise DrainingError("the daemon is draining; prefetch from its successor")
            cache = self._sessions.registry.get(request.fingerprint)
            page_size = cache.identity.layout.page_size
            prompt = prompt_from(request.namespace, request.tokens, request.extra_keys, page_size)
            return pb.PrefetchResponse(started_tokens=await cache.prefetch(prompt))


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """kvtier.v1.AdminService."""

    def __init__(self, operator: Operator, metrics: Metrics) -> None:
        self._operator = operator
        self._metrics = metrics

    async def FlushNamespace(
        self, request: admin.FlushNamespaceRequest, context: grpc.aio.ServicerContext
    ) -> admin.FlushNamespaceResponse:
        async with _unary("flush_namespace", self._metrics, context):
            flushed = await self._operator.flush(request.namespace)
            return admin.FlushNamespaceResponse(
                device_pages=flushed.device, host_pages=flushed.host, redis_pages=flushed.redis, kept_pages=flushed.kept
            )

    async def Pin(self, request: admin.PinRequest, context: grpc.aio.ServicerContext) -> admin.PinResponse:
        async with _unary("pin", self._metrics, context):
            if not request.ttl_seconds:
                raise InvalidRequestError("ttl_seconds is 0; say for how long to pin")
            cache = self._operator.registry.get(request.fingerprint)
            page_size = cache.identity.layout.page_size
            prompt = prompt_from(request.namespace, request.tokens, request.extra_keys, page_size)
            pin_id, pinned_tokens = self._operator.pin(cache, prompt, request.ttl_seconds)
            return admin.PinResponse(pin_id=pin_id, pinned_tokens=pinned_tokens)

    async def Unpin(self, request: admin.UnpinRequest, context: grpc.aio.ServicerContext) -> admin.UnpinResponse:
        async with _unary("unpin", self._metrics, context):
            self._operator.unpin(request.pin_id)
            return admin.UnpinResponse()

    async def GetStatistics(
        self, request: admin.GetStatisticsRequest, context: grpc.aio.ServicerContext
    ) -> admin.GetStatisticsResponse:
        async with _unary("get_statistics", self._metrics, context):
            return self._operator.statistics()

    async def Drain(self, request: admin.DrainRequest, context: grpc.aio.ServicerContext) -> admin.DrainResponse:
        async with _unary("drain", self._metrics, context):
            drained = await self._operator.drain(request.timeout_seconds)
            return admin.DrainResponse(stored_pages=drained.stored_pages, unstored_pages=drained.unstored_pages)
