"""Redis URLs: what they mean, and how a wrong one is refused."""

from __future__ import annotations

import pytest
import redis

from kvtier.errors import ConfigurationError
from kvtier.tiers.redis_url import RedisTarget, parse_redis_url
from kvtier.tiers.redis_wire import (
    SentinelConnection,
    SentinelTlsConnection,
    TcpConnection,
    TlsConnection,
    UnixConnection,
)


def parse(url: str) -> RedisTarget:
    return parse_redis_url(url, timeout_s=3.0, max_connections=5)


@pytest.mark.parametrize(
    ("url", "address", "connection_class", "settings"),
    [
        ("redis://far", "redis://far:6379/0", TcpConnection, {"host": "far", "port": 6379}),
        ("redis://far:7000/2", "redis://far:7000/2", TcpConnection, {"port": 7000, "db": 2}),
        ("redis://far?db=4", "redis://far:6379/4", TcpConnection, {"db": 4}),
        ("redis://[::1]:7000", "redis://[::1]:7000/0", TcpConnection, {"host": "::1", "port": 7000}),
        ("redis://me:p%40ss@far", "redis://far:6379/0", TcpConnection, {"username": "me", "password": "p@ss"}),
        ("redis://:p%3Ass@far", "redis://far:6379/0", TcpConnection, {"password": "p:ss"}),
        ("rediss://far?ssl_cert_reqs=none", "rediss://far:6379/0", TlsConnection, {"ssl_cert_reqs": "none"}),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", UnixConnection, {"path": "/run/redis.sock"}),
        ("unix://me:pw@/run/r.sock?db=3", "unix:///run/r.sock", UnixConnection, {"username": "me", "db": 3}),
        (
            "redis+sentinel://me:pw@a,b:7/pages?db=1",
            "redis+sentinel://a:26379,b:7/pages",
            SentinelConnection,
            {"username": "me", "password": "pw", "db": 1},
        ),
        ("rediss+sentinel://a/pages", "rediss+sentinel://a:26379/pages", SentinelTlsConnection, {}),
    ],
)
def test_what_a_url_means(url, address, connection_class, settings):
    target = parse(url)
    assert target.address == address
    client = target.connect()
    assert isinstance(client, redis.Redis)
    pool = client.connection_pool
    assert pool.connection_class is connection_class
    assert pool.max_connections == 5
    assert pool.connection_kwargs["socket_timeout"] == pool.connection_kwargs["socket_connect_timeout"] == 3.0
    assert pool.connection_kwargs | settings == pool.connection_kwargs


def test_sentinels_have_credentials_of_their_own_and_a_share_of_the_time():
    target = parse("redis+sentinel://me:pw@a,b,c/pages?sentinel_username=watch&sentinel_password=dog")
    sentinel = target.connect().connection_pool.sentinel_manager  # type: ignore[union-attr]
    for server in sentinel.sentinels:
        settings = server.connection_pool.connection_kwargs
        assert (settings["username"], settings["password"], settings["socket_timeout"]) == ("watch", "dog", 0.75)
    assert set(target.secrets) == {"pw", "dog"}


def test_a_cluster_is_named_by_any_of_its_nodes():
    assert parse("redis+cluster://me:pw@a,b:7000").address == "redis+cluster://a:6379,b:7000"


def test_nothing_that_is_printed_shows_credentials():
    target = parse("redis://me:pass%20word@far?client_name=x")
    assert "pass" not in repr(target) + target.address
    assert target.secrets == ("pass word",)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "begins with"),
        ("localhost:6379", "begins with"),
        ("http://far", "begins with"),
        ("redis://", "lacks a host"),
        ("redis://far:port", "host:port"),
        ("redis://far:99999", "host:port"),
        ("redis://redis..svc:6379", "no name"),
        (f"redis+cluster://a,{64 * 'b'}.svc", "no name"),
        ("redis://[::1", "cannot be read"),
        ("redis://far/zero", "database 'zero'"),
        ("redis://far?db=zero", "db"),
        ("redis://a,b", "one server"),
        ("redis://far?socket_timeout=3", "option 'socket_timeout'"),
        ("redis://far?decode_responses=true", "option 'decode_responses'"),
        ("redis://far?ssl_ca_certs=/ca.pem", "option 'ssl_ca_certs'"),
        ("redis://far?sentinel_password=dog", "option 'sentinel_password'"),
        ("rediss://far?ssl_ca_certs=/no/such.pem", "no such file"),
        ("rediss://far?ssl_cert_reqs=perhaps", "refuses"),
        ("rediss://far?ssl_colour=blue", "refuses"),
        ("unix://", "absolute path"),
        ("unix://run/redis.sock", "absolute path"),
        ("redis+sentinel://a", "name of the service"),
        ("redis+sentinel://a/b/c", "name of the service"),
        ("redis+sentinel://a,,b/pages", "lacks a host"),
        ("redis+cluster://a/1", "no databases"),
        ("redis+cluster://a?db=1", "no databases"),
        ("redis+cluster://", "lacks a host"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused(url, message):
    with pytest.raises(ConfigurationError, match=message):
        parse(url)
