"""What rank 0 says of a step, or of the connecting, that failed."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

from kvtier.errors import InvalidRequestError, RankLostError
from kvtier.worker.ranks import RankProcess, Ranks


@pytest.fixture
def ranks() -> Ranks:
    """Rank 1 has ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=sys.exit, args=(3,), daemon=True)
    process.start()
    theirs.close()
    process.join()
    return Ranks([RankProcess(1, process, ours)])


def test_what_torch_raises_for_a_rank_that_has_gone_says_that(ranks: Ranks) -> None:
    with pytest.raises(RankLostError, match="rank 1 has ended with exit code 3"), ranks.together():
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", [InvalidRequestError("ranks cannot share 3 heads"), KeyboardInterrupt()])
def test_what_fails_in_rank_0_itself_is_what_is_raised(ranks: Ranks, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, ranks.together():
        raise error
    assert raised.value is error
