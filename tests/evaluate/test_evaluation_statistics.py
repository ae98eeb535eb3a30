"""Bootstrap intervals against what is known of the values."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.evaluate.statistics import Interval, Resamples, exponential_mean, mean, percentile_99


def test_interval_covers_the_mean_of_independent_values() -> None:
    """In about 95% of samples: 16 blocks a sample make it a little less."""
    random = np.random.default_rng(1)
    resamples = Resamples([1024], block_tokens=64, count=400)
    intervals = [resamples.interval(random.exponential(2.0, 1024), mean) for _ in range(300)]
    covered = np.mean([interval.low <= 2.0 <= interval.high for interval in intervals])
    assert 0.87 < covered < 0.99
    assert np.mean([interval.high - interval.low for interval in intervals]) == pytest.approx(
        2 * 1.96 * 2.0 / np.sqrt(1024), rel=0.1
    )


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    """Values that come 8 times in a row have an interval as of an 8th of the values."""
    values = np.repeat(np.random.default_rng(2).normal(size=2048), 8)
    by_block = Resamples([len(values)], block_tokens=128, count=400).interval(values, mean)
    by_position = Resamples([len(values)], block_tokens=1, count=400).interval(values, mean)
    assert (by_block.high - by_block.low) / (by_position.high - by_position.low) == pytest.approx(8**0.5, rel=0.2)


def test_differences_at_the_same_positions_tell_apart_what_the_intervals_do_not() -> None:
    random = np.random.default_rng(3)
    common = random.exponential(1.0, 2048)
    first, second = common, common + 0.01 + random.normal(0, 0.01, 2048)
    resamples = Resamples([1024, 1024])
    one, other = resamples.interval(first, mean), resamples.interval(second, mean)
    assert one.high > other.low
    difference = resamples.interval(second - first, mean)
    assert difference.excludes_zero
    assert difference.value == pytest.approx(0.01, abs=0.001)
    assert not resamples.interval(random.normal(0, 0.01, 2048), mean).excludes_zero


def test_blocks_do_not_reach_from_one_text_into_another() -> None:
    """A text of the value 1 and one of 3: the mean of a block is one or the other."""
    values = np.array([1.0] * 50 + [3.0] * 30)
    resamples = Resamples([50, 30], block_tokens=30, count=200)
    within = {float(block) for block in values[resamples.positions[:, :30]].mean(-1)}
    assert within == {1.0, 3.0}
    assert resamples.interval(values, mean).value == values.mean()


def test_every_position_is_drawn_as_often() -> None:
    drawn = np.bincount(Resamples([64, 96], block_tokens=64, count=4000).positions.ravel())
    np.testing.assert_allclose(drawn / 4000, np.ones(160), atol=0.1)


def test_blocks_are_no_longer_than_the_shortest_text() -> None:
    interval = Resamples([10, 100]).interval(np.arange(110.0), mean)
    assert interval.low < interval.value == 54.5 < interval.high


def test_statistics() -> None:
    values = np.log(np.array([1.0, 4.0]))
    resamples = Resamples([2], block_tokens=1)
    assert resamples.interval(values, exponential_mean) == pytest.approx((2.0, 1.0, 4.0))
    assert percentile_99(np.arange(101.0)) == 99.0
    assert Interval(1.0, -0.1, 2.0).excludes_zero is False
    assert Interval(-1.0, -2.0, -0.1).excludes_zero is True
