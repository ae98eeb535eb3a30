"""Starting, binding and leaving: the socket and its lock, wrong settings, too little shared memory, TCP with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from serving import IDENTITY, PAGE_SIZE, assert_true_pages, attach, only_cache, small_config, some_tokens, store

from kvtier.client import AsyncSession, Client, TlsFiles, TokensByTier
from kvtier.config import Config
from kvtier.daemon.server import running
from kvtier.errors import ConfigurationError, DaemonUnavailableError, InvalidRequestError
from kvtier.v1 import admin_pb2 as admin
from kvtier.v1 import admin_pb2_grpc

SHARED = Path("/dev/shm")


def prefix_of(socket_path: Path) -> str:
    lock = socket_path.with_name(f"{socket_path.name}.lock").stat()
    return f"kvtier-{lock.st_dev:x}-{lock.st_ino:x}-"


def memory_of(socket_path: Path) -> list[Path]:
    """The shared memory of the daemon on a socket."""
    return sorted(SHARED.glob(f"{prefix_of(socket_path)}*"))


def names_of(socket_path: Path) -> list[str]:
    """Without the prefix."""
    return [file.name.removeprefix(prefix_of(socket_path)) for file in memory_of(socket_path)]


async def test_only_the_user_reaches_socket_and_pools_and_both_go(directory: Path) -> None:
    path = directory / "deeper" / "kvtier.sock"
    async with running(small_config(directory, socket=path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        async with await AsyncSession.connect(f"unix:{path}", IDENTITY) as session:
            await store(session, "tenant", some_tokens(2, seed=1))
            assert [stat.S_IMODE(file.stat().st_mode) for file in memory_of(path)] == [0o600] * 3
    assert not path.exists()
    assert memory_of(path) == []


async def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on(directory: Path) -> None:
    async with running(small_config(directory)), await attach(directory) as session:
        await store(session, "tenant", some_tokens(2, seed=1))
        with pytest.raises(ConfigurationError, match=rf"a daemon \(process {os.getpid()}\) serves on .*kvtier.sock"):
            async with running(small_config(directory)):
                pass
        assert names_of(directory / "kvtier.sock") == ["0-0-device", "0-0-host", "tokens-1"]
        lease = await session.acquire("tenant", some_tokens(2, seed=1))
        assert lease.matched_tokens == TokensByTier(2 * PAGE_SIZE, 0, 0)
    async with running(small_config(directory)) as operator:  # the lock is free again
        assert operator.statistics().sessions == 0


async def test_a_stale_socket_and_pools_of_a_killed_daemon_are_removed(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(directory / "kvtier.sock"))
    (directory / "kvtier.sock.lock").touch()
    (SHARED / f"{prefix_of(directory / 'kvtier.sock')}7-device").write_bytes(b"left behind")
    other = SHARED / "kvtier-0123456789ab-test-of-another-daemon"
    other.write_bytes(b"not ours")
    try:
        async with running(small_config(directory)), await attach(directory):
            assert names_of(directory / "kvtier.sock") == ["0-0-device", "0-0-host", "tokens-1"]
            assert other.read_bytes() == b"not ours"
    finally:
        other.unlink()


async def test_daemons_that_see_their_sockets_at_one_path_have_pools_of_their_own(directory: Path) -> None:
    """As in containers that share /dev/shm, each with a directory of its own mounted at the same place."""
    mounted, prompts = directory / "mounted", {"first": some_tokens(2, seed=1), "second": some_tokens(2, seed=2)}
    async with contextlib.AsyncExitStack() as stack:
        for name, prompt in prompts.items():
            (directory / name).mkdir()
            mounted.unlink(missing_ok=True)
            mounted.symlink_to(directory / name)
            await stack.enter_async_context(running(small_config(mounted)))
            session = await stack.enter_async_context(await attach(mounted))
            await store(session, "tenant", prompt)
        for name, prompt in prompts.items():
            async with await attach(directory / name) as late:
                lease = await late.acquire("tenant", prompt)
                assert lease.matched_tokens == TokensByTier(2 * PAGE_SIZE, 0, 0)
                assert_true_pages(late, lease, "tenant", prompt)
    assert [memory_of(directory / name / "kvtier.sock") for name in prompts] == [[], []]


def not_pem(directory: Path) -> Path:
    path = directory / "not.pem"
    path.write_text("no")
    return path


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"socket": Path("/proc/nowhere/kvtier.sock")}, "choose another --socket"),
        ({"socket": Path("/tmp") / ("x" * 110) / "kvtier.sock"}, "over 107 bytes; choose a shorter --socket"),
        ({"metrics": "nowhere"}, "metrics is 'nowhere'; give HOST:PORT, or 'off'"),
        ({"metrics": "127.0.0.1:99999"}, "give HOST:PORT"),
        ({"metrics": "no-such-host.invalid:9000"}, "choose another --metrics address"),
        ({"redis": "http://localhost"}, "a Redis URL begins with redis://"),
        (
            {"listen": "127.0.0.1:0", "tls_certificate": not_pem, "tls_key": not_pem, "tls_client_ca": not_pem},
            "PEM files that belong together",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_cannot_be_served_is_said_at_the_start(
    settings: dict[str, Any], advice: str, directory: Path
) -> None:
    settings = {name: value(directory) if callable(value) else value for name, value in settings.items()}
    with pytest.raises(ConfigurationError) as refused:
        async with running(small_config(directory, **settings)):
            pass
    assert advice in str(refused.value)
    assert not (directory / "kvtier.sock").exists()
    async with running(small_config(directory)):  # nothing of the failed start is in the way
        pass


async def test_a_metrics_port_in_use_is_said_at_the_start(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        with pytest.raises(ConfigurationError, match=f"cannot serve metrics on {address}: Address already in use"):
            async with running(small_config(directory, metrics=address)):
                pass


async def test_pools_larger_than_shared_memory_are_refused_with_numbers(directory: Path) -> None:
    status = os.statvfs(SHARED)
    too_much = 2 * status.f_blocks * status.f_frsize
    config = small_config(directory, host_bytes=too_much)
    async with running(config) as operator:
        with pytest.raises(
            ConfigurationError, match=r"[\d,]+ bytes of shared memory do not fit: /dev/shm has [\d,]+ free"
        ):
            await attach(directory)
        assert memory_of(directory / "kvtier.sock") == []
        assert len(operator.statistics().caches) == 0


class Certificates:
    """An authority, and what it has signed. Made by the `openssl` command, which this test needs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ca = self._make("ca", "-x509")

    def _key(self, name: str) -> Path:
        return self._directory / f"{name}.key"

    def _make(self, name: str, *options: str) -> Path:
        path = self._directory / f"{name}.pem"
        command = f"openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN={name}".split()
        subprocess.run([*command, "-keyout", self._key(name), "-out", path, *options], check=True, capture_output=True)
        return path

    def signed(self, name: str) -> TlsFiles:
        """Certificate and key of a server on 127.0.0.1, or of a client."""
        certificate = self._make(
            name, "-x509", "-CA", str(self.ca), "-CAkey", str(self._key("ca")), "-addext", "subjectAltName=IP:127.0.0.1"
        )
        return TlsFiles(ca=self.ca, certificate=certificate, key=self._key(name))


def tcp_config(directory: Path, certificates: Certificates) -> Config:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = certificates.signed("daemon")
    return small_config(
        directory,
        listen=f"127.0.0.1:{port}",
        tls_certificate=files.certificate,
        tls_key=files.key,
        tls_client_ca=files.ca,
    )


async def test_tcp_speaks_mutual_tls_only(directory: Path) -> None:
    assert shutil.which("openssl"), "this test makes its certificates with the openssl command: install openssl"
    certificates = Certificates(directory)
    (directory / "strangers").mkdir()
    config = tcp_config(directory, certificates)
    assert config.listen is not None
    async with running(config) as operator:
        worker = certificates.signed("worker")
        async with await AsyncSession.connect(config.listen, IDENTITY, tls=worker) as session:
            await store(session, "tenant", some_tokens(2, seed=1))
            assert only_cache(operator).tree_pages == 2
        strangers = Certificates(directory / "strangers").signed("worker")
        for tls in (strangers._replace(ca=worker.ca), strangers):
            with pytest.raises(DaemonUnavailableError):
                await AsyncSession.connect(config.listen, IDENTITY, tls=tls, timeout_s=2)
        with pytest.raises(InvalidRequestError, match="mutual TLS only: give tls=TlsFiles"):
            await AsyncSession.connect(config.listen, IDENTITY)
        request = admin.GetStatisticsRequest()
        without_certificate = grpc.ssl_channel_credentials(worker.ca.read_bytes())
        async with grpc.aio.secure_channel(config.listen, without_certificate) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin_pb2_grpc.AdminServiceStub(channel).GetStatistics(request, timeout=2)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(config.listen) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin_pb2_grpc.AdminServiceStub(channel).GetStatistics(request, timeout=2)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

        def epoch() -> str:
            with Client(config.listen or "", tls=worker) as client:
                return client.statistics().epoch

        assert await asyncio.to_thread(epoch) == operator.statistics().epoch
