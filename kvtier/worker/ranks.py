"""The processes of the other tensor-parallel ranks, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from collections.abc import Sequence as Items
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from kvtier.errors import KvtierError, RankLostError
from kvtier.worker.chunk import Chunk
from kvtier.worker.step_messages import Step, StepEncoder

LOADED, READY = b"loaded", b"ready"
"""What a rank says while it starts: that it has its model, and that it waits for steps."""
AWAY = b"away"
"""What it says of a pool that it has not attached to, where `READY` says that it has."""
JOIN = b"join"
"""What rank 0 says to all when they are loaded: from now on they wait for each other no longer than within a step."""

_END_S = 5.0  # for a process to end by itself
_MOMENT_S = 0.5
_ANSWER_S = 60.0  # for a rank that waits for steps, which answers within seconds


class RankProcess(NamedTuple):
    """A process that computes a rank, and the way to it."""

    rank: int
    process: BaseProcess
    connection: Connection

    def send(self, message: bytes) -> None:
        """Has it join the others, or compute an encoded step; raises `RankLostError`."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise self.lost() from error

    def wait(self, message: bytes, timeout_s: float) -> None:
        """Returns when it says that it has come so far; raises `RankLostError` when it does not in time."""
        received = self.hear(timeout_s)
        assert received == message, f"rank {self.rank} says {received!r}"

    def hear(self, timeout_s: float) -> bytes:
        """What it says next; raises `RankLostError` when it says nothing in time."""
        try:
            if not self.connection.poll(timeout_s):
                raise RankLostError(f"rank {self.rank} has not answered for {timeout_s:g} s")
            return self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self.lost() from error

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or does so in a moment."""
        self.process.join(_MOMENT_S)
        return self.process.exitcode is not None

    def lost(self) -> RankLostError:
        """What to raise when the process has gone."""
        self.process.join(_END_S)
        return RankLostError(
            f"the process of rank {self.rank} has ended with exit code {self.process.exitcode}; its last output says "
            "why. Connect the worker anew"
        )


class Ranks:
    """Ranks 1 and following, which compute all that rank 0 computes. Without any, nothing here does anything.

    Args:
        others: their processes.
        attach_timeout_s: how long one of them may be away from a pool.
    """

    def __init__(self, others: Sequence[RankProcess] = (), attach_timeout_s: float = 0.0) -> None:
        self._others = others
        self._attach_timeout_s = attach_timeout_s
        self._encoder = StepEncoder()
        self._pool_id: str | None = None  # of the pool that all of them have
        self._away: tuple[str, float] | None = None  # from which pool one of them is, and since when

    def have(self, pool_id: str) -> bool:
        """Whether the other ranks have the pool too: after a loss each session attaches anew in its own time.

        Raises `RankLostError` when one of them takes too long for that.
        """
        if self._others and pool_id != self._pool_id:
            question = self._encoder.encode(Step(pool_id, 0.0, []))
            with self.together():
                for other in self._others:
                    other.send(question)
                answers = [other.hear(_ANSWER_S) for other in self._others]
                if AWAY in answers:
                    self._note_away(self._others[answers.index(AWAY)], pool_id)
                    return False
            self._pool_id, self._away = pool_id, None
        return True

    def _note_away(self, other: RankProcess, pool_id: str) -> None:
        now_s = time.monotonic()
        if self._away is None or self._away[0] != pool_id:
            self._away = pool_id, now_s
        away_s = now_s - self._away[1]
        if away_s > self._attach_timeout_s:
            raise RankLostError(
                f"rank {other.rank} has not attached to the pool of rank 0 for {away_s:.1f} s; its last output may say "
                "why. Connect the worker anew"
            )

    @contextlib.contextmanager
    def computing(self, pool_id: str, valid_until_s: float, chunks: Items[Chunk]) -> Iterator[None]:
        """Has the other ranks compute `chunks`, as the block does on rank 0; see `Step` and `together`.

        They `have` the pool.
        """
        if not self._others:
            yield
            return
        encoded = self._encoder.encode(Step(pool_id, valid_until_s, list(chunks)))
        with self.together():
            for other in self._others:
                other.send(encoded)
            yield

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """For what all ranks do together.

        Raises `RankLostError` when one of the others has ended, unless the block says itself why it failed.
        NOTE: an error in the block ends all of them, since they may wait for rank 0 in the middle of it, and would take
        what it does next for the rest.
        """
        try:
            yield
        except BaseException as error:
            # torch has many errors for a rank that has gone; kvtier's own say themselves what is wrong.
            may_be_lost = isinstance(error, Exception) and not isinstance(error, KvtierError)
            lost = [other for other in self._others if may_be_lost and other.has_ended]
            self.close()
            if lost:
                raise lost[0].lost() from error
            raise

    def close(self) -> None:
        """Ends the other ranks: by themselves when they wait for a step, else at once."""
        for other in self._others:
            other.connection.close()
        for other in self._others:
            other.process.join(_END_S)
            if other.process.exitcode is None:
                other.process.kill()
                other.process.join()


NO_OTHER_RANKS = Ranks()
