"""A worker on a daemon, in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.client import connect
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe
from kvtier.worker.engine import Worker
from kvtier.worker.model import WorkerModel
from kvtier.worker.options import DEFAULT_OPTIONS, WorkerOptions


@contextmanager
def connect_worker(
    address: str,
    model: WorkerModel,
    page_format: PageFormat = PageFormat.NVFP4,
    page_size: int = 64,
    options: WorkerOptions = DEFAULT_OPTIONS,
    timeout_s: float = 10.0,
    recipe: Recipe = PLAIN,
) -> Iterator[Worker]:
    """A worker attached to the daemon at `address`; its leases end with the `with` block.

    `timeout_s` is the deadline of every call to the daemon, beside the wait for pages of lower tiers; `recipe` says how
    values become codes.
    Raises `DaemonUnavailableError` when no daemon answers there, and `InvalidRequestError` when the recipe is another
    model's.
    """
    identity = model.identity(page_format, page_size, options.prefill_attends, options.open_page, recipe)
    with connect(address, identity, timeout_s=timeout_s) as session:
        yield Worker(session, model, identity.layout, options, recipe)
