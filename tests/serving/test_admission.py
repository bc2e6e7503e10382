from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from darts_server.exceptions import InvalidRequest, Overloaded, QuotaReached
from darts_server.serving.admission import (
    LEAST_QUEUE,
    Admission,
    Bounds,
    Caller,
    caller,
    most_queued,
)

CAPACITY = 10


class Engine:
    unfinished = 0


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    token = caller.set(Caller())
    yield
    caller.reset(token)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def an_admission(engine: Engine, capacity: int | None = CAPACITY, **bounds: int) -> Admission:
    return Admission(lambda: engine.unfinished, capacity, Bounds(**bounds))


def test_what_waits_is_what_the_engine_has_no_room_for(engine: Engine) -> None:
    admission = an_admission(engine)
    assert admission.waiting == 0
    engine.unfinished = CAPACITY
    assert admission.waiting == 0
    engine.unfinished = CAPACITY + 3
    assert admission.waiting == 3
    assert an_admission(engine, None).waiting == 0


def test_candidates_on_their_way_wait_too_until_the_engine_counts_them(engine: Engine) -> None:
    admission = an_admission(engine)
    with admission.held(8) as ticket:
        ticket.grow(12)
        assert admission.waiting == 2
        ticket.begun()
        assert admission.waiting == 0
        engine.unfinished = 12
        assert admission.waiting == 2
        engine.unfinished = 0
    assert admission.waiting == 0


def test_a_request_that_ends_before_it_began_leaves_nothing_behind(engine: Engine) -> None:
    admission = an_admission(engine)
    with pytest.raises(KeyError), admission.held(50):
        raise KeyError
    assert admission.waiting == admission.ahead == 0


def test_any_request_is_taken_while_the_queue_is_short_and_none_when_it_is_not(engine: Engine) -> None:
    admission = an_admission(engine, most_waiting=20)
    engine.unfinished = CAPACITY + 19
    admission.check(10_000)
    engine.unfinished += 1
    with pytest.raises(Overloaded, match=r"20 candidates wait .* \(--max-queued-candidates\)") as error:
        admission.check(1)
    assert error.value.retry_after > 0


def test_without_bounds_everything_is_taken(engine: Engine) -> None:
    engine.unfinished = 10**9
    an_admission(engine).check(10**9)


def test_a_key_has_its_share_and_others_theirs(engine: Engine) -> None:
    admission = an_admission(engine, most_per_caller=8)
    one, other = Caller("one"), Caller("other")
    with ExitStack() as requests:
        caller.set(one)
        requests.enter_context(admission.held(5))
        admission.check(3)
        with pytest.raises(QuotaReached, match="5 candidates under way, and 4 more"):
            admission.check(4)
        assert isinstance(one.refused, QuotaReached)
        with pytest.raises(InvalidRequest, match="asks for 9 candidates at once, and a key may have 8") as error:
            admission.check(9, "prompts")
        assert error.value.field == "prompts"
        caller.set(other)
        admission.check(8)
        caller.set(Caller())
        admission.check(100)
        assert other.refused is None
    caller.set(one)
    admission.check(8)


def test_a_share_counts_the_candidates_that_a_group_got(engine: Engine) -> None:
    admission = an_admission(engine, most_per_caller=8)
    caller.set(Caller("one"))
    with admission.held(4) as ticket:
        ticket.grow(6)
        ticket.begun()
        with pytest.raises(QuotaReached):
            admission.check(3)


def test_the_queue_is_generous_where_nobody_says_how_long_it_may_be() -> None:
    assert most_queued(None) is None
    assert most_queued(1) == LEAST_QUEUE
    assert most_queued(1024) == 65_536
