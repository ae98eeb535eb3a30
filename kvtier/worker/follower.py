"""The process of a tensor-parallel rank other than 0: computes the steps that rank 0 sends, on its own pool."""

from __future__ import annotations

import contextlib
import signal
import time
from multiprocessing.connection import Connection

from kvtier.client import PoolMapping, Session
from kvtier.errors import SessionLostError
from kvtier.worker.group import GroupSettings, attach, joined
from kvtier.worker.model import WorkerModel
from kvtier.worker.ranks import LOADED, READY
from kvtier.worker.shard import shard_model
from kvtier.worker.step import StepRunner, StepRunners
from kvtier.worker.step_messages import StepDecoder

_POLL_S = 0.01
_LET_GO_S = 1.0  # without a step; by then rank 0 knows as well that the session is lost, and sends none


def follow(connection: Connection, settings: GroupSettings, rank: int) -> None:
    """Runs until rank 0 closes its end of `connection`. The main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and decides
    with contextlib.suppress(EOFError, ConnectionError):
        model = settings.load()
        connection.send_bytes(LOADED)
        with joined(settings, rank):
            model = shard_model(model, settings.devices[rank])
            with attach(settings, model) as session:
                connection.send_bytes(READY)
                _Follower(session, model, settings).run(connection)


class _Follower:
    def __init__(self, session: Session, model: WorkerModel, settings: GroupSettings) -> None:
        self._session = session
        self._timeout_s = settings.timeout_s
        self._runners = StepRunners(model, session.identity.layout, settings.options, settings.recipe)
        self._on_pool: tuple[str, StepRunner] | None = None

    def run(self, connection: Connection) -> None:
        """Computes steps; raises `EOFError` when rank 0 has gone."""
        decoder = StepDecoder()
        while True:
            if connection.poll(_LET_GO_S):
                step = decoder.decode(connection.recv_bytes())
                self._runner(step.epoch).run(step.chunks)
            elif self._session.pool.is_lost:
                # Views of a lost pool would keep its memory, which the next daemon may need.
                self._on_pool = None

    def _runner(self, epoch: str) -> StepRunner:
        if self._on_pool is None or self._on_pool[0] != epoch:
            self._on_pool = None
            self._on_pool = epoch, self._runners.on(self._pool_of(epoch).memory)
        return self._on_pool[1]

    def _pool_of(self, epoch: str) -> PoolMapping:
        """The pool of the daemon that rank 0 has its leases from, once this rank's session has attached to it too."""
        deadline = time.monotonic() + self._timeout_s
        while (pool := self._session.pool).epoch != epoch or pool.is_lost:
            if time.monotonic() > deadline:
                raise SessionLostError(
                    f"rank {self._session.identity.rank} is not attached to the daemon of epoch {epoch} after "
                    f"{self._timeout_s:g} s; it had {pool.epoch}"
                )
            time.sleep(_POLL_S)
        return pool
