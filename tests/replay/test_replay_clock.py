"""Virtual time against schedules worked out by hand."""

from __future__ import annotations

from kvtier.replay.clock import Delay, Process, Signal, Station, VirtualClock


async def test_time_jumps_from_event_to_event() -> None:
    clock, seen = VirtualClock(), []

    async def tick(name: str, *delays: float) -> Process:
        for delay in delays:
            yield Delay(delay)
            seen.append((name, clock.now_s))

    clock.start(tick("a", 3, 4))
    clock.start(tick("b", 5, 2))
    await clock.run()
    assert seen == [("a", 3), ("b", 5), ("a", 7), ("b", 7)]


async def test_a_station_serves_in_the_order_of_arrival() -> None:
    clock, served = VirtualClock(), []
    station = Station(clock)

    async def customer(name: str, arrives_s: float, takes_s: float) -> Process:
        yield Delay(arrives_s)
        yield station
        entered_s = clock.now_s
        yield Delay(takes_s)
        station.leave()
        served.append((name, entered_s, clock.now_s))

    clock.start(customer("late", 2, 1))
    clock.start(customer("first", 0, 10))
    clock.start(customer("early", 1, 4))
    clock.start(customer("last", 20, 1))
    await clock.run()
    assert served == [("first", 0, 10), ("early", 10, 14), ("late", 14, 15), ("last", 20, 21)]


async def test_a_signal_wakes_all_that_wait_then() -> None:
    clock, woken = VirtualClock(), []
    signal = Signal(clock)

    async def sleeper(name: str, start_s: float) -> Process:
        yield Delay(start_s)
        yield signal
        woken.append((name, clock.now_s))

    async def caller() -> Process:
        for _ in range(2):
            yield Delay(10)
            signal.fire()

    clock.start(sleeper("a", 0))
    clock.start(sleeper("b", 3))
    clock.start(sleeper("c", 12))
    clock.start(caller())
    await clock.run()
    assert woken == [("a", 10), ("b", 10), ("c", 20)]


async def test_stop_closes_what_still_waits() -> None:
    clock, closed = VirtualClock(), []

    async def waits() -> Process:
        try:
            yield Delay(100)
        finally:
            closed.append(clock.now_s)

    async def stops() -> Process:
        yield Delay(4)
        clock.stop()

    clock.start(waits())
    clock.start(stops())
    await clock.run()
    assert (clock.now_s, closed) == (4, [4])
