"""A replay's rows as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from kvtier.replay.options import ReplayOptions
from kvtier.replay.rows import Row

_GB = 1e9
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


def title_of(options: ReplayOptions) -> str:
    """What was replayed, on what."""
    workload, memory, rates = options.workload, options.memory, options.rates
    pools = f"{memory.device_bytes / _GB:,g} GB device, {memory.host_bytes / _GB:,g} GB host, redis {memory.redis}"
    return (
        f"{workload.trace.name}: geometry {memory.geometry}, pages of {memory.page_size} tokens, "
        f"{f'pools of {options.address}' if options.address else pools}; modelled: prefill "
        f"{rates.prefill_tokens_per_s:,g} tokens/s, decode {rates.decode_tokens_per_s:,g} tokens/s a sequence"
    )


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One row for each format and concurrency."""
    factor = rows[0].shrink_factor
    table = Table(
        title=title,
        caption=f"Pages shrunk {factor:,} times; numbers of pages are those of the real geometry. Requests until the "
        "first place stays empty; shares are of the tokens requested; findable: in a cache without end. Time to first "
        "token (TTFT) in virtual seconds, queueing included; prefill: share of the time in which the GPU computes "
        "prompts; GB up and down between device and host memory; evicted: pages that left the device.",
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
        f"{row.tokens_requested / 1e6:,.1f}M",
        *(f"{part / max(row.tokens_requested, 1):.1%}" for part in parts),
        f"{row.hit_rate_findable:.1%}",
        *(f"{seconds:.2f}" for seconds in times),
        f"{row.requests_per_s:.3f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.prefill_share:.0%}",
        _or_dash(row.bytes_host_to_device, _GB),
        _or_dash(row.bytes_device_to_host, _GB),
        _or_dash(row.evicted_device_pages),
    )


def _or_dash(value: int | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:,.0f}"


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
    times.set_ylabel("median time to first token (modelled seconds)")
    times.set_yscale("log")
    for axes in (hits, times):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("sessions open at a time")
        axes.set_xticks(sorted({row.concurrency for row in rows}), sorted({row.concurrency for row in rows}))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
