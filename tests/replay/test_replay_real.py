"""`kvtier replay --model`: a real worker with a tiny model, on daemons of its own and on one that runs already."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from replay_traces import growing_session, write_lines
from rich.console import Console
from serving import Valkey, directory
from typer.testing import CliRunner

from kvtier.cli import app
from kvtier.errors import InvalidRequestError
from kvtier.launch import daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.replay import Memory, ModelledEngine, ReplayOptions, Workload, replay
from kvtier.replay.real import RealEngine
from kvtier.replay.rows import Row

__all__ = ["directory"]

NUM_SESSIONS, PAGE_SIZE = 4, 16
FOUND_TOKENS = 128 + 256  # by the second and the third turn of a session, of the turn before


@pytest.fixture(scope="module")
def engine(model_directory: Path) -> RealEngine:
    return RealEngine.load(model_directory, "cpu", PAGE_SIZE, "search")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sessions of three turns, of 135, 263 and 391 tokens, with replies of 20."""
    sessions = (growing_session(f"s{number}", 3, blocks=2, think_s=0.01) for number in range(NUM_SESSIONS))
    return write_lines(tmp_path / "trace.jsonl", sessions)


def run(
    engine: RealEngine, trace: Path, concurrency: int, device_pages: int, host_pages: int, **options: Any
) -> list[Row]:
    """Replays with pools of so many NVFP4 pages of the model."""
    page_bytes = engine.layout(PageFormat.NVFP4).page_bytes
    memory = Memory(
        options.pop("formats", (PageFormat.NVFP4,)),
        device_pages * page_bytes,
        host_pages * page_bytes,
        options.pop("redis", "none"),
    )
    workload = Workload(trace, NUM_SESSIONS, (concurrency,), start_interval_s=0.0, **options)
    return replay(ReplayOptions(workload, memory), engine, Console(quiet=True))


def held_at_the_end(rows: Iterable[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [tuple(row["soak"][name] for name in ("leases", "held_device_pages", "held_host_pages")) for row in rows]


def test_every_earlier_turn_is_found_in_every_format(engine: RealEngine, trace: Path) -> None:
    rows = run(engine, trace, 1, device_pages=400, host_pages=64, formats=tuple(PageFormat))
    assert [row.format for row in rows] == ["nvfp4", "fp8", "bf16"]
    assert [row.device_pages for row in rows] == [400, 400 * 9 // 16, 400 * 9 // 32]
    for row in rows:
        assert (row.worker, row.sessions, row.requests, row.requests_refused) == ("real", 4, 12, 0)
        assert row.tokens_requested == 4 * (135 + 263 + 391)
        assert row.tokens_findable == 4 * FOUND_TOKENS
        assert row.hit_rate == row.hit_rate_findable
        assert row.output_tokens_per_s * row.duration_s == pytest.approx(12 * 20)
        assert 0 < row.first_token_median_s <= row.first_token_p99_s < row.duration_s
        assert (row.prefill_share, row.shrink_factor, row.soak) == (None, 1, None)
        assert row.page_bytes == engine.layout(PageFormat(row.format)).page_bytes
    assert rows[0].tokens_found_device == 4 * FOUND_TOKENS


def test_sessions_side_by_side_in_small_pools_find_what_lower_tiers_keep(
    engine: RealEngine, trace: Path, valkey: Valkey
) -> None:
    (row,) = run(engine, trace, 3, device_pages=40, host_pages=16, redis=valkey.url)
    assert row.requests_refused == 0
    assert row.tokens_found_host + row.tokens_found_redis > 0
    assert row.hit_rate <= row.hit_rate_findable
    assert row.evicted_device_pages is not None
    assert row.evicted_device_pages > 0
    assert row.bytes_host_to_redis is not None
    assert row.bytes_host_to_redis > 0
    assert valkey.client.dbsize() == 0  # nothing of a replay stays


def test_what_can_never_fit_is_refused_and_its_session_goes_on(engine: RealEngine, tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "long.jsonl", (growing_session(name, 5, blocks=2, think_s=0.0) for name in "ab"))
    (row,) = run(engine, trace, 1, device_pages=400, host_pages=16)
    assert (row.requests, row.requests_refused) == (2 * 3, 2 * 2)  # 519 and 647 tokens in a context of 512
    (row,) = run(engine, trace, 1, device_pages=20, host_pages=16)
    assert (row.requests, row.requests_refused) == (2 * 2, 2 * 3)  # 411 tokens in 320
    (row,) = run(engine, trace, 1, device_pages=400, host_pages=16, keep_every=2)
    assert (row.requests, row.requests_refused) == (2 * 5, 0)


def test_a_soak_on_a_daemon_that_runs_already(
    model_directory: Path, trace: Path, directory: Path, valkey: Valkey
) -> None:
    page_bytes = RealEngine.load(model_directory, "cpu", PAGE_SIZE, "search").layout(PageFormat.NVFP4).page_bytes
    pools = {"device": "shared-memory", "device_bytes": 40 * page_bytes, "host_bytes": 16 * page_bytes}
    options = ("--sessions", "4", "--concurrency", "3", "--start-interval-s", "0", "--page-size", "16")
    with daemon_process(directory, redis=valkey.url, **pools) as daemon:
        where = ("--model", str(model_directory), "--device", "cpu", "--recipe", "search", "--address", daemon.address)
        arguments = ("replay", str(trace), *options, *where, "--duration", "2")
        shown = CliRunner().invoke(app, [*arguments, "--json"])
        table = CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)
    (row,) = json.loads(shown.stdout)
    assert held_at_the_end([row]) == [(0, 0, 0)]
    assert row["duration_s"] >= 2
    assert row["device_pages"] == 40
    names = [f"{process}_{figure}" for process in ("daemon", "worker") for figure in ("rss_bytes", "private_bytes")]
    growth = {figure["name"]: figure for figure in row["soak"]["growth"]}
    assert growth.keys() == {*names, "daemon_open_files", "worker_open_files"}
    assert all(growth[name]["first"] > 1 << 20 for name in names)
    text = " ".join(table.stdout.split())
    assert "real worker, tiny-llama on cpu with recipe search for NVFP4, context of 512 tokens" in text
    assert "Run in real time on this machine" in text
    assert "At the end 0 leases, 0 pages held on the device and 0 in host memory." in text


def test_a_soak_with_the_modelled_worker_never_finds_an_earlier_round(trace: Path) -> None:
    workload = Workload(trace, NUM_SESSIONS, (1,), duration_s=2.0)
    memory = Memory(device_bytes=10**9, host_bytes=10**8)
    (row,) = replay(ReplayOptions(workload, memory), ModelledEngine(page_size=PAGE_SIZE), Console(quiet=True))
    assert row.soak is not None
    assert row.sessions > NUM_SESSIONS
    assert row.hit_rate == row.hit_rate_findable
    assert 0 < row.hit_rate < 0.5  # three turns: no more than 384 of 789 tokens
    assert held_at_the_end([row.to_json()]) == [(0, 0, 0)]


def test_a_soak_needs_the_daemons_process(trace: Path, directory: Path) -> None:
    with daemon_process(directory, redis="none", device_bytes="1MiB", host_bytes="1MiB") as daemon:
        other_name = directory / "other.sock"
        other_name.symlink_to(daemon.address.removeprefix("unix:"))
        options = ReplayOptions(Workload(trace, 2, (1,), duration_s=1.0), address=f"unix:{other_name}")
        with pytest.raises(InvalidRequestError, match=r"no process here is known to serve on unix:.*other\.sock"):
            replay(options, ModelledEngine(), Console(quiet=True))
