"""`kvtier demo`: a daemon with very small pools, a real model, and three conversations that fill all tiers."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live

from kvtier.demo.conversation import Turn, hold_conversations, longest_conversation
from kvtier.demo.report import as_json, faults, totals, totals_lines, turns_table
from kvtier.demo.transfers import transferred_bytes
from kvtier.launch import daemon_process, free_metrics_address
from kvtier.pages.layout import PageFormat
from kvtier.worker import WorkerModel, WorkerOptions, connect_worker, load_model, load_tokenizer

_PAGE_SIZE = 16  # smaller than the default, so that short conversations have pages enough to travel
_HOST_PAGES = 16
_PROMOTION_WAIT_S = 10.0
_FILE_WIDTH = 140  # of the table where the output is no terminal
_REDIS_TIMEOUT_S = 5.0  # a busy laptop is no fault of Redis


def run_demo(model_directory: Path, page_format: PageFormat, print_json: bool) -> bool:
    """Runs the demo and prints what happened; whether all turns found what they must, and every tier took part."""
    console = Console(stderr=print_json)
    if not console.is_terminal:
        console = Console(stderr=print_json, width=_FILE_WIDTH)
    # The daemon and Redis need cores too: where threads of one forward pass share a core with them, it takes many times
    # longer.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    console.print(f"loading the model in {model_directory}")
    model = load_model(model_directory)
    turns, transferred = _run(console, model, model_directory, page_format)
    figures = totals(turns, transferred)
    if print_json:
        print(json.dumps(as_json(turns, figures), indent=2))
    console.print()
    for line in totals_lines(figures):
        console.print(line, highlight=False)
    found_faults = faults(turns)
    for fault in found_faults:
        console.print(fault, style="red", highlight=False)
    return not found_faults


def _run(
    console: Console, model: WorkerModel, model_directory: Path, page_format: PageFormat
) -> tuple[list[Turn], dict[str, int]]:
    tokenizer = load_tokenizer(model_directory)
    recipe = model.default_recipe(page_format)
    page_bytes = model.identity(page_format, _PAGE_SIZE).layout.page_bytes
    device_pages = longest_conversation(tokenizer) // _PAGE_SIZE + 2  # so that no two conversations fit
    metrics = free_metrics_address()
    title = (
        f"{model.name}, {page_format} pages of {page_bytes // 1024} KiB, recipe {recipe.name}: "
        f"{device_pages} on the device, {_HOST_PAGES} in host memory, the others in Redis"
    )
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        daemon_settings = {
            "device": "shared-memory",  # the demo's worker runs on the CPU
            "device_bytes": device_pages * page_bytes,
            "host_bytes": _HOST_PAGES * page_bytes,
            "redis": "embedded",
            "redis_timeout_s": _REDIS_TIMEOUT_S,
            "metrics": metrics,
        }
        options = WorkerOptions(promotion_wait_s=_PROMOTION_WAIT_S, recompute_when_cheaper=False)
        with (
            daemon_process(Path(folder), **daemon_settings) as daemon,
            connect_worker(daemon.address, model, page_format, _PAGE_SIZE, options) as worker,
            Live(turns_table(turns, title), console=console) as live,
        ):
            for turn in hold_conversations(worker, model, tokenizer, _PAGE_SIZE):
                turns.append(turn)
                live.update(turns_table(turns, title))
            return turns, transferred_bytes(metrics)
