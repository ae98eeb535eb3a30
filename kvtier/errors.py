"""Every exception that kvtier raises on purpose, and the gRPC status of each.

Messages say what is wrong and what to do about it. A remote error arrives at the client as the same class
that the daemon raised: `KvtierError.from_remote` finds it by name.
"""

from __future__ import annotations

from enum import IntEnum


class StatusCode(IntEnum):
    """The numbers of google.rpc.Code that kvtier uses."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14


class KvtierError(Exception):
    """Base of all of them."""

    @staticmethod
    def from_remote(kind: str, message: str) -> KvtierError:
        """The exception that the daemon raised as `kind`; a kind this release does not know is a `DaemonError`."""
        error_class = _BY_NAME.get(kind)
        return error_class(message) if error_class else DaemonError(f"{kind}: {message}")

    @property
    def status(self) -> StatusCode:
        """The gRPC status under which this error leaves the daemon."""
        return next(STATUS[base] for base in type(self).__mro__ if base in STATUS)


class InvalidRequestError(KvtierError):
    """The caller's values are wrong; nothing was changed."""


class ConfigurationError(KvtierError):
    """The daemon cannot start with these settings on this machine."""


class CacheUnknownError(KvtierError):
    """No worker ever attached with this fingerprint."""


class LeaseUnknownError(KvtierError):
    """The lease belongs to another session, was released, or never was."""


class PinUnknownError(KvtierError):
    """The pin was removed, has run out, or never was."""


class CacheFullError(KvtierError):
    """Every page is held by a lease, a pin or a transfer, so none can be freed."""


class NotAttachedError(KvtierError):
    """The session has not sent Attach yet, or has sent it twice."""


class DrainingError(KvtierError):
    """The daemon is draining and takes no new sessions and leases."""


class DaemonUnavailableError(KvtierError):
    """No daemon answers at this address, or not in time."""


class DeadlineError(DaemonUnavailableError):
    """A daemon took the request, but did not answer in time."""


class SessionLostError(KvtierError):
    """The session to the daemon broke. Its leases are gone; the client attaches anew by itself."""


class LeaseLostError(SessionLostError):
    """The pages of this lease may be another's by now: do not read or write them; acquire again."""


class DaemonError(KvtierError):
    """A fault inside the daemon; its log has the details."""


class KernelError(KvtierError):
    """A CUDA kernel could not be compiled, loaded or launched on this machine."""


class GpuError(KvtierError):
    """The GPU or its driver refused a call, or has failed."""


class RankLostError(KvtierError):
    """A process of a tensor-parallel worker has ended, or does not answer."""


class CorruptPageError(KvtierError):
    """Stored bytes are not the page that their key names."""


class RedisUnavailableError(KvtierError):
    """Redis did not answer in time, or its breaker is open."""


class RedisFullError(KvtierError):
    """Redis refuses writes because it is out of memory."""


STATUS: dict[type[KvtierError], StatusCode] = {
    KvtierError: StatusCode.INTERNAL,
    InvalidRequestError: StatusCode.INVALID_ARGUMENT,
    ConfigurationError: StatusCode.FAILED_PRECONDITION,
    CacheUnknownError: StatusCode.NOT_FOUND,
    LeaseUnknownError: StatusCode.NOT_FOUND,
    PinUnknownError: StatusCode.NOT_FOUND,
    CacheFullError: StatusCode.RESOURCE_EXHAUSTED,
    NotAttachedError: StatusCode.FAILED_PRECONDITION,
    DrainingError: StatusCode.UNAVAILABLE,
    DaemonUnavailableError: StatusCode.UNAVAILABLE,
    DeadlineError: StatusCode.DEADLINE_EXCEEDED,
    SessionLostError: StatusCode.UNAVAILABLE,
    RedisUnavailableError: StatusCode.UNAVAILABLE,
    RedisFullError: StatusCode.RESOURCE_EXHAUSTED,
}


def _all_subclasses(root: type[KvtierError]) -> list[type[KvtierError]]:
    return [root] + [found for child in root.__subclasses__() for found in _all_subclasses(child)]


_BY_NAME = {error_class.__name__: error_class for error_class in _all_subclasses(KvtierError)}
