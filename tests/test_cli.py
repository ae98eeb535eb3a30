"""The `kvtier` command: what it prints, how it exits, and that its help names every setting."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import IDENTITY, PAGE_SIZE, attach, directory, small_config, some_tokens, store
from typer.testing import CliRunner, Result

import kvtier
from kvtier.cli import app
from kvtier.config import Config
from kvtier.daemon.server import running

__all__ = ["directory"]


async def run(*arguments: str) -> Result:
    """Runs a command beside the daemon's event loop."""
    return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, app, arguments)


async def test_operators_commands_on_a_daemon(directory: Path) -> None:
    address = f"unix:{directory}/kvtier.sock"
    async with running(small_config(directory)), await attach(directory) as session:
        await store(session, "tenant", some_tokens(3, seed=1))
        lease = await session.acquire("tenant", some_tokens(3, seed=1)[: 2 * PAGE_SIZE])

        shown = await run("stats", "--address", address, "--json")
        statistics = json.loads(shown.stdout)
        (cache,) = statistics["caches"]
        assert statistics["epoch"] == session.epoch
        assert (cache["device"]["pages"], cache["device"]["held_pages"], cache["tree_pages"]) == ("64", "2", "3")

        table = (await run("stats", "--address", address)).stdout
        assert f"kvtier {kvtier.__version__}, serving for 0 s, 1 sessions, redis: none" in table
        assert IDENTITY.fingerprint.hex()[:16] in table
        device = next(line for line in table.splitlines() if " device " in line)
        assert device.split() == ["device", "64", "61", "2", str(2 * PAGE_SIZE)]

        health = await run("health", "--address", address)
        assert (health.exit_code, health.stdout) == (0, "daemon serves; redis breaker none\n")

        flushed = await run("flush", "tenant", "--address", address)
        assert flushed.stdout == "removed 1 device, 0 host and 0 redis pages; 2 are in use and stay\n"
        await lease.release()

        drained = await run("drain", "--address", address, "--timeout-s", "1")
        assert drained.stdout == "Redis has 0 pages and lacks 2\n"
        assert "draining for" in (await run("stats", "--address", address)).stdout


async def test_the_help_of_serve_names_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    shown = " ".join((await run("serve", "--help")).stdout.replace("│", " ").split())
    for name, field in Config.model_fields.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert field.description is not None and field.description in shown
    assert "One of write_back, write_through, write_through_selective. Default: write_back." in shown
    assert "--config" in shown


async def test_doctor_exits_with_0_on_a_healthy_machine() -> None:
    shown = await run("doctor", "--json")
    assert shown.exit_code == 0
    assert [check["passed"] for check in json.loads(shown.stdout)["checks"]] == [True] * 5


async def test_version() -> None:
    assert (await run("version")).stdout == f"{kvtier.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["stats", "--address", "unix:/nowhere/kvtier.sock"], "no daemon answers at unix:/nowhere/kvtier.sock"),
        (["stats", "--address", "localhost:1"], "over which the daemon speaks mutual TLS only"),
        (["serve", "--redis-connections", "0", "--redis", "none"], "redis_connections: Input should be greater than"),
        (["serve", "--config", "/nowhere.toml"], "no settings file at /nowhere.toml"),
        (["bench", "decode", "--loads", "64*8192"], "'64*8192' is no load"),
    ],
    ids=["no daemon", "TCP", "a bad setting", "no settings file", "a bad load"],
)
def test_an_error_is_one_line_and_exit_code_1(arguments: list[str], fault: str) -> None:
    done = subprocess.run([sys.executable, "-m", "kvtier", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvtier: ")
    assert fault in line


def test_the_environment_names_the_daemon(directory: Path) -> None:
    """The same variable that `kvtier serve` reads."""
    path = str(directory / "elsewhere.sock")
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "stats"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"KVTIER_SOCKET": path, "PATH": ""},
    )
    assert f"no daemon answers at unix:{path}" in done.stderr
