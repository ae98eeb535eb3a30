"""What a daemon moved and evicted, read from its metrics."""

from __future__ import annotations

import urllib.request
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import DaemonUnavailableError

_TIMEOUT_S = 10.0
_KINDS = {"kvtier_transfer_bytes": "route", "kvtier_evictions": "tier"}


def read_counters(metrics_address: str) -> Counter[str]:
    """Bytes moved by route (`host_to_device`), pages evicted by tier (`device`) and those lost for good (`dropped`).

    Raises `DaemonUnavailableError` when nothing answers there.
    """
    try:
        with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except OSError as error:
        raise DaemonUnavailableError(f"no metrics at {metrics_address}: {error}") from error
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        label = _KINDS.get(family.name)
        for sample in family.samples if label else ():
            if label and sample.name.endswith("_total"):
                counters[sample.labels[label]] += int(sample.value)
                if sample.labels.get("outcome") == "dropped":
                    counters["dropped"] += int(sample.value)
    return counters
