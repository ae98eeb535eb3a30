"""What a Redis URL says, and the redis-py client that it makes.

    redis://[user:password@]host[:port][/db]                        one server
    unix://[user:password@]/path/to/socket[?db=]                    one server, by its unix socket
    redis+sentinel://[user:password@]h1[:p],h2[:p]/service[?db=]    the master that these sentinels name
    redis+cluster://[user:password@]h1[:p],h2[:p]                   a Redis Cluster, found through any of these nodes
    rediss://, rediss+sentinel://, rediss+cluster://                the same over TLS; ssl_... options as in redis-py

Sentinels that want a password of their own take it from `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvtier.errors import ConfigurationError
from kvtier.tiers.redis_wire import (
    SentinelConnection,
    SentinelTlsConnection,
    TcpConnection,
    TlsConnection,
    UnixConnection,
)

RedisClient: TypeAlias = redis.Redis | RedisCluster
Settings: TypeAlias = dict[str, Any]

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379
_OPTIONS = {"db", "client_name", "username", "password"}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_SECRET_OPTIONS = ("password", "sentinel_password", "ssl_password")
_TLS_FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class RedisTarget:
    """Where Redis is.

    Args:
        address: the URL without credentials and options, for people.
        secrets: passwords, which no message may show.
        connect: makes the client. Only for a cluster does it talk to a server: it asks a node for the slots.
            `disconnect` is its counterpart.
    """

    address: str
    secrets: tuple[str, ...] = field(repr=False)
    connect: Callable[[], RedisClient] = field(repr=False)


def parse_redis_url(url: str, *, timeout_s: float, max_connections: int) -> RedisTarget:
    """Raises `ConfigurationError` when `url` cannot be the URL of a Redis."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"the Redis URL cannot be read: {error}") from None
    makers = {"redis": _server, "unix": _unix_socket, "redis+sentinel": _sentinel, "redis+cluster": _cluster}
    is_tls = parts.scheme.startswith("rediss")
    scheme = parts.scheme.replace("rediss", "redis", 1)
    if scheme not in makers:
        raise ConfigurationError(
            "a Redis URL begins with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
        )
    settings = _options(parts, is_tls) | _credentials(parts)
    secrets = tuple(settings[name] for name in _SECRET_OPTIONS if settings.get(name))
    settings |= {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "max_connections": max_connections,
        "protocol": 2,  # the pool too has to know
        # One fresh connection for a stale one. NOTE: a call that ran out of time is not among these errors.
        "retry": Retry(NoBackoff(), 1, (RedisConnectionError,)),
    }
    address, connect = makers[scheme](parts, is_tls, settings)
    return RedisTarget(f"{parts.scheme}://{address}", secrets, connect)


_Made: TypeAlias = tuple[str, Callable[[], RedisClient]]


def _server(parts: SplitResult, is_tls: bool, settings: Settings) -> _Made:
    addresses = _addresses(parts, _REDIS_PORT)
    if len(addresses) > 1:
        raise ConfigurationError("redis:// names one server; several belong to redis+sentinel:// or redis+cluster://")
    host, port = addresses[0]
    path = parts.path.strip("/")
    if path:
        settings["db"] = _database(path)
    settings |= {"host": host, "port": port, "connection_class": TlsConnection if is_tls else TcpConnection}
    return f"{addresses[0]}/{settings.get('db', 0)}", lambda: _client_of_pool(settings)


def _unix_socket(parts: SplitResult, is_tls: bool, settings: Settings) -> _Made:
    path = unquote(parts.path)
    if len(path) < 2 or _hosts(parts):
        raise ConfigurationError("a unix:// URL names the socket by an absolute path: unix:///run/redis.sock")
    settings |= {"path": path, "connection_class": UnixConnection}
    return path, lambda: _client_of_pool(settings)


def _client_of_pool(settings: Settings) -> redis.Redis:
    return redis.Redis(connection_pool=redis.ConnectionPool(**settings))


def _sentinel(parts: SplitResult, is_tls: bool, settings: Settings) -> _Made:
    addresses = _addresses(parts, _SENTINEL_PORT)
    service = unquote(parts.path.strip("/"))
    if not service or "/" in service:
        raise ConfigurationError(
            "a redis+sentinel:// URL ends in the name of the service: redis+sentinel://host/mymaster"
        )
    # A call that has to find the master asks one sentinel after the other and still has time left to connect to it.
    timeout_s = settings["socket_timeout"] / (len(addresses) + 1)
    sentinel_settings = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "username": settings.pop("sentinel_username", None),
        "password": settings.pop("sentinel_password", None),
        "ssl": is_tls,
        **{name: value for name, value in settings.items() if name.startswith("ssl_")},
    }

    def connect() -> redis.Redis:
        sentinel = Sentinel(addresses, sentinel_kwargs=sentinel_settings)
        connection_class = SentinelTlsConnection if is_tls else SentinelConnection
        client: redis.Redis = sentinel.master_for(service, connection_class=connection_class, **settings)
        return client

    return f"{','.join(map(str, addresses))}/{service}", connect


def _cluster(parts: SplitResult, is_tls: bool, settings: Settings) -> _Made:
    first, *others = addresses = _addresses(parts, _REDIS_PORT)
    if parts.path.strip("/") or settings.get("db"):
        raise ConfigurationError("a Redis Cluster has no databases; leave /db out of a redis+cluster:// URL")
    retry, max_connections = settings.pop("retry"), settings.pop("max_connections")
    # RedisCluster drops settings of connections that it does not know, so they travel with the connection class.
    connection_class = functools.partial(TlsConnection if is_tls else TcpConnection, **settings)

    def connect() -> RedisCluster:
        return RedisCluster(
            url=f"redis://{first}",
            startup_nodes=[ClusterNode(host, port) for host, port in others],
            connection_class=connection_class,
            max_connections=max_connections,
            retry=retry,
            protocol=2,
            require_full_coverage=False,  # a cache does without the pages of a shard that is down
        )

    return ",".join(map(str, addresses)), connect


def disconnect(client: RedisClient) -> None:
    """Ends all connections of `client`, those in use as well."""
    if isinstance(client, RedisCluster):
        client.disconnect_connection_pools()
    else:
        client.connection_pool.disconnect()


def _options(parts: SplitResult, is_tls: bool) -> Settings:
    try:
        settings: Settings = parse_url(f"redis://?{parts.query}")
    except ValueError as error:
        raise ConfigurationError(f"the Redis URL cannot be read: {error}") from None
    known = _OPTIONS | (_SENTINEL_OPTIONS if parts.scheme.endswith("+sentinel") else set())
    for name in settings:
        if name not in known and not (is_tls and name.startswith("ssl_")):
            raise ConfigurationError(
                f"the Redis URL has the option {name[:40]!r}; this kind of URL takes {', '.join(sorted(known))}, "
                "and over TLS (rediss) redis-py's ssl_... options"
            )
    if is_tls:
        _check_tls({name: value for name, value in settings.items() if name.startswith("ssl_")})
    return settings


def _check_tls(settings: Settings) -> None:
    try:
        redis.SSLConnection(**settings)
    except (TypeError, RedisError) as error:
        raise ConfigurationError(f"the Redis URL has a TLS option that redis-py refuses: {error}") from None
    for name in _TLS_FILE_OPTIONS:
        if name in settings and not Path(settings[name]).is_file():
            raise ConfigurationError(f"the Redis URL says {name}={settings[name]}, and there is no such file")


def _credentials(parts: SplitResult) -> Settings:
    userinfo, has_userinfo, _ = parts.netloc.rpartition("@")
    if not has_userinfo:
        return {}
    username, _, password = userinfo.partition(":")
    credentials = {"username": unquote(username), "password": unquote(password)}
    return {name: value for name, value in credentials.items() if value}


def _hosts(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _addresses(parts: SplitResult, default_port: int) -> list[Address]:
    return [_address(text, default_port) for text in _hosts(parts).split(",")]


def _address(text: str, default_port: int) -> Address:
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError:
        raise ConfigurationError(f"the Redis URL has the address {text!r}; write host:port") from None
    if not host:
        raise ConfigurationError("the Redis URL lacks a host; write redis://host:port")
    try:
        host.encode("idna")  # as whoever looks it up will
    except UnicodeError:
        raise ConfigurationError(
            f"the Redis URL has the host {host!r}, which is no name: between its dots are 1 to 63 characters"
        ) from None
    return Address(host, port or default_port)


def _database(text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f"the Redis URL has the database {text[:40]!r}; it is a number, as in redis://host/0")
    return int(text)
