"""The Redis tier on a Sentinel set, a cluster, TCP and TLS: real processes, one test each way that they fail."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot
from redis_pages import NAMESPACE, memory, page
from redis_servers import Process, free_port, wait_until

from kvtier.errors import RedisUnavailableError
from kvtier.pages.envelope import PageName
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.redis import RedisTier, page_key

NUM_SLOTS = 16384


async def assert_works(tier: RedisTier, seeds: range = range(20)) -> None:
    """Pages with keys in many slots are absent, are put, found, read, flushed."""
    pages = [page(seed, 70_000) for seed in seeds]
    names = [name for name, _ in pages]
    assert await tier.count_prefix(NAMESPACE, names) == 0
    assert not await tier.get(NAMESPACE, names[0], memory(70_000))
    await asyncio.gather(*(tier.put(NAMESPACE, name, image) for name, image in pages))
    await tier.put("other", *pages[0])
    assert await tier.count_prefix(NAMESPACE, [*names, page(-1)[0]]) == len(names)
    for name, image in pages:
        out = memory(70_000)
        assert await tier.get(NAMESPACE, name, out)
        assert out.tobytes() == image.tobytes()
    assert await tier.flush_namespace(NAMESPACE) == len(names)
    assert await tier.count_prefix(NAMESPACE, names) == 0
    assert await tier.flush_namespace("other") == 1
    await tier.ping()


async def until_works(tier: RedisTier, name: PageName, image: memoryview) -> None:
    """Tries to put a page until it is there."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await tier.put(NAMESPACE, name, image)
            except RedisUnavailableError:
                await asyncio.sleep(0.05)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Process]:
    with contextlib.closing(Process(tmp_path / "master")) as process:
        yield process


def start_sentinel(directory: Path, master: Process, down_after_ms: int = 60_000) -> Process:
    settings = [
        f"sentinel monitor pages 127.0.0.1 {master.port} 1",
        f"sentinel down-after-milliseconds pages {down_after_ms}",
        "sentinel failover-timeout pages 2000",
    ]
    return Process(directory, settings, is_sentinel=True)


@pytest.fixture
def sentinel(tmp_path: Path, master: Process) -> Iterator[Process]:
    with contextlib.closing(start_sentinel(tmp_path / "sentinel", master)) as process:
        yield process


async def test_tcp_with_a_database(master, open_tier):
    await assert_works(open_tier(f"redis://127.0.0.1:{master.port}/3"))
    tier = open_tier(f"redis://localhost:{master.port}?db=2")
    await tier.put(NAMESPACE, *page(1))
    assert master.client.info("keyspace").keys() == {"db2"}


async def test_fault_5_through_a_sentinel_pages_are_really_stored_and_found(sentinel, master, open_tier):
    tier = open_tier(f"redis+sentinel://127.0.0.1:{sentinel.port}/pages")
    await assert_works(tier)
    name, image = page(1)
    await tier.put(NAMESPACE, name, image)
    assert master.client.exists(page_key(NAMESPACE, name)) == 1


async def test_the_first_sentinel_that_answers_is_enough(sentinel, open_tier):
    await assert_works(open_tier(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/pages"))


async def test_a_service_that_no_sentinel_knows_is_unavailable(sentinel, open_tier):
    with pytest.raises(RedisUnavailableError, match="No master found for 'nobody'"):
        await open_tier(f"redis+sentinel://127.0.0.1:{sentinel.port}/nobody").ping()


async def test_a_reply_that_comes_too_late_is_nobodys(sentinel, master, open_tier):
    tier = open_tier(f"redis+sentinel://127.0.0.1:{sentinel.port}/pages", timeout_s=0.5, num_connections=1)
    (late, _), (name, image) = page(1), page(2)
    await tier.put(NAMESPACE, late, page(1)[1])
    await tier.put(NAMESPACE, name, image)
    master.pause()
    with pytest.raises(RedisUnavailableError):
        await tier.get(NAMESPACE, late, memory())
    out = memory()
    call = asyncio.create_task(tier.get(NAMESPACE, name, out))
    await asyncio.sleep(0.1)
    master.resume()
    assert await call
    assert out.tobytes() == image.tobytes()


async def test_a_failover_is_followed(tmp_path, master, open_tier):
    with contextlib.ExitStack() as stack:
        settings = [f"replicaof 127.0.0.1 {master.port}", "repl-diskless-sync-delay 0"]
        replica = stack.enter_context(contextlib.closing(Process(tmp_path / "replica", settings)))
        wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        sentinel = stack.enter_context(contextlib.closing(start_sentinel(tmp_path / "sentinel", master, 300)))
        wait_until(lambda: len(sentinel.client.sentinel_slaves("pages")) == 1)
        tier = open_tier(f"redis+sentinel://127.0.0.1:{sentinel.port}/pages", timeout_s=0.5)
        name, image = page(1)
        await tier.put(NAMESPACE, name, image)
        wait_until(lambda: replica.client.exists(page_key(NAMESPACE, name)) == 1)
        master.kill()
        await until_works(tier, *page(2))
        out = memory()
        assert await tier.get(NAMESPACE, name, out)
        assert out.tobytes() == image.tobytes()
        assert replica.client.dbsize() == 2


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    directory = tmp_path_factory.mktemp("cluster")
    settings = ["cluster-enabled yes", "cluster-require-full-coverage no", "cluster-node-timeout 1000"]
    with contextlib.ExitStack() as stack:
        nodes = []
        bus_ports = [free_port() for _ in range(3)]
        for index, bus_port in enumerate(bus_ports):
            node = Process(directory / f"node-{index}", [*settings, f"cluster-port {bus_port}"])
            nodes.append(stack.enter_context(contextlib.closing(node)))
            first, last = NUM_SLOTS * index // 3, NUM_SLOTS * (index + 1) // 3 - 1
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", index + 1)
        for node in nodes[1:]:
            node.client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port, bus_ports[0])
        wait_until(lambda: all(_knows_all(node) for node in nodes))
        yield nodes


@pytest.fixture
def cluster(shared_cluster: list[Process]) -> list[Process]:
    """Three masters with a third of the slots each, empty."""
    for node in shared_cluster:
        node.client.flushall()
    return shared_cluster


def _knows_all(node: Process) -> bool:
    info = node.client.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(NUM_SLOTS)


def cluster_url(nodes: list[Process]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


async def test_a_cluster_spreads_pages_over_its_nodes(cluster, open_tier):
    await assert_works(open_tier(cluster_url(cluster)), range(60))
    tier = open_tier(cluster_url(cluster[2:]))  # one node of three is enough to find the others
    for seed in range(60):
        await tier.put(NAMESPACE, *page(seed, 100))
    counts = [node.client.dbsize() for node in cluster]
    assert sum(counts) == 60
    assert min(counts) > 5


async def test_a_slot_that_moved_is_followed(cluster, open_tier):
    tier = open_tier(cluster_url(cluster))
    await assert_works(tier)
    name, image = page(1000)
    slot = key_slot(page_key(NAMESPACE, name).encode())
    source = cluster[slot * 3 // NUM_SLOTS]
    target = next(node for node in cluster if node is not source)
    source_id, target_id = (node.client.execute_command("CLUSTER MYID") for node in (source, target))
    target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
    source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
    await tier.put(NAMESPACE, name, image)  # the source has no such key and says ASK
    assert source.client.dbsize() == 0
    for node in (target, source):
        node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
    await tier.put(NAMESPACE, name, image)
    out = memory()
    assert await tier.get(NAMESPACE, name, out)
    assert out.tobytes() == image.tobytes()
    assert target.client.dbsize() == 1


async def test_a_cluster_node_that_was_down_is_used_again(cluster, open_tier):
    tier = open_tier(cluster_url(cluster), timeout_s=0.5)
    pages = [page(seed, 100) for seed in range(30)]
    await asyncio.gather(*(tier.put(NAMESPACE, name, image) for name, image in pages))
    cluster[0].kill()
    with pytest.raises(RedisUnavailableError):
        await tier.count_prefix(NAMESPACE, [name for name, _ in pages])
    cluster[0].start()
    wait_until(lambda: all(_knows_all(node) for node in cluster))
    for name, image in pages:
        await until_works(tier, name, image)
    assert await tier.count_prefix(NAMESPACE, [name for name, _ in pages]) == 30


async def test_a_cluster_that_is_down_at_the_start_comes_back_by_itself(cluster, open_tier):
    for node in cluster:
        node.kill()
    tier = open_tier(cluster_url(cluster))
    for _ in range(3):
        with pytest.raises(RedisUnavailableError):
            await tier.ping()
    assert tier.breaker.state is BreakerState.OPEN
    for node in cluster:
        node.start()
    wait_until(lambda: all(_knows_all(node) for node in cluster))
    for seed in range(10):
        await until_works(tier, *page(seed))
    assert tier.breaker.state is BreakerState.CLOSED


async def test_the_wrong_kind_of_url_for_a_cluster_is_explained(cluster, master, open_tier):
    plain = open_tier(f"redis://127.0.0.1:{cluster[0].port}")
    with pytest.raises(RedisUnavailableError, match=r"redis\+cluster://"):
        for seed in range(20):
            await plain.put(NAMESPACE, *page(seed, 10))
    clustered = open_tier(f"redis+cluster://127.0.0.1:{master.port}")
    with pytest.raises(RedisUnavailableError, match="Cluster mode is not enabled"):
        await clustered.ping()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for localhost that vouches for itself, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    path = tmp_path / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    request += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", str(tmp_path / "public.pem")]
    subprocess.run(request, check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "public.pem").read_text())
    return path


async def test_tls_checks_the_server_and_carries_pages(valkey, certificate, open_tier):
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def terminate_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        valkey_reader, valkey_writer = await asyncio.open_unix_connection(valkey.socket_path)
        await asyncio.gather(relay(reader, valkey_writer), relay(valkey_reader, writer), return_exceptions=True)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(terminate_tls, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        tier = open_tier(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}")
        await assert_works(tier)
        with pytest.raises(RedisUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await open_tier(f"rediss://localhost:{port}/0").ping()
        await tier.close()
