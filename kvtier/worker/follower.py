"""The process of a tensor-parallel rank other than 0: computes the steps that rank 0 sends, on its own pool."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from kvtier.client import PoolMapping, Session
from kvtier.errors import LeaseLostError, SessionLostError
from kvtier.worker.group import GroupSettings, attach, joined
from kvtier.worker.model import WorkerModel
from kvtier.worker.ranks import AWAY, JOIN, LOADED, READY
from kvtier.worker.shard import shard_model
from kvtier.worker.step import StepRunner, StepRunners
from kvtier.worker.step_messages import Step, StepDecoder

_POLL_S = 0.01
_ATTACH_S = 1.0  # before rank 0 is told that this rank has not attached
_LET_GO_S = 1.0  # without a step; by then rank 0 knows as well that the session is lost, and sends none


def follow(connection: Connection, settings: GroupSettings, rank: int) -> None:
    """Runs until rank 0 closes its end of `connection`. The main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and decides
    with contextlib.suppress(_Rank0Gone):
        rank_0 = _Rank0(connection)
        model = settings.load()
        rank_0.tell(LOADED)
        message = rank_0.hear()
        assert message == JOIN, message
        with joined(settings, rank):
            model = shard_model(model, settings.devices[rank])
            with attach(settings, model) as session:
                rank_0.tell(READY)
                _Follower(session, model, settings).run(rank_0)


class _Rank0Gone(Exception):
    """Rank 0 has closed its end, so there is nothing more to do."""


class _Rank0:
    """The way to rank 0; raises `_Rank0Gone`.

    An error of its own, since what a rank does besides may raise `EOFError` too, as for a file that is cut short.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, message: bytes) -> None:
        with _on_connection():
            self._connection.send_bytes(message)

    def hear(self) -> bytes:
        with _on_connection():
            return self._connection.recv_bytes()

    def says_something(self, timeout_s: float) -> bool:
        with _on_connection():
            return self._connection.poll(timeout_s)


@contextlib.contextmanager
def _on_connection() -> Iterator[None]:
    """For one call of the connection."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise _Rank0Gone from error


class _Follower:
    def __init__(self, session: Session, model: WorkerModel, settings: GroupSettings) -> None:
        self._session = session
        self._timeout_s = settings.timeout_s
        self._runners = StepRunners(model, session.identity.layout, settings.options, settings.recipe_of(model))
        self._on_pool: tuple[PoolMapping, StepRunner] | None = None

    def run(self, rank_0: _Rank0) -> None:
        """Computes steps; raises `_Rank0Gone` in the end."""
        decoder = StepDecoder()
        while True:
            if rank_0.says_something(_LET_GO_S):
                step = decoder.decode(rank_0.hear())
                if step.chunks:
                    self._compute(step)
                else:
                    rank_0.tell(READY if self._runner(step.pool_id, _ATTACH_S) else AWAY)
            elif self._on_pool and self._on_pool[0].is_lost:
                # Views of a lost pool would keep its memory, which the next daemon may need.
                self._on_pool = None
                gc.collect()  # torch's tensor parallelism leaves cycles behind that refer to the last step

    def _compute(self, step: Step) -> None:
        # This rank's session may be lost although that of rank 0 is not.
        runner = self._runner(step.pool_id, self._timeout_s)
        if runner is None:
            raise SessionLostError(f"not attached to the pool of rank 0 after {self._timeout_s:g} s")
        # NOTE: the pages may be another's by now. Whoever is that late has kept rank 0 waiting for as long.
        if time.monotonic() > step.valid_until_s:
            raise LeaseLostError("the leases of the step that rank 0 wants computed have run out")
        runner.run(step.chunks)

    def _runner(self, pool_id: str, timeout_s: float) -> StepRunner | None:
        """On this rank's pool of those that rank 0 has its leases in, once this rank's session has attached to it."""
        deadline = time.monotonic() + timeout_s
        while self._on_pool is None or self._on_pool[0].pool_id != pool_id:
            self._on_pool = None
            pool = self._session.pool
            if pool.pool_id == pool_id and not pool.is_lost:
                with contextlib.suppress(SessionLostError):  # just now
                    self._on_pool = pool, self._runners.on(pool.memory)
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(_POLL_S)
        return self._on_pool[1]
