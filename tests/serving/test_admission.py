from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from darts_server.exceptions import InvalidRequest, Overloaded, QuotaReached
from darts_server.serving.admission import (
    MIN_QUEUE,
    Admission,
    Bounds,
    Caller,
    caller,
    default_max_waiting,
)

CAPACITY = 10


class Engine:
    unfinished = 0


@pytest.fixture(autouse=True)
def no_caller() -> Iterator[None]:
    token = caller.set(Caller())
    yield
    caller.reset(token)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def an_admission(engine: Engine, capacity: int | None = CAPACITY, **bounds: int) -> Admission:
    return Admission(lambda: engine.unfinished, capacity, Bounds(**bounds))


def test_candidates_beyond_the_capacity_wait(engine: Engine) -> None:
    admission = an_admission(engine)
    assert admission.waiting == 0
    engine.unfinished = CAPACITY
    assert admission.waiting == 0
    engine.unfinished = CAPACITY + 3
    assert admission.waiting == 3
    assert an_admission(engine, None).waiting == 0


def test_admitted_candidates_count_until_the_engine_counts_them(engine: Engine) -> None:
    admission = an_admission(engine)
    with admission.reserve(8) as ticket:
        ticket.resize(12)
        assert admission.waiting == 2
        ticket.mark_started()
        assert admission.waiting == 0
        engine.unfinished = 12
        assert admission.waiting == 2
        engine.unfinished = 0
    assert admission.waiting == 0


def test_a_request_that_ends_before_it_starts_is_no_longer_counted(engine: Engine) -> None:
    admission = an_admission(engine)
    with pytest.raises(KeyError), admission.reserve(50):
        raise KeyError
    assert admission.waiting == admission.ahead == 0


def test_requests_of_any_size_are_admitted_until_the_queue_is_full(engine: Engine) -> None:
    admission = an_admission(engine, max_waiting=20)
    engine.unfinished = CAPACITY + 19
    admission.check(10_000)
    engine.unfinished += 1
    with pytest.raises(Overloaded, match=r"20 candidates wait .* \(--max-queued-candidates\)") as error:
        admission.check(1)
    assert error.value.retry_after > 0


def test_without_bounds_every_request_is_admitted(engine: Engine) -> None:
    engine.unfinished = 10**9
    an_admission(engine).check(10**9)


def test_each_key_has_its_own_quota(engine: Engine) -> None:
    admission = an_admission(engine, max_per_caller=8)
    one, other = Caller("one"), Caller("other")
    with ExitStack() as requests:
        caller.set(one)
        requests.enter_context(admission.reserve(5))
        admission.check(3)
        with pytest.raises(QuotaReached, match="5 candidates in flight, and 4 more"):
            admission.check(4)
        assert isinstance(one.refused, QuotaReached)
        with pytest.raises(InvalidRequest, match="requests 9 candidates, and a key may have 8") as error:
            admission.check(9, "prompts")
        assert error.value.field == "prompts"
        caller.set(other)
        admission.check(8)
        caller.set(Caller())
        admission.check(100)
        assert other.refused is None
    caller.set(one)
    admission.check(8)


def test_a_quota_counts_the_allocated_candidates(engine: Engine) -> None:
    admission = an_admission(engine, max_per_caller=8)
    caller.set(Caller("one"))
    with admission.reserve(4) as ticket:
        ticket.resize(6)
        ticket.mark_started()
        with pytest.raises(QuotaReached):
            admission.check(3)


def test_the_default_queue_is_large() -> None:
    assert default_max_waiting(None) is None
    assert default_max_waiting(1) == MIN_QUEUE
    assert default_max_waiting(1024) == 65_536
