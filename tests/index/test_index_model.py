"""The index against a plain model: 20,000 steps of leases, pins and transfers in any order, checked after every one.

`KVTIER_INDEX_EXAMPLES=10000 pytest tests/index/test_index_model.py` runs more, with other seeds every time.
"""

from __future__ import annotations

import math
import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from lease_rules import LeaseRules
from simulated_index import NUM_DEVICE, NUM_HOST, SimulatedIndex

STEPS_PER_EXAMPLE = 100
EXAMPLES = int(os.environ.get("KVTIER_INDEX_EXAMPLES", "360"))
MIN_STEPS = 20_000


class IndexMachine(LeaseRules):
    """Every operation of the index, as the cache calls them."""

    def teardown(self) -> None:
        """Once nothing holds a page any more, all of them can be evicted."""
        while self.in_flight:
            self.go_on(0, fails=True)
        for lease in list(self.index.leases):
            self.index.leases.release(lease)
        self.index.leases.sweep(math.inf)
        while self._evict():
            self.index.check_integrity()
        assert (self.index.device.num_free, self.index.host.num_free) == (NUM_DEVICE, NUM_HOST)
        assert (self.index.tree.num_nodes, self.index.tree.num_pages) == (0, 0)

    def _evict(self) -> int:
        num_gone = 0
        for run in self.index.take_device_victims(NUM_DEVICE):
            self.index.device.release(run.device)
            num_gone += self.index.drop_device(run)
        for run in self.index.take_host_victims(NUM_HOST):
            self.index.host.release(run.host)
            num_gone += self.index.drop_host(run)
        return num_gone


def test_index_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS_PER_EXAMPLE,
            derandomize="KVTIER_INDEX_EXAMPLES" not in os.environ,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # An example is checked once before its first step.
    assert SimulatedIndex.num_checks - SimulatedIndex.num_examples >= MIN_STEPS
