import json
from typing import Any

import pytest
from httpx_sse import ServerSentEvent
from hypothesis import given
from hypothesis import strategies as st

from darts_client import (
    ConnectionFailed,
    Done,
    Event,
    GroupEvent,
    Overloaded,
    ProtocolError,
    ServerFault,
    TimedOut,
    TrajectoryEvent,
)
from darts_client._requests import TimeLimit
from darts_client._stream import BatchReader

from .test_requests import Clock
from .transcripts import (
    BATCH,
    build_request,
    delta,
    discard,
    done,
    error,
    failed_group,
    group,
    started,
    trajectory,
    trajectory_end,
)


def build_reader(
    *, seconds: float | None = None, clock: Clock | None = None, retries: int = 2, **changes: Any
) -> BatchReader:
    return BatchReader(build_request(**changes), retries, TimeLimit(seconds, clock or Clock()))


def read(batch: BatchReader, *events: tuple[str, dict[str, Any]], first: int = 1) -> list[Event]:
    """Read the events, numbered from `first`, and return the events for the caller."""
    results = [
        batch.read(ServerSentEvent(event=name, data=json.dumps(data), id=str(number)))
        for number, (name, data) in enumerate(events, first)
    ]
    return [event for event in results if event is not None]


def read_error(batch: BatchReader, *events: tuple[str, dict[str, Any]]) -> str:
    with pytest.raises(ProtocolError) as caught:
        read(batch, *events)
    return str(caught.value)


def test_unknown_fields_and_events_are_ignored() -> None:
    later = group(0, trajectory(0, 0, 1, colour=0.5), trajectory(0, 1, 2), timing={"x": 1})
    events = read(build_reader(), started(), ("weather", {"sun": True}), ("group", later))
    assert len(events) == 1


def test_the_first_error_is_raised_if_all_groups_fail() -> None:
    batch = build_reader()
    read(batch, started(), ("group", failed_group(1, "first")), ("group", failed_group(0, "second")))
    with pytest.raises(ServerFault, match="first"):
        read(batch, done(), first=4)
    assert batch.cancel_path is None


def test_no_error_is_raised_if_all_groups_fail_but_prompts_are_unfinished() -> None:
    batch = build_reader()
    unfinished = done(0)[1]["unfinished"][0] | {"carry": "resume", "error": failed_group(0)["error"]}
    read(batch, started(), ("group", failed_group(1)), ("done", done()[1] | {"unfinished": [unfinished]}))
    assert [group.number for group in batch.failed] == [1]
    assert [(prompt.number, prompt.carry) for prompt in batch.unfinished] == [(0, "resume")]
    assert batch.is_over


@pytest.mark.parametrize("tokens", [[1, 2], []])
def test_groups_that_were_all_aborted_are_returned_if_any_token_was_generated(tokens: list[int]) -> None:
    candidate = {"trajectory_id": "g:0", "token_ids": tokens, "logprobs": [-0.5] * len(tokens), "text": "ab"}
    aborted = failed_group(1, "an update") | {"aborted": [candidate | {"finish_reason": "abort"}]}
    batch = build_reader()
    events = started(), ("group", failed_group(0) | {"aborted": []}), ("group", aborted)
    read(batch, *events)
    if tokens:
        read(batch, done(), first=4)
        assert [[one.token_ids for one in group.aborted] for group in batch.failed] == [[], [(1, 2)]]
    else:
        with pytest.raises(ServerFault, match="too few"):
            read(batch, done(), first=4)
    assert batch.is_over


def test_an_error_event_is_raised_and_ends_the_batch() -> None:
    batch = build_reader()
    with pytest.raises(Overloaded, match="aborted") as caught:
        read(batch, started(), error("aborted", 503))
    assert batch.is_over
    with pytest.raises(Overloaded):
        batch.delay_after(caught.value)


WRONG: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("the first event is 'group'", [("group", group(0))]),
    ("has 3 groups", [started(3)]),
    ("group 2 is not one of 2", [started(), ("group", group(2))]),
    ("came twice", [started(), ("group", group(0)), ("group", group(0))]),
    ("has 1 trajectories, not 2", [started(), ("group", group(0, trajectory(0, 0, 1)))]),
    (
        "has 2 tokens, but its length is 3",
        [started(), ("group", group(0, trajectory(0, 0, 2) | {"length": 3}, trajectory(0, 1, 2)))],
    ),
    ("no logprobs", [started(), ("group", group(0, trajectory(0, 0, 2, logprobs=None), trajectory(0, 1, 2)))]),
    ("but 1 logprobs", [started(), ("group", group(0, trajectory(0, 0, 2, logprobs=[0.0]), trajectory(0, 1, 2)))]),
    ("has no token_ids", [started(), ("group", group(0, trajectory(0, 0, 2, tokens=False), trajectory(0, 1, 2)))]),
    (
        "trajectories.0.finish_reason",
        [started(), ("group", group(0, trajectory(0, 0, 2, finish_reason="abort"), trajectory(0, 1, 2)))],
    ),
    ("but reported [0]", [started(), ("group", group(0)), done()]),
    ("but reported [0, 0]", [started(), ("group", group(0)), done(0)]),
]


@pytest.mark.parametrize(("message", "events"), WRONG, ids=[message for message, _ in WRONG])
def test_invalid_events_are_rejected(message: str, events: list[tuple[str, dict[str, Any]]]) -> None:
    assert message in read_error(build_reader(), *events)


@pytest.mark.parametrize(
    ("data", "number", "message"),
    [("{}", "", "'batch' event has no number"), ('{"id": "x', "1", r"event 1 \(batch\): body")],
)
def test_an_event_without_a_number_or_valid_json_is_rejected(data: str, number: str, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        build_reader().read(ServerSentEvent(event="batch", data=data, id=number))


def test_logprobs_may_be_missing_if_not_requested() -> None:
    plain = [trajectory(0, index, 1, logprobs=None) for index in range(2)]
    [event] = read(build_reader(logprobs=False), started(), ("group", group(0, *plain)))
    assert isinstance(event, GroupEvent)
    assert [t.logprobs for t in event.group.trajectories] == [None, None]


def test_a_batch_that_is_not_durable_has_no_key_and_does_not_reconnect() -> None:
    batch = build_reader(durable=False)
    assert "Idempotency-Key" not in batch.next_request()[2]["headers"]
    read(batch, started())
    assert batch.cancel_path is None
    with pytest.raises(ConnectionFailed):
        batch.delay_after(batch.connection_lost())


def test_events_reset_the_retries_of_a_lost_connection() -> None:
    batch = build_reader(retries=2)
    batch.delay_after(batch.connection_lost())
    batch.delay_after(TimedOut("silent"))
    read(batch, started())
    batch.delay_after(batch.connection_lost())
    batch.delay_after(batch.connection_lost())
    with pytest.raises(ConnectionFailed):
        batch.delay_after(batch.connection_lost())


def test_a_batch_does_not_reconnect_after_its_time_limit() -> None:
    clock = Clock()
    batch = build_reader(seconds=60, clock=clock)
    batch.delay_after(batch.connection_lost())
    clock.now += 60
    with pytest.raises(TimedOut, match="after 60 s"):
        batch.delay_after(batch.connection_lost())


def test_a_batch_may_run_unnamed_once_the_server_may_have_its_request_and_can_be_cancelled_until_it_is_over() -> None:
    batch = build_reader()
    assert (batch.needs_id_to_cancel, batch.cancel_path) == (False, None)
    batch.next_request()
    assert batch.needs_id_to_cancel
    batch.delay_after(batch.connection_lost())
    assert batch.needs_id_to_cancel
    batch.delay_after(Overloaded("busy", status_code=503, retry_after=0.0))
    assert not batch.needs_id_to_cancel
    batch.next_request()
    read(batch, started())
    assert not batch.needs_id_to_cancel
    assert batch.cancel_path == f"/darts/v1/rollouts/{BATCH}"
    read(batch, ("group", group(1)), ("group", group(0)), done(), first=2)
    assert batch.cancel_path is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 40))
def test_deltas_of_any_sizes_are_joined_and_cut(sizes: list[int], cut: int) -> None:
    """A trajectory without tokens needs no delta."""
    deltas = []
    start = 0
    for size in sizes:
        deltas.append(("delta", delta(0, 0, start, start + size)))
        start += size
    length = min(cut, start)
    end = ("trajectory", trajectory_end(0, 0, length, cut=length < start))
    whole = ("group", group(0, trajectory(0, 0, length, tokens=False)))
    batch = build_reader(prompts="a", stream="tokens", group_size=1)
    *_, event, last = read(batch, started(1), *(deltas if length else []), end, whole)
    assert isinstance(event, TrajectoryEvent)
    assert isinstance(last, GroupEvent)
    expected = (tuple(range(length)), tuple(-0.5 * k for k in range(length)))
    assert (event.token_ids, event.logprobs) == expected
    assert [(one.token_ids, one.logprobs) for one in last.group.trajectories] == [expected]


FIRST = ("delta", delta(0, 0, 0, 2))
SELECTED = ("trajectory", trajectory_end(0, 0, 2))
DISCARDED = ("discard", discard(0, 1, 1))
WHOLE = ("group", group(0, trajectory(0, 0, 2, tokens=False)))
WRONG_TOKENS: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    *((f"starts at {start}, not at 2", [FIRST, ("delta", delta(0, 0, start, 5))]) for start in (1, 3)),
    *(("one logprob for each token", [("delta", delta(0, 0, 0, 2, logprobs=wrong))]) for wrong in (None, [0.0])),
    *(("after its end", [FIRST, SELECTED, again]) for again in (("delta", delta(0, 0, 2, 3)), SELECTED)),
    *(("after its end", [DISCARDED, again]) for again in (("delta", delta(0, 1, 0, 1)), DISCARDED)),
    *(
        (f"has 2 tokens, but its length is {length}", [FIRST, ("trajectory", trajectory_end(0, 0, length, cut=cut))])
        for length, cut in ((1, False), (3, False), (3, True))
    ),
    *(("was not streamed", [*before, WHOLE]) for before in ([], [FIRST], [("discard", discard(0, 0, 1))])),
    ("after its end", [FIRST, SELECTED, WHOLE, ("delta", delta(0, 1, 0, 1))]),
    ("group 0 is complete, but roll-1-0:1 has not finished", [FIRST, SELECTED, ("delta", delta(0, 1, 0, 1)), WHOLE]),
]


@pytest.mark.parametrize(("message", "events"), WRONG_TOKENS)
def test_invalid_events_of_a_token_stream_are_rejected(message: str, events: list[tuple[str, dict[str, Any]]]) -> None:
    batch = build_reader(stream="tokens", group_size=1)
    assert message in read_error(batch, started(), *events)


def test_groups_of_survivors_have_any_size_above_zero() -> None:
    name, data = started(1)
    for count in (1, 2, 3):
        members = [trajectory(0, index, 1) for index in range(count)]
        [event] = read(build_reader(prompts="a"), (name, data | {"survivors": True}), ("group", group(0, *members)))
        assert isinstance(event, GroupEvent)
        assert len(event.group.trajectories) == count
    none = (name, data | {"survivors": True}), ("group", group(0, trajectories=[], discarded=[]))
    assert "has 0 trajectories, not 2" in read_error(build_reader(prompts="a"), *none)


def test_an_aborted_group_has_an_error_and_the_tokens_of_its_candidates() -> None:
    error = {"message": "an update", "type": "InternalServerError", "param": None, "code": 503}
    whole = {"trajectory_id": "g:0", "token_ids": [1, 2], "logprobs": [-0.5, -1.0], "text": "ab", "length": 2}
    spans = {"weight_version_start": 3, "weight_version_end": 4, "version_spans": [[3, 1], [4, 1]], "cut": False}
    aborted = [whole | spans | {"finish_reason": "stop"}, whole | spans | {"finish_reason": "abort"}]
    batch = build_reader(prompts=["a", "b", "c"])
    unfinished = done(2)[1]["unfinished"][0] | {"carry": "resume", "error": error, "aborted": aborted}
    first, second, end = read(
        batch,
        started(3),
        ("group", group(0, trajectories=[], discarded=[], error=error, aborted=aborted)),
        ("group", group(1, aborted=None)),
        ("done", done()[1] | {"unfinished": [unfinished]}),
    )
    assert isinstance(first, GroupEvent)
    assert isinstance(second, GroupEvent)
    assert isinstance(end, Done)
    assert (first.group.trajectories, str(first.group.error)) == ((), "HTTP 503: an update")
    assert [(one.finish_reason, one.token_ids) for one in first.group.aborted] == [("stop", (1, 2)), ("abort", (1, 2))]
    assert first.group.aborted[1].version_spans == ((3, 1), (4, 1))
    assert second.group.aborted == ()
    assert batch.failed == [first.group]
    assert (end.unfinished[0].carry, end.unfinished[0].error) == ("resume", error)
    assert [one.token_ids for one in end.unfinished[0].aborted or ()] == [(1, 2), (1, 2)]
