"""The client of routers and operators: unary calls, without a session."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.client.aio import ExtraKeys
from kvtier.client.channel import OPTIONS, TlsFiles, check_address, to_kvtier_error
from kvtier.client.convert import Tokens, token_bytes, tokens_by_tier
from kvtier.protocol import extra_keys_to_messages
from kvtier.results import TokensByTier
from kvtier.v1 import admin_pb2 as admin
from kvtier.v1 import admin_pb2_grpc, cache_pb2_grpc
from kvtier.v1 import cache_pb2 as pb


class Client:
    """Asks and administers a daemon. Every call has the deadline `timeout_s`; errors are `KvtierError`s."""

    def __init__(self, address: str, *, timeout_s: float = 10.0, tls: TlsFiles | None = None) -> None:
        self._address = check_address(address, tls)
        self._timeout_s = timeout_s
        if tls:
            self._channel = grpc.secure_channel(self._address, tls.credentials(), OPTIONS)
        else:
            self._channel = grpc.insecure_channel(self._address, OPTIONS)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _call(self, method: Callable[..., Any], request: Any, extra_time_s: float = 0.0) -> Any:
        try:
            return method(request, timeout=self._timeout_s + extra_time_s)
        except grpc.RpcError as error:
            raise to_kvtier_error(error, self._address) from error

    def lookup(self, fingerprint: bytes, namespace: str, tokens: Tokens, extra_keys: ExtraKeys = ()) -> TokensByTier:
        """Where the longest cached prefix of `tokens` is. Changes nothing in the cache."""
        request = pb.LookupRequest(
            fingerprint=fingerprint,
            namespace=namespace,
            tokens=token_bytes(tokens),
            extra_keys=extra_keys_to_messages(extra_keys),
        )
        return tokens_by_tier(self._call(self._cache.Lookup, request).tokens)

    def prefetch(self, fingerprint: bytes, namespace: str, tokens: Tokens, extra_keys: ExtraKeys = ()) -> int:
        """Starts bringing a prefix to the device; returns the tokens on their way."""
        request = pb.PrefetchRequest(
            fingerprint=fingerprint,
            namespace=namespace,
            tokens=token_bytes(tokens),
            extra_keys=extra_keys_to_messages(extra_keys),
        )
        started: int = self._call(self._cache.Prefetch, request).started_tokens
        return started

    def flush_namespace(self, namespace: str) -> admin.FlushNamespaceResponse:
        """Removes a namespace from every tier."""
        response: admin.FlushNamespaceResponse = self._call(
            self._admin.FlushNamespace, admin.FlushNamespaceRequest(namespace=namespace)
        )
        return response

    def pin(
        self, fingerprint: bytes, namespace: str, tokens: Tokens, ttl_s: int, extra_keys: ExtraKeys = ()
    ) -> admin.PinResponse:
        """Keeps the part of a prefix that is on the device there for `ttl_s` seconds."""
        request = admin.PinRequest(
            fingerprint=fingerprint,
            namespace=namespace,
            tokens=token_bytes(tokens),
            extra_keys=extra_keys_to_messages(extra_keys),
            ttl_seconds=ttl_s,
        )
        response: admin.PinResponse = self._call(self._admin.Pin, request)
        return response

    def unpin(self, pin_id: int) -> None:
        """Ends a pin; raises `PinUnknownError`."""
        self._call(self._admin.Unpin, admin.UnpinRequest(pin_id=pin_id))

    def statistics(self) -> admin.GetStatisticsResponse:
        """Pools, tree, tokens asked and found, Redis."""
        response: admin.GetStatisticsResponse = self._call(self._admin.GetStatistics, admin.GetStatisticsRequest())
        return response

    def drain(self, timeout_s: int) -> admin.DrainResponse:
        """Lets the daemon refuse new leases and write what Redis lacks, for at most `timeout_s` seconds."""
        request = admin.DrainRequest(timeout_seconds=timeout_s)
        response: admin.DrainResponse = self._call(self._admin.Drain, request, timeout_s)
        return response

    def is_serving(self, service: str = "") -> bool:
        """Health of the daemon, of one of its services, or of the far tier (`kvtier.redis`)."""
        response = self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        serving: bool = response.status == health_pb2.HealthCheckResponse.SERVING
        return serving

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
