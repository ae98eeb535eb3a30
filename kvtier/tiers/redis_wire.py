"""How pages cross a redis-py connection: straight from and into the caller's memory, and never past a deadline.

redis-py takes a connection class for every topology. These connections bring what its own lack: a stored page is sent
as header and image without joining them, and its image is received where it belongs; every exchange keeps the deadline
of the call it serves; and whatever breaks off between a command and its reply ends the connection, so no later call
reads a reply that is not its own.
"""

from __future__ import annotations

import select
import ssl
from collections.abc import Iterable
from socket import socket
from typing import Any, NamedTuple

import redis
from redis._parsers import BaseParser, Encoder
from redis.connection import AbstractConnection, PythonRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from kvtier.pages.envelope import MAX_HEADER_BYTES
from kvtier.tiers.redis_call import DeadlinePassedError, current_call, let_go_of_socket

_READ_BYTES = 1 << 16
_PACK_CUTOFF_BYTES = 6000  # redis-py's own: longer arguments are sent without joining them to others
_MAX_STRING_BYTES = 1 << 20


class StoredPage(NamedTuple):
    """A page as it lies in Redis. As an argument both parts are sent; in a reply `image` is the memory of the call."""

    header: bytes
    image: memoryview


class WrongSize(NamedTuple):
    """The reply in place of a string that cannot be the page asked for; its bytes were skipped."""

    num_bytes: int


class PagePacker(PythonRespSerializer):
    """Packs commands as redis-py does, and a `StoredPage` as one string without joining its parts."""

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        position = next((index for index, arg in enumerate(args) if isinstance(arg, StoredPage)), None)
        if position is None:
            return super().pack(*args)  # type: ignore[no-any-return]
        header, image = args[position]
        before = b"".join(map(self._string, args[:position]))
        after = b"".join(map(self._string, args[position + 1 :]))
        head = b"*%d\r\n%b$%d\r\n%b" % (len(args), before, len(header) + len(image), header)
        return [head, image, b"\r\n" + after]

    def _string(self, arg: str | bytes | int) -> bytes:
        value = self.encode(arg)
        return b"$%d\r\n%b\r\n" % (len(value), value)


class PageParser(BaseParser):
    """Reads RESP2 replies within the deadline of the current call.

    In a call that receives a page a string is that page: it goes into the call's memory and comes back as `StoredPage`.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = bytearray(socket_read_size)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # received and not yet read: _buffer[_start:_end]
        self._socket: socket | None = None

    def on_connect(self, connection: AbstractConnection) -> None:
        self._socket = connection._get_socket()
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there is something where nothing should be: a stray reply, or the end of the connection."""
        sock = self._connected_socket()
        if self._start < self._end or (isinstance(sock, ssl.SSLSocket) and sock.pending()):
            return True
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Any:
        """The next reply. An error reply is returned, or raised when it makes the connection useless."""
        reply = self._read_reply(current_call().receives)
        if isinstance(reply, RedisConnectionError):
            raise reply
        return reply

    def _read_reply(self, page: memoryview | None) -> Any:
        line = self._read_line()
        match line[:1]:
            case b"+":
                return line[1:]
            case b"-":
                return self.parse_error(line[1:].decode(errors="replace"))
            case b":":
                return _integer(line)
            case b"$":
                length = _integer(line)
                return None if length < 0 else self._read_string(length, page)
            case b"*":
                length = _integer(line)
                return None if length < 0 else [self._read_reply(None) for _ in range(length)]
        raise InvalidResponse(f"a reply begins with {line[:20]!r}, which is not RESP2")

    def _read_string(self, length: int, page: memoryview | None) -> StoredPage | WrongSize | bytes:
        value: StoredPage | WrongSize | bytes
        if page is None:
            if length > _MAX_STRING_BYTES:
                raise InvalidResponse(f"a string of {length} bytes is longer than any that kvtier asks for")
            value = self._read_bytes(length)
        elif 0 < length - len(page) <= MAX_HEADER_BYTES:
            header = self._read_bytes(length - len(page))
            self._read_into(page)
            value = StoredPage(header, page)
        else:
            self._skip(length)
            value = WrongSize(length)
        if self._read_bytes(2) != b"\r\n":
            raise InvalidResponse("a string is longer than its reply says")
        return value

    def _read_line(self) -> bytes:
        """The next line without its end."""
        line = b""
        while not line.endswith(b"\n"):
            if self._start == self._end:
                self._fill()
            line_end = self._buffer.find(b"\n", self._start, self._end)
            part_end = line_end + 1 if line_end >= 0 else self._end
            line += self._view[self._start : part_end]
            self._start = part_end
            if len(line) > len(self._buffer):
                raise InvalidResponse("a line of a reply has no end")
        if not line.endswith(b"\r\n"):
            raise InvalidResponse(f"a reply has the line {line[:20]!r}, which is not RESP2")
        return line[:-2]

    def _read_bytes(self, length: int) -> bytes:
        value = bytearray(length)
        self._read_into(memoryview(value))
        return bytes(value)

    def _skip(self, length: int) -> None:
        while length:
            if self._start == self._end:
                self._fill()
            count = min(self._end - self._start, length)
            self._start += count
            length -= count

    def _read_into(self, target: memoryview) -> None:
        """Fills `target`; what is longer than the buffer does not go through it."""
        while target:
            if self._start == self._end:
                if len(target) >= len(self._buffer):
                    target = target[self._receive(target) :]
                    continue
                self._fill()
            count = min(self._end - self._start, len(target))
            target[:count] = self._view[self._start : self._start + count]
            self._start += count
            target = target[count:]

    def _fill(self) -> None:
        self._start, self._end = 0, self._receive(self._view)

    def _receive(self, target: memoryview) -> int:
        sock = self._connected_socket()
        sock.settimeout(current_call().remaining_s())
        try:
            count = sock.recv_into(target)
        except TimeoutError:
            raise DeadlinePassedError from None
        if count == 0:
            raise RedisConnectionError("Redis closed the connection")
        return count

    def _connected_socket(self) -> socket:
        if self._socket is None:
            raise RedisConnectionError("the connection is closed")
        return self._socket


def _integer(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise InvalidResponse(f"a reply has {line[:20]!r} where a number belongs") from None


_PACKER = PagePacker(_PACK_CUTOFF_BYTES, Encoder("utf-8", "strict", False).encode)


class _PageConnection(AbstractConnection):
    """What the connections below add to redis-py's."""

    def __init__(self, **settings: Any) -> None:
        settings |= {
            "protocol": 2,
            "parser_class": PageParser,
            "socket_read_size": _READ_BYTES,
            "command_packer": _PACKER,
        }
        super().__init__(**settings)

    def connect(self) -> None:
        current_call().remaining_s()  # a call that was given up opens no connection
        super().connect()

    def disconnect(self, *args: Any, **options: Any) -> None:
        let_go_of_socket()
        super().disconnect(*args, **options)

    def send_packed_command(self, command: Iterable[bytes | memoryview], check_health: bool = True) -> None:
        self.connect()  # outside of `with call`, since it may take long
        call, sock = current_call(), self._get_socket()
        assert sock is not None
        try:
            with call.using(sock):
                for piece in command:
                    unsent = memoryview(piece)
                    while unsent:  # not sendall, which over TLS gives every record the whole time anew
                        sock.settimeout(call.remaining_s())
                        unsent = unsent[sock.send(unsent) :]
        except TimeoutError:
            self.disconnect()
            raise DeadlinePassedError from None
        except DeadlinePassedError:
            self.disconnect()
            raise
        except OSError as error:
            self.disconnect()
            raise RedisConnectionError(f"sending to {self._host_error()} failed: {error}") from None

    def read_response(self, *args: Any, **options: Any) -> Any:
        sock = self._get_socket()
        if sock is None:
            raise RedisConnectionError("the connection is closed")
        try:
            with current_call().using(sock):
                return super().read_response(*args, **options)
        except ResponseError:
            raise  # a whole reply was read: the connection is in step
        except (RedisError, DeadlinePassedError):
            self.disconnect()
            raise


class TcpConnection(_PageConnection, redis.Connection):
    """A connection for redis:// and redis+cluster:// URLs."""


class TlsConnection(_PageConnection, redis.SSLConnection):
    """A connection for rediss:// and rediss+cluster:// URLs."""


class UnixConnection(_PageConnection, redis.UnixDomainSocketConnection):
    """A connection for unix:// URLs."""


class SentinelConnection(_PageConnection, SentinelManagedConnection):
    """A connection to the master that the sentinels of a redis+sentinel:// URL name."""


class SentinelTlsConnection(_PageConnection, SentinelManagedSSLConnection):
    """A connection to the master that the sentinels of a rediss+sentinel:// URL name."""
