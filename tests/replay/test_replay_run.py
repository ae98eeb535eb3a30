"""`kvtier replay` from end to end, with daemons of its own."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from replay_traces import growing_session, write_lines
from rich.console import Console
from serving import Valkey, directory
from typer.testing import CliRunner

from kvtier.cli import app, main
from kvtier.errors import ConfigurationError
from kvtier.launch import daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.replay import Memory, ModelledEngine, ReplayOptions, Workload, replay
from kvtier.replay.geometry import LLAMA_3_1_8B
from kvtier.replay.report import table_of
from kvtier.replay.rows import Row

__all__ = ["directory"]

NUM_SESSIONS, NUM_TURNS, BLOCKS = 6, 4, 10
PAGE_BYTES = LLAMA_3_1_8B.layout(PageFormat.NVFP4, 64).page_bytes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sessions of four turns, of 10, 20, 30 and 40 blocks and 7 tokens more."""
    sessions = (growing_session(f"s{number}", NUM_TURNS, BLOCKS) for number in range(NUM_SESSIONS))
    return write_lines(tmp_path / "trace.jsonl.xz", sessions)


def run(trace: Path, concurrency: int, device_pages: int, host_pages: int, **memory: Any) -> list[Row]:
    """Replays with pools of so many NVFP4 pages of Llama-3.1-8B."""
    pools = {"device_bytes": device_pages * PAGE_BYTES, "host_bytes": host_pages * PAGE_BYTES}
    options = ReplayOptions(Workload(trace, NUM_SESSIONS, (concurrency,)), Memory(**pools, **memory))
    return replay(options, ModelledEngine(), Console(quiet=True))


def test_in_large_pools_every_earlier_turn_is_found_on_the_device(trace: Path) -> None:
    (row,) = run(trace, concurrency=1, device_pages=400, host_pages=16)
    assert (row.sessions, row.requests, row.requests_refused) == (6, 24, 0)
    assert row.tokens_requested == 6 * (100 * 64 + 4 * 7)
    assert row.tokens_found_device == row.tokens_findable == 6 * (10 + 20 + 30) * 64
    assert row.tokens_recomputed == row.tokens_requested - row.tokens_found_device
    assert (row.evicted_device_pages, row.bytes_device_to_host, row.dropped_pages) == (0, 0, 0)
    assert (row.device_pages, row.host_pages, row.shrink_factor) == (400, 16, 2048)
    assert row.page_bytes == PAGE_BYTES
    assert row.first_token_mean_s == pytest.approx((10 * 64 + 7) / 20_000)
    assert row.first_token_p99_s == pytest.approx(row.first_token_mean_s)
    reply_s = 19 / 60
    session_s = 4 * (row.first_token_mean_s + reply_s) + 3 * 5.0
    assert row.duration_s == pytest.approx(6 * session_s)
    assert row.output_tokens_per_s == pytest.approx(4 * 20 / session_s)
    assert row.prefill_share == pytest.approx(4 * row.first_token_mean_s / session_s)


def test_in_small_pools_less_is_found_and_lower_tiers_take_part(trace: Path, valkey: Valkey) -> None:
    (ample,) = run(trace, concurrency=3, device_pages=400, host_pages=16)
    (spilling,) = run(trace, concurrency=3, device_pages=60, host_pages=400)
    (small,) = run(trace, concurrency=3, device_pages=60, host_pages=20)
    (far,) = run(trace, concurrency=3, device_pages=60, host_pages=20, redis=valkey.url)

    assert ample.hit_rate == ample.hit_rate_device == ample.hit_rate_findable
    assert spilling.hit_rate == spilling.hit_rate_findable
    assert 0 < spilling.hit_rate_device < ample.hit_rate_device
    assert spilling.tokens_found_host > 0
    assert spilling.bytes_host_to_device == spilling.tokens_found_host // 64 * PAGE_BYTES
    assert small.hit_rate < spilling.hit_rate
    assert small.dropped_pages is not None
    assert small.dropped_pages > 0
    assert far.tokens_found_redis > 0
    assert far.hit_rate == far.hit_rate_findable
    assert far.bytes_redis_to_host is not None
    assert far.bytes_redis_to_host >= far.tokens_found_redis // 64 * PAGE_BYTES
    assert valkey.client.dbsize() == 0  # nothing of a replay stays


def test_the_same_bytes_hold_more_in_nvfp4_and_a_replay_repeats(trace: Path) -> None:
    formats = tuple(PageFormat)
    rows = run(trace, concurrency=3, device_pages=90, host_pages=64, formats=formats)
    nvfp4, fp8, bf16 = rows
    assert [row.format for row in rows] == ["nvfp4", "fp8", "bf16"]
    assert [row.device_pages for row in rows] == [90, 90 * 9 // 16, 90 * 9 // 32]
    assert nvfp4.hit_rate > fp8.hit_rate > bf16.hit_rate
    assert bf16.requests_refused > 0  # 40 blocks do not fit into 25 pages
    assert rows == run(trace, concurrency=3, device_pages=90, host_pages=64, formats=formats)


def test_on_a_daemon_that_runs_already(trace: Path, directory: Path) -> None:
    with daemon_process(directory, redis="none", device_bytes="1MiB", host_bytes="1MiB") as daemon:
        arguments = ("replay", str(trace), "--sessions", "2", "--concurrency", "1,2", "--address", daemon.address)
        shown = CliRunner().invoke(app, [*arguments, "--format", "fp8", "--json"])
    rows = json.loads(shown.stdout)
    assert [(row["format"], row["concurrency"], row["device_pages"]) for row in rows] == [("fp8", 1, 512)] + [
        ("fp8", 2, 512)
    ]
    assert rows[0]["tokens_found_device"] == 2 * (10 + 20 + 30) * 64  # also the second time: each begins empty
    assert rows[0]["bytes_device_to_host"] is None


def test_the_table_says_what_was_modelled(trace: Path) -> None:
    arguments = ["replay", str(trace), "--sessions", "2", "--concurrency", "2", "--device-bytes", "1GB"]
    shown = " ".join(CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments).stdout.split())
    assert "modelled worker, prefill 20,000 tokens/s, decode 60 tokens/s a sequence, geometry 32/8/128, " in shown
    assert "pages of 64 tokens, 1.0GB device, 256.0GB host, redis none" in shown
    assert "Pages shrunk 2,048 times; numbers of pages are those of the real geometry." in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "kvtier: no trace at missing.jsonl: No such file or directory"),
        (["TRACE", "--compare", "nvfp4,int8"], "'int8' is not a valid PageFormat; choose from nvfp4, fp8, bf16"),
        (["TRACE", "--concurrency", "8"], "concurrency is 8 with 6 sessions; use 1 to the number of sessions"),
        (["TRACE", "--concurrency", "two"], "write numbers by comma"),
        (["TRACE", "--geometry", "32/8"], "'32/8' is no geometry; write LAYERS/KVHEADS/HEADDIM, as 32/8/128"),
        (["TRACE", "--geometry", "32/8/100"], "head_dim is 100; it must be a positive multiple of 16"),
        (["TRACE", "--device-bytes", "much"], "'much' is no number of bytes; write 80GB or 64GiB"),
        (
            ["TRACE", "--concurrency", "1", "--device-bytes", "1MB"],
            "device memory hold 0 pages of nvfp4; a pool needs at least 16: give 37,748,736 or more",
        ),
        (["TRACE", "--concurrency", "1", "--host-gb-per-s", "0.1"], "kvtier would leave it there"),
    ],
)
def test_what_is_wrong_is_one_line(
    trace: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [str(trace) if argument == "TRACE" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["kvtier", "replay", *named])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert message in capsys.readouterr().err


def test_a_daemon_without_metrics_leaves_them_out_of_the_table(trace: Path, directory: Path) -> None:
    with daemon_process(directory, redis="none", device_bytes="1MiB", host_bytes="1MiB") as daemon:
        options = ReplayOptions(Workload(trace, 2, (1,)), address=daemon.address)
        rows = replay(options, ModelledEngine(), Console(quiet=True))
    console = Console(width=300, file=io.StringIO())
    with console.capture() as shown:
        console.print(table_of(rows, "title"))
    line = next(line for line in shown.get().splitlines() if "nvfp4" in line)
    assert [cell.strip() for cell in line.split("│")][-4:-1] == ["-", "-", "-"]


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cli.common.find_spec", lambda _: None)
    outcome = CliRunner().invoke(app, ["replay", str(trace), "--plot", "p.svg"])
    assert isinstance(outcome.exception, ConfigurationError)
