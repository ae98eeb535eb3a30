"""What is read of a process, and growth against series whose growth is known."""

from __future__ import annotations

import subprocess
import sys
import time
from array import array

import pytest

from kvtier.replay.memory_watch import Growth, MemoryWatch

MIB = 1 << 20

# Holds 16 MiB and an open file more with each line.
GROWS = """
import sys
held, files = [], []
print("ready", flush=True)
for line in sys.stdin:
    held.append(b"x" * (16 << 20))
    files.append(open("/dev/null"))
    print("done", flush=True)
"""


def test_a_leak_grows_in_both_halves_and_what_fills_up_in_the_first() -> None:
    leaks = array("d", (100.0 + 3 * step for step in range(200)))
    fills = array("d", (min(100.0 + 3 * step, 250.0) for step in range(200)))
    # 200 steps in two minutes: 100 steps a minute.
    assert Growth.of("leaks", leaks, 120.0) == ("leaks", 100.0, 697.0, pytest.approx(300), pytest.approx(300))
    full = Growth.of("fills", fills, 120.0)
    assert full.first_half_per_min > 100
    assert full.second_half_per_min == 0
    assert Growth.of("four", array("d", [1, 3, 3, 4]), 60.0) == ("four", 1.0, 4.0, 8.0, 4.0)


def test_memory_and_files_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    with process:
        assert process.stdout.readline() == "ready\n"
        with MemoryWatch({"child": process.pid}, "shared-memory", duration_s=0.2) as watch:
            for _ in range(5):
                time.sleep(0.05)
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "done\n"
        process.stdin.close()
    growth = {figure.name: figure for figure in watch.growth()}
    assert list(growth) == ["child_rss_bytes", "child_private_bytes", "child_open_files"]
    assert growth["child_open_files"].last - growth["child_open_files"].first == 5
    for name in ("child_rss_bytes", "child_private_bytes"):
        assert 75 * MIB < growth[name].last - growth[name].first < 120 * MIB
        assert growth[name].second_half_per_min > 0


def test_a_process_that_is_gone_has_no_figures() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with MemoryWatch({"child": process.pid}, "shared-memory", duration_s=0.1) as watch:
        pass
    assert watch.growth() == ()
