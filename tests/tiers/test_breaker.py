"""The circuit breaker, by a clock that the tests turn."""

from __future__ import annotations

import pytest

from kvtier.errors import RedisUnavailableError
from kvtier.tiers.breaker import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("redis://far", failures_to_open=3, cool_down_s=5.0, clock=clock)


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        with breaker.attempt() as attempt:
            attempt.failed("no route")


def succeed(breaker: Breaker) -> None:
    with breaker.attempt() as attempt:
        attempt.succeeded()


def test_it_opens_after_failures_in_a_row_and_says_why(breaker):
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    for refused in (breaker.check, breaker.attempt):
        with pytest.raises(RedisUnavailableError, match="redis://far.*no route"):
            refused()
    assert breaker.last_error == "no route"


def test_a_success_between_failures_starts_the_count_anew(breaker):
    fail(breaker, 2)
    succeed(breaker)
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_one_attempt_at_a_time_tries_after_the_cool_down_and_its_success_closes(breaker, clock):
    fail(breaker, 3)
    clock.now += 4.9
    with pytest.raises(RedisUnavailableError):
        breaker.attempt()
    clock.now += 0.2
    with breaker.attempt() as attempt:
        assert breaker.state is BreakerState.HALF_OPEN
        with pytest.raises(RedisUnavailableError):
            breaker.attempt()
        attempt.succeeded()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_a_failure_while_half_open_opens_it_for_another_cool_down(breaker, clock):
    fail(breaker, 3)
    clock.now += 5.1
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.9
    with pytest.raises(RedisUnavailableError):
        breaker.check()
    clock.now += 0.2
    succeed(breaker)
    assert breaker.state is BreakerState.CLOSED


def test_an_attempt_without_a_verdict_leaves_the_next_one_free(breaker, clock):
    fail(breaker, 3)
    clock.now += 5.1
    with pytest.raises(ZeroDivisionError), breaker.attempt():
        raise ZeroDivisionError
    assert breaker.state is BreakerState.OPEN
    succeed(breaker)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    with breaker.attempt():
        pass
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    assert breaker.state is BreakerState.OPEN


def test_verdicts_of_attempts_from_before_it_opened_change_nothing(breaker, clock):
    early, late = breaker.attempt(), breaker.attempt()
    fail(breaker, 3)
    early.succeeded()
    assert breaker.state is BreakerState.OPEN
    clock.now += 5.1
    with breaker.attempt() as attempt:
        late.failed("stale")
        early.succeeded()
        assert breaker.state is BreakerState.HALF_OPEN
        attempt.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.last_error == "no route"
