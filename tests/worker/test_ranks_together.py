"""What rank 0 says of a step, or of the connecting, that failed."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from multiprocessing.connection import Connection

import pytest

from kvtier.errors import InvalidRequestError, RankLostError
from kvtier.worker.ranks import AWAY, READY, RankProcess, Ranks
from kvtier.worker.step_messages import StepDecoder

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture
def ranks() -> Ranks:
    """Rank 1 has ended."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=sys.exit, args=(3,), daemon=True)
    process.start()
    theirs.close()
    process.join()
    return Ranks([RankProcess(1, process, ours)])


def attach_to_one(connection: Connection) -> None:
    """A rank that can attach to no pool but "good"."""
    decoder = StepDecoder()
    with contextlib.suppress(EOFError):
        while True:
            step = decoder.decode(connection.recv_bytes())
            connection.send_bytes(READY if step.pool_id == "good" else AWAY)


def test_a_rank_that_does_not_attach_is_lost_after_a_time() -> None:
    """Which begins anew with every pool."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=attach_to_one, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ranks = Ranks([RankProcess(1, process, ours)], attach_timeout_s=0.0)
    asked = ("bad", "good", "bad", "worse", "bad")
    assert [ranks.have(pool_id) for pool_id in asked] == [False, True, False, False, False]
    with pytest.raises(RankLostError, match="rank 1 has not attached to the pool of rank 0 for"):
        ranks.have("bad")
    assert process.exitcode == 0


def test_what_torch_raises_for_a_rank_that_has_gone_says_that(ranks: Ranks) -> None:
    with pytest.raises(RankLostError, match="rank 1 has ended with exit code 3"), ranks.together():
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", [InvalidRequestError("ranks cannot share 3 heads"), KeyboardInterrupt()])
def test_what_fails_in_rank_0_itself_is_what_is_raised(ranks: Ranks, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, ranks.together():
        raise error
    assert raised.value is error
