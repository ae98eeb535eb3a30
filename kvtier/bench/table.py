"""Rows of benchmarks as a table, as JSON, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvtier.bench.decode import Row


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """A table with a column for each key; shares are printed as percentages."""
    table = Table()
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    return table


def _cell(name: str, value: Any) -> str:
    if name.startswith("share_of"):
        return f"{value:.1%}"
    if name == "rel_l2":
        return f"{value:.1e}"
    return f"{value:.1f}" if name == "gbps" else str(value)


def plot_decode(rows: Sequence[Row], path: Path) -> None:
    """Bars of microseconds a step by case, one colour an implementation and format; the ending names the file type."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((row.geometry, row.batch, row.context, row.page_size) for row in rows))
    contenders = list(dict.fromkeys((row.impl, row.format) for row in rows))
    width = 0.8 / max(len(contenders), 1)
    figure = Figure(figsize=(2 + 1.6 * len(cases), 4.5), layout="constrained")
    axes = figure.subplots()
    for index, contender in enumerate(contenders):
        own = [row for row in rows if (row.impl, row.format) == contender]
        places = [
            cases.index((row.geometry, row.batch, row.context, row.page_size)) + (index + 0.5) * width - 0.4
            for row in own
        ]
        axes.bar(places, [row.median_us for row in own], width, label=" ".join(contender))
    labels = [f"{geometry}\n{batch} x {context}\npage {size}" for geometry, batch, context, size in cases]
    axes.set_xticks(range(len(cases)), labels)
    axes.set_ylabel("microseconds a layer and step (median)")
    axes.legend()
    figure.savefig(path)
