"""How a load hands sessions out: thinned, in rounds, and until its time is up."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from replay_traces import growing_session, write_lines

from kvtier.replay.load import Load, Visit
from kvtier.replay.options import Workload
from kvtier.replay.readers import open_trace
from kvtier.replay.tokens import VOCAB_SIZE
from kvtier.replay.trace import Session

PAGE_SIZE = 16
HOUR_S = 3600.0


def two_sessions(directory: Path) -> list[Session]:
    """Of three turns each, with 135, 263 and 391 tokens."""
    return open_trace(write_lines(directory / "t.jsonl", (growing_session(name, 3, blocks=2) for name in "ab")))


def load_of(sessions: list[Session], **workload: float) -> Load:
    return Load(sessions, Workload(Path("-"), **workload), 2, PAGE_SIZE)


def test_places_share_the_sessions_and_an_ended_one_is_told(tmp_path: Path) -> None:
    ended: list[int] = []
    load = Load(
        two_sessions(tmp_path), Workload(Path("-"), start_interval_s=4.0), 3, PAGE_SIZE, lambda: ended.append(1)
    )
    first_place, second_place = iter(load), iter(load)
    assert load.start_delays_s == [0.0, 4.0, 8.0]
    first, second = next(first_place), next(second_place)
    assert [request.prompt.size for request in first.requests] == [135, 263, 391]
    assert len(ended) == 1
    assert next(second.requests).prompt.size == 135
    assert next(first_place, None) is next(second_place, None) is None
    assert (load.num_begun, len(ended), load.is_time_up) == (2, 1, False)


def test_of_so_many_tokens_one_is_kept_and_think_times_are_scaled(tmp_path: Path) -> None:
    sessions = two_sessions(tmp_path)
    whole, kept = (list(next(iter(load_of(sessions, **options))).requests) for options in ({}, {"keep_every": 3}))
    assert [request.prompt.size for request in kept] == [45, 88, 131]
    assert [request.output_tokens for request in kept] == [7, 7, 7]  # of 20
    np.testing.assert_array_equal(kept[2].prompt, whole[2].prompt[::3])
    np.testing.assert_array_equal(kept[1].prompt[:43], kept[0].prompt[:43])  # 128 tokens are common to the whole ones
    (visit,) = itertools.islice(load_of(sessions, think_time_scale=0.5), 1)
    assert [request.think_s for request in visit.requests] == [0.0, 2.5, 2.5]


def test_every_round_has_tokens_and_an_endless_cache_of_its_own(tmp_path: Path) -> None:
    visits: list[Visit] = list(itertools.islice(load_of(two_sessions(tmp_path), duration_s=HOUR_S), 5))
    first, second, third = ([request.prompt for request in visits[number].requests] for number in (0, 2, 4))
    for round_of_prompts in (first, second, third):
        assert [prompt.size for prompt in round_of_prompts] == [135, 263, 391]
        assert max(int(prompt.max()) for prompt in round_of_prompts) < VOCAB_SIZE
        np.testing.assert_array_equal(round_of_prompts[0][:128], round_of_prompts[1][:128])
    assert not np.intersect1d(first[2], second[2]).size
    assert not np.intersect1d(second[2], third[2]).size
    assert visits[0].endless is visits[1].endless
    assert visits[1].endless is not visits[2].endless


def test_nothing_is_handed_out_when_the_time_is_up(tmp_path: Path) -> None:
    sessions = two_sessions(tmp_path)
    load = load_of(sessions, duration_s=0.0)
    assert not load.is_time_up  # it begins with the first session
    assert list(load) == []
    assert load.is_time_up
    assert load.num_begun == 0
