"""What the daemon moved between its tiers, read from its metrics."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 5.0


def transferred_bytes(metrics_address: str) -> dict[str, int]:
    """Bytes of pages moved since the daemon started, by route."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=_TIMEOUT_S) as response:
        text = response.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["kvtier_transfer_bytes"].samples
    return {sample.labels["route"]: int(sample.value) for sample in samples if sample.name.endswith("_total")}
