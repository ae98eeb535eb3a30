"""Readers of traces: what is equal gets equal tokens, what is not gets others, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from replay_traces import BLOCK, weka_session, weka_turn, write_lines

from kvtier.errors import InvalidRequestError
from kvtier.replay.readers import open_trace
from kvtier.replay.tokens import VOCAB_SIZE, Tokens
from kvtier.replay.trace import Request, Session


def common_prefix(first: Tokens, second: Tokens) -> int:
    size = min(first.size, second.size)
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if differ.size else size


def num_words(text: str) -> int:
    return len(text.split())


def requests_of(session: Session) -> list[Request]:
    return list(session.requests())


def test_a_coding_agents_session(tmp_path: Path) -> None:
    record = weka_session(
        "one",
        [
            weka_turn(0.0, 5 * BLOCK + 7, 30, 0, [[1, 5]], think_time=0.0),
            weka_turn(9.0, 8 * BLOCK, 40, 5, [[6, 2], [20, 1]], think_time=4.5),
            weka_turn(20.0, 4 * BLOCK + 1, 50, 3, [[30, 1]]),
            weka_turn(30.0, 5 * BLOCK, 60, 0, [[1, 5]], think_time=2.0),
        ],
    )
    (session,) = open_trace(write_lines(tmp_path / "trace.jsonl", [record]))
    first, second, third, fourth = requests_of(session)

    assert session.name == "one"
    assert [request.prompt.size for request in (first, second, third, fourth)] == [327, 512, 257, 320]
    assert [request.output_tokens for request in (first, second, third, fourth)] == [30, 40, 50, 60]
    assert [request.think_s for request in (first, second, third, fourth)] == [0.0, 4.5, 0.0, 2.0]
    assert common_prefix(first.prompt, second.prompt) == 5 * BLOCK  # the tail of 7 tokens is the first request's alone
    assert common_prefix(second.prompt, third.prompt) == 3 * BLOCK
    np.testing.assert_array_equal(fourth.prompt, first.prompt[: 5 * BLOCK])  # the same ids, coded anew
    assert np.unique(second.prompt).size == second.prompt.size
    assert int(second.prompt.max()) < VOCAB_SIZE


def test_prompts_are_made_anew_and_the_same_at_every_call(tmp_path: Path) -> None:
    (session,) = open_trace(write_lines(tmp_path / "t.jsonl", [weka_session("x", [weka_turn(0, 70, 1, 0, [[4, 1]])])]))
    (one,), (other,) = session.requests(), session.requests()
    np.testing.assert_array_equal(one.prompt, other.prompt)


def test_sessions_share_tools_and_system_prompt_where_their_lengths_agree(tmp_path: Path) -> None:
    turn = weka_turn(0.0, 8 * BLOCK, 1, 0, [[1, 8]])
    lengths = {"one": (200, 130), "same": (200, 130), "other system": (200, 190), "other tools": (201, 130)}
    records = [weka_session(name, [turn], *pair) for name, pair in lengths.items()]
    one, same, other_system, other_tools = (
        requests_of(session)[0].prompt for session in open_trace(write_lines(tmp_path / "trace.jsonl", records))
    )
    assert common_prefix(one, same) == 5 * BLOCK  # whole blocks of 330 tokens
    assert common_prefix(one, other_system) == 3 * BLOCK  # whole blocks of 200 tokens
    assert common_prefix(one, other_tools) == 0


def test_a_shared_block_stays_shared_when_its_id_comes_again(tmp_path: Path) -> None:
    turns = [weka_turn(0, 4 * BLOCK, 1, 0, [[1, 4]]), weka_turn(1, BLOCK, 1, 0, [[9, 1]])]
    turns.append(weka_turn(2, 4 * BLOCK, 1, 0, [[1, 4]]))
    (session,) = open_trace(write_lines(tmp_path / "trace.jsonl", [weka_session("one", turns, 128, 0)]))
    first, _, third = requests_of(session)
    np.testing.assert_array_equal(first.prompt, third.prompt)


def test_a_subagents_requests_stand_where_their_times_say(tmp_path: Path) -> None:
    subagent = {
        "type": "subagent",
        "t": 10.0,
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": [weka_turn(0.0, 65, 2, 0, [[50, 1]]), weka_turn(25.0, 130, 4, 1, [[51, 1]], think_time=3.0)],
    }
    turns = [weka_turn(0.0, 64, 1, 0, [[1, 1]]), subagent, weka_turn(30.0, 128, 3, 1, [[2, 1]])]
    (session,) = open_trace(write_lines(tmp_path / "trace.jsonl", [weka_session("one", turns)]))
    requests = requests_of(session)
    assert [request.output_tokens for request in requests] == [1, 2, 3, 4]
    assert common_prefix(requests[0].prompt, requests[2].prompt) == BLOCK
    assert common_prefix(requests[1].prompt, requests[3].prompt) == BLOCK
    assert common_prefix(requests[0].prompt, requests[1].prompt) == 0


def test_mooncakes_lines_are_sessions_of_one_request_with_global_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 3, "input_length": 1536, "output_length": 6, "hash_ids": [0, 7, 8]},
        {"timestamp": 9, "input_length": 1400, "output_length": 7, "hash_ids": [0, 1, 9]},
    ]
    sessions = open_trace(write_lines(tmp_path / "trace.jsonl.xz", lines))
    (first,), (second,), (third,) = map(requests_of, sessions)
    assert [request.prompt.size for request in (first, second, third)] == [1000, 1536, 1400]
    assert [request.output_tokens for request in (first, second, third)] == [5, 6, 7]
    assert common_prefix(first.prompt, second.prompt) == 512
    assert common_prefix(first.prompt, third.prompt) == 1000


def test_conversations_with_text(tmp_path: Path) -> None:
    call = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}]
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "here", "tool_call_id": "c1", "name": "find"},
        {"role": "assistant", "content": "Here."},
    ]
    silent = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    path = tmp_path / "conversations.json"
    records = [
        {"task_id": 4, "trial": 1, "traj": conversation},
        {"task_id": 5, "trial": 1, "traj": silent},
        {"task_id": 6, "trial": 1, "traj": [*silent, {"role": "assistant", "content": "Hi"}]},
    ]
    path.write_text(json.dumps(records, indent=1))
    sessions = open_trace(path)
    first, second = requests_of(sessions[0])
    (other,) = requests_of(sessions[1])

    assert [session.name for session in sessions] == ["task-4-1", "task-6-1"]
    assert first.prompt.size == num_words("< system > Be brief . < user > Where is it ?")
    assert first.output_tokens > 10  # a call of a tool is a message too
    assert common_prefix(first.prompt, second.prompt) == first.prompt.size
    assert second.prompt.size == first.prompt.size + first.output_tokens + num_words("< tool > here")
    assert second.output_tokens == num_words("< assist ant > Here .")
    assert common_prefix(first.prompt, other.prompt) == num_words("< system > Be brief . < user >")


def test_only_so_many_sessions_are_read(tmp_path: Path) -> None:
    records = [weka_session(str(number), [weka_turn(0, 64, 1, 0, [[1, 1]])]) for number in range(5)]
    path = write_lines(tmp_path / "trace.jsonl", records)
    assert [session.name for session in open_trace(path, 2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no sessions"),
        ("{}\n", "neither `requests` nor `hash_ids`"),
        ("no json\n", "JSONDecodeError"),
        (json.dumps(weka_session("a", [{"t": 0, "type": "n"}])), "KeyError: 'keep'"),
        (json.dumps(weka_session("a", [weka_turn(0, 64, 1, 3, [])])), "request 0 of a keeps 3 blocks of 0"),
        ('{"input_length": 600, "output_length": 1, "hash_ids": [0]}', "600 tokens in 1 blocks of 512"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=fault):
        open_trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no trace at .*: No such file or directory"):
        open_trace(tmp_path / "trace.jsonl")
