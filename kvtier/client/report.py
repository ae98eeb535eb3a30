"""Statistics of a daemon as a table for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtier.v1 import admin_pb2 as admin


def statistics_table(statistics: admin.GetStatisticsResponse) -> Group:
    """One row a cache, and a line about the daemon."""
    table = Table("cache", "model", "tier", "pages", "free", "held", "tokens found", box=None, pad_edge=False)
    for cache in statistics.caches:
        name = cache.fingerprint.hex()[:16]
        found = cache.tokens_found
        identity = cache.identity
        model = identity.model if identity.world_size == 1 else f"{identity.model} ({identity.world_size} ranks)"
        table.add_row(name, model, "asked", "", "", "", f"{cache.tokens_asked:,}")
        for tier, pool, tokens in (("device", cache.device, found.device), ("host", cache.host, found.host)):
            row = (f"{pool.pages:,}", f"{pool.free_pages:,}", f"{pool.held_pages:,}", f"{tokens:,}")
            table.add_row("", "", tier, *row)
        table.add_row("", "", "redis", "", "", "", f"{found.redis:,}")
    redis = f"breaker {statistics.redis.breaker}" if statistics.redis.configured else "none"
    if statistics.redis.last_error:
        redis += f" ({statistics.redis.last_error})"
    state = "draining" if statistics.draining else "serving"
    line = (
        f"kvtier {statistics.version}, {state} for {statistics.uptime_seconds:,.0f} s, "
        f"{statistics.sessions} sessions, redis: {redis}"
    )
    return Group(Text(line), table)
