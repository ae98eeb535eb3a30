"""`kvtier bench redis` measures what it says, on a small scale."""

from __future__ import annotations

import pytest

from kvtier.bench.redis_bench import run


def test_the_report_has_rates_for_both_clients_and_for_every_size():
    report = run((65_536, 1 << 20), rounds=2, round_s=0.02)
    rates = [f"{client}{operation}_gbps" for client in ("", "bare_") for operation in ("put", "get")]
    assert [row["page_bytes"] for row in report["sizes"]] == [65_536, 1 << 20]
    for row in [report, *report["sizes"]]:
        for name in (*rates, "client_cpu_s_per_gb", "bare_cpu_s_per_gb", "put_of_bare", "get_of_bare"):
            assert row[name] > 0
    assert report["cpu_us_per_call"] > report["bare_cpu_us_per_call"] > 0
    for name in rates:
        slow, fast = sorted(row[name] for row in report["sizes"])
        assert slow <= report[name] <= fast
    small, large = report["sizes"]
    one_of_each = (65_536 + (1 << 20)) / (65_536 / small["put_gbps"] + (1 << 20) / large["put_gbps"])
    assert report["put_gbps"] == pytest.approx(one_of_each)
