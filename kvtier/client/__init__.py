"""How workers, routers and tools talk to a daemon.

A worker opens a session: `connect(address, identity)` (blocking) or `AsyncSession.connect(...)` (asyncio). Routers and
operators need no session: `Client(address)` asks and administers with unary calls.

    with connect("unix:/run/kvtier.sock", identity) as session:
        lease = session.acquire("tenant-a", tokens, wait_s=0.5)
        pages = lease.extend(3)
        ...  # write the pages; lease.check() before each launch
        lease.commit(new_tokens, pages)
        lease.release()
"""

from kvtier.client.aio import AsyncLease, AsyncSession
from kvtier.client.channel import TlsFiles
from kvtier.client.pool import PoolMapping
from kvtier.client.sync import Lease, Session, connect
from kvtier.client.tools import Client
from kvtier.results import CommitResult, TokensByTier

__all__ = [
    "AsyncLease",
    "AsyncSession",
    "Client",
    "CommitResult",
    "Lease",
    "PoolMapping",
    "Session",
    "TlsFiles",
    "TokensByTier",
    "connect",
]
