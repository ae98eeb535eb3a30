"""Pure data structures over tokens and slots: no torch, no grpc, no redis, no waiting.

`PageIndex` is the whole of them: the radix tree, both slot pools, leases and the queues of eviction candidates.
"""

from kvtier.index.leases import Lease, LeaseTable
from kvtier.index.node import Node
from kvtier.index.page_index import PageIndex
from kvtier.index.policy import EvictionPolicy, LruPolicy
from kvtier.index.pool import NO_SLOT, SlotPool
from kvtier.index.radix import Cursor, Match, RadixTree
from kvtier.index.runs import PageRun, Removed

__all__ = [
    "NO_SLOT",
    "Cursor",
    "EvictionPolicy",
    "Lease",
    "LeaseTable",
    "LruPolicy",
    "Match",
    "Node",
    "PageIndex",
    "PageRun",
    "RadixTree",
    "Removed",
    "SlotPool",
]
