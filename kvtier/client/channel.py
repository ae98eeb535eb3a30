"""Addresses, credentials and options of connections to a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc

from kvtier.errors import DaemonError, DaemonUnavailableError, DeadlineError, InvalidRequestError, KvtierError
from kvtier.protocol import ERROR_METADATA_KEY

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message a client sends or takes; the default of the daemon too."""

OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # By default channels to one address share how long to wait before the next attempt to connect: up to two minutes
    # when the daemon was down for a while. By itself a channel tries at once.
    ("grpc.use_local_subchannel_pool", 1),
)


class TlsFiles(NamedTuple):
    """PEM files for mutual TLS over TCP: the authority of the daemon's certificate, and the client's own."""

    ca: Path
    certificate: Path
    key: Path

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


def check_address(address: str, tls: TlsFiles | None) -> str:
    """`unix:/path`, a bare path, or HOST:PORT with `tls`, in gRPC's form; raises `InvalidRequestError`."""
    if address.startswith("/"):
        return f"unix:{address}"
    if not address.startswith("unix:") and tls is None:
        raise InvalidRequestError(
            f"address {address!r} is TCP, over which the daemon speaks mutual TLS only: give tls=TlsFiles(...), or use "
            "unix:/path/to/kvtier.sock"
        )
    return address


def to_kvtier_error(error: grpc.RpcError, address: str) -> KvtierError:
    """The exception behind a failed call."""
    code, details = error.code(), error.details()
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return KvtierError.from_remote(str(value), str(details))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the daemon at {address} did not answer in time; it is overloaded or hangs")
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT):
        return InvalidRequestError(f"the daemon at {address} refused the message: {details}")
    if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return DaemonError(f"the daemon at {address} answered {code.name}: {details}")
    return DaemonUnavailableError(
        f"no daemon answers at {address} ({code.name}: {details}); start one with `kvtier serve`"
    )
