"""A replay's rows as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ByteSize
from rich.table import Table

from kvtier.replay.engine import Engine
from kvtier.replay.options import ReplayOptions
from kvtier.replay.rows import Row, Soak

_GB = 1e9
_MB = 1e6
_HEADINGS = (
    "sessions",
    "requests",
    "refused",
    "tokens",
    "device",
    "host",
    "redis",
    "recomputed",
    "findable",
    "TTFT mean",
    "p50",
    "p90",
    "p99",
    "req/s",
    "tok/s",
    "prefill",
    "GB up",
    "GB down",
    "evicted",
)


def title_of(options: ReplayOptions, engine: Engine) -> str:
    """What was replayed, by whom, on what."""
    workload, memory = options.workload, options.memory
    device, host = (ByteSize(pool).human_readable(decimal=True) for pool in (memory.device_bytes, memory.host_bytes))
    pools = f"{device} device, {host} host, redis {memory.redis}"
    kept = f", 1 token in {workload.keep_every} of the trace" if workload.keep_every > 1 else ""
    page_size = engine.layout(memory.formats[0]).page_size
    return (
        f"{workload.trace.name}{kept}: {engine.heading}, pages of {page_size} tokens, "
        f"{f'pools of {options.address}' if options.address else pools}"
    )


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One row for each format and concurrency."""
    if rows[0].worker == "real":
        worker = "Run in real time on this machine; requests that do not fit into the model's context are refused."
        seconds = "seconds"
    else:
        worker = f"Pages shrunk {rows[0].shrink_factor:,} times; numbers of pages are those of the real geometry."
        seconds = "virtual seconds"
    table = Table(
        title=title,
        caption=f"{worker} Requests until the first place stays empty, or the time is up; shares are of the tokens "
        f"requested; findable: in a cache without end. Time to first token (TTFT) in {seconds}, queueing included; "
        "prefill: share of the time in which a modelled GPU computes prompts; GB up and down between device and host "
        "memory; evicted: pages that left the device.",
    )
    table.add_column("format")
    table.add_column("open", justify="right")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or rows[index + 1].format != row.format
        table.add_row(row.format, str(row.concurrency), *_cells(row), end_section=is_last)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    parts = (row.tokens_found_device, row.tokens_found_host, row.tokens_found_redis, row.tokens_recomputed)
    times = (row.first_token_mean_s, row.first_token_median_s, row.first_token_p90_s, row.first_token_p99_s)
    return (
        str(row.sessions),
        f"{row.requests:,}",
        str(row.requests_refused),
        f"{_short(row.tokens_requested / 1e6)}M",
        *(f"{part / max(row.tokens_requested, 1):.1%}" for part in parts),
        f"{row.hit_rate_findable:.1%}",
        *(f"{seconds:.2f}" for seconds in times),
        f"{row.requests_per_s:.3f}",
        f"{row.tokens_per_s:,.0f}",
        "-" if row.prefill_share is None else f"{row.prefill_share:.0%}",
        "-" if row.bytes_host_to_device is None else _short(row.bytes_host_to_device / _GB),
        "-" if row.bytes_device_to_host is None else _short(row.bytes_device_to_host / _GB),
        "-" if row.evicted_device_pages is None else f"{row.evicted_device_pages:,}",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def soak_table(soak: Soak, title: str) -> Table:
    """Growth over the time of a replay, and what was held at its end."""
    table = Table(
        title=title,
        caption=f"Memory in MB; growth a minute. At the end {soak.leases} leases, {soak.held_device_pages} pages held "
        f"on the device and {soak.held_host_pages} in host memory.",
    )
    table.add_column("")
    for heading in ("first", "last", "growth in the first half", "in the second half"):
        table.add_column(heading, justify="right")
    for name, *figures in soak.growth:
        unit, digits = (_MB, 3) if name.endswith("_bytes") else (1, 1)
        table.add_row(
            name.replace("_bytes", "").replace("_", " "), *(f"{figure / unit:,.{digits}f}" for figure in figures)
        )
    return table


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Hit rate and median time to first token by concurrency, one line a format; the ending names the file type."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    hits, times = figure.subplots(1, 2)
    for page_format in dict.fromkeys(row.format for row in rows):
        own = sorted((row for row in rows if row.format == page_format), key=lambda row: row.concurrency)
        places = [row.concurrency for row in own]
        (line,) = hits.plot(places, [100 * row.hit_rate for row in own], marker="o", label=f"{page_format}, all tiers")
        hits.plot(
            places,
            [100 * row.hit_rate_device for row in own],
            marker=".",
            linestyle="--",
            color=line.get_color(),
            label=f"{page_format}, device",
        )
        times.plot(places, [row.first_token_median_s for row in own], marker="o", label=page_format)
    hits.set_ylabel("tokens found, % of tokens requested")
    times.set_ylabel(f"median time to first token (seconds, {rows[0].worker} worker)")
    times.set_yscale("log")
    for axes in (hits, times):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("sessions open at a time")
        axes.set_xticks(sorted({row.concurrency for row in rows}), sorted({row.concurrency for row in rows}))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
