import json
from typing import Any

import pytest
from httpx_sse import ServerSentEvent

from darts_client import (
    ConnectionFailed,
    Done,
    Event,
    GroupEvent,
    Overloaded,
    ProtocolError,
    ServerFault,
    StatusError,
    TimedOut,
)
from darts_client._batch import Batch
from darts_client._time_limit import TimeLimit

from .test_health import Clock
from .transcripts import BATCH, asked, began, done, error, failed, group, trajectory


def a_batch(*, seconds: float | None = None, clock: Clock | None = None, retries: int = 2, **changes: Any) -> Batch:
    return Batch(asked(**changes), retries, TimeLimit(seconds, clock or Clock()))


def told(batch: Batch, *events: tuple[str, dict[str, Any]], first: int = 1) -> list[Event]:
    """What the events tell, numbered from `first` on."""
    seen = [
        batch.take(ServerSentEvent(event=name, data=json.dumps(data), id=str(number)))
        for number, (name, data) in enumerate(events, first)
    ]
    return [event for event in seen if event is not None]


def refusal(batch: Batch, *events: tuple[str, dict[str, Any]]) -> str:
    with pytest.raises(ProtocolError) as caught:
        told(batch, *events)
    return str(caught.value)


def test_groups_come_as_they_are_told_and_then_the_end() -> None:
    batch = a_batch(prompts=["a", [5, 6]])
    first, second, end = told(batch, began(), ("group", group(1)), ("group", group(0, metadata={"x": 1})), done())
    assert isinstance(first, GroupEvent)
    assert isinstance(second, GroupEvent)
    assert isinstance(end, Done)
    assert (first.group.number, first.group.prompt_token_ids, first.group.prompt_key) == (1, (5, 6), "key 1")
    assert (second.group.number, second.group.prompt_token_ids, second.group.metadata) == (0, None, {"x": 1})
    assert (batch.id, batch.policy, batch.over) == (BATCH, "uniform", True)
    assert batch.usage is not None
    assert (batch.usage.generated, batch.usage.wasted) == (9, 3)


def test_a_trajectory_has_all_that_is_told_of_it() -> None:
    fate: dict[str, Any] = {"rank": 4, "selected_as": "long", "cut": True, "finish_reason": "length", "quality": 0.25}
    cut = trajectory(0, 1, 2, weight_version_end=7, **fate)
    [event] = told(a_batch(), began(), ("group", group(0, trajectory(0, 0, 1), cut, deadline=2)))
    assert isinstance(event, GroupEvent)
    made = event.group.trajectories[1]
    assert (made.index, made.trajectory_id, made.rank, made.selected_as) == (1, f"{BATCH}-0:1", 4, "long")
    assert (made.cut, made.finish_reason, made.weight_version_start, made.weight_version_end) == (True, "length", 3, 7)
    assert (made.token_ids, made.logprobs, made.quality) == ((0, 1), (0.0, -0.5), 0.25)
    assert (event.group.deadline, event.group.candidates, event.group.discarded[0].length) == (2, 3, 2)


def test_what_a_later_server_adds_is_ignored() -> None:
    later = group(0, trajectory(0, 0, 1, colour=0.5), trajectory(0, 1, 2), timing={"x": 1})
    events = told(a_batch(), began(), ("weather", {"sun": True}), ("group", later))
    assert len(events) == 1


def test_an_event_that_was_told_before_is_not_told_again() -> None:
    batch = a_batch()
    assert len(told(batch, began(), ("group", group(1)))) == 1
    assert told(batch, began(), ("group", group(1))) == []
    assert len(told(batch, ("group", group(0)), done(), first=3)) == 2


def test_a_blank_event_is_a_comment() -> None:
    assert a_batch().take(ServerSentEvent(event="", data="", id="7")) is None


def test_unfinished_prompts_are_told_at_the_end() -> None:
    batch = a_batch(num_groups=1)
    told(batch, began(), ("group", group(1)), done(0))
    assert [(prompt.number, prompt.prompt_key) for prompt in batch.unfinished] == [(0, "key 0")]


def test_a_failed_group_is_kept_apart_and_touches_no_other() -> None:
    batch = a_batch()
    failure, whole, _ = told(batch, began(), ("group", failed(1)), ("group", group(0)), done())
    assert isinstance(failure, GroupEvent)
    assert isinstance(whole, GroupEvent)
    assert isinstance(failure.group.error, ServerFault)
    assert failure.group.trajectories == ()
    assert whole.group.error is None
    assert [group.number for group in batch.failed] == [1]


def test_if_all_groups_fail_the_first_error_is_raised() -> None:
    batch = a_batch()
    told(batch, began(), ("group", failed(1, "first")), ("group", failed(0, "second")))
    with pytest.raises(ServerFault, match="first"):
        told(batch, done(), first=4)
    assert batch.leave() is None


def test_an_error_event_is_raised_and_ends_the_batch() -> None:
    batch = a_batch()
    with pytest.raises(Overloaded, match="aborted") as caught:
        told(batch, began(), error("aborted", 503))
    assert batch.over
    with pytest.raises(Overloaded):
        batch.delay_after(caught.value)


def test_an_error_may_be_the_first_event() -> None:
    with pytest.raises(StatusError, match="no"):
        told(a_batch(), error("no", 500))


WRONG: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
    ("begin with 'group'", [("group", group(0))]),
    ("has 3 groups", [began(3)]),
    ("group 2 is not one of 2", [began(), ("group", group(2))]),
    ("came twice", [began(), ("group", group(0)), ("group", group(0))]),
    ("has 1 trajectories, not 2", [began(), ("group", group(0, trajectory(0, 0, 1)))]),
    (
        "has 2 tokens but says 3",
        [began(), ("group", group(0, trajectory(0, 0, 2) | {"length": 3}, trajectory(0, 1, 2)))],
    ),
    ("no logprobs", [began(), ("group", group(0, trajectory(0, 0, 2, logprobs=None), trajectory(0, 1, 2)))]),
    ("but 1 logprobs", [began(), ("group", group(0, trajectory(0, 0, 2, logprobs=[0.0]), trajectory(0, 1, 2)))]),
    ("has no token_ids", [began(), ("group", group(0, trajectory(0, 0, 2, tokens=False), trajectory(0, 1, 2)))]),
    (
        "trajectories.0.finish_reason",
        [began(), ("group", group(0, trajectory(0, 0, 2, finish_reason="abort"), trajectory(0, 1, 2)))],
    ),
    ("event 2 (group): seconds", [began(), ("group", group(0, seconds="long"))]),
    ("these were told of: [0]", [began(), ("group", group(0)), done()]),
    ("these were told of: [0, 0]", [began(), ("group", group(0)), done(0)]),
]


@pytest.mark.parametrize(("message", "events"), WRONG, ids=[message for message, _ in WRONG])
def test_what_cannot_be_is_refused(message: str, events: list[tuple[str, dict[str, Any]]]) -> None:
    assert message in refusal(a_batch(), *events)


def test_an_event_without_a_number_is_refused() -> None:
    with pytest.raises(ProtocolError, match="'batch' event has no number"):
        a_batch().take(ServerSentEvent(event="batch", data="{}", id=""))


def test_what_is_not_json_is_refused_by_its_event() -> None:
    with pytest.raises(ProtocolError, match=r"event 1 \(batch\): body"):
        a_batch().take(ServerSentEvent(event="batch", data='{"id": "x', id="1"))


def test_without_logprobs_none_are_expected() -> None:
    plain = [trajectory(0, index, 1, logprobs=None) for index in range(2)]
    [event] = told(a_batch(logprobs=False), began(), ("group", group(0, *plain)))
    assert isinstance(event, GroupEvent)
    assert [t.logprobs for t in event.group.trajectories] == [None, None]


def test_a_batch_begins_with_its_key_and_goes_on_after_the_last_event() -> None:
    batch = a_batch(idempotency_key="step 7")
    method, path, options = batch.connect()
    assert (method, path, options["headers"]["Idempotency-Key"]) == ("POST", "/darts/v1/rollouts", "step 7")
    told(batch, began(), ("group", group(1)))
    method, path, options = batch.connect()
    assert (method, path, options["headers"]["Last-Event-ID"]) == ("GET", f"/darts/v1/rollouts/{BATCH}", "2")
    assert "content" not in options


def test_a_batch_that_is_not_durable_has_no_key_and_is_not_connected_again() -> None:
    batch = a_batch(durable=False)
    assert "Idempotency-Key" not in batch.connect()[2]["headers"]
    told(batch, began())
    assert batch.leave() is None
    with pytest.raises(ConnectionFailed):
        batch.delay_after(batch.lost())


def test_a_lost_connection_is_tried_until_the_retries_are_spent_and_events_renew_them() -> None:
    batch = a_batch(retries=2)
    batch.delay_after(batch.lost())
    batch.delay_after(TimedOut("silent"))
    told(batch, began())
    batch.delay_after(batch.lost())
    batch.delay_after(batch.lost())
    with pytest.raises(ConnectionFailed):
        batch.delay_after(batch.lost())


def test_nothing_is_tried_after_the_time_is_over() -> None:
    clock = Clock()
    batch = a_batch(seconds=60, clock=clock)
    batch.delay_after(batch.lost())
    clock.now += 60
    with pytest.raises(TimedOut, match="after 60 s"):
        batch.delay_after(batch.lost())


def test_a_batch_may_run_without_a_name_once_the_server_may_have_its_request() -> None:
    batch = a_batch()
    assert not batch.unnamed
    batch.connect()
    assert batch.unnamed
    batch.delay_after(batch.lost())
    assert batch.unnamed
    batch.delay_after(Overloaded("busy", status_code=503, retry_after=0.0))
    assert not batch.unnamed
    batch.connect()
    told(batch, began())
    assert not batch.unnamed


def test_to_leave_a_durable_batch_cancels_it_unless_it_is_over() -> None:
    batch = a_batch()
    assert batch.leave() is None
    told(batch, began())
    call = batch.leave()
    assert call is not None
    assert (call.method, call.path) == ("DELETE", f"/darts/v1/rollouts/{BATCH}")
    told(batch, ("group", group(1)), ("group", group(0)), done(), first=2)
    assert batch.leave() is None
