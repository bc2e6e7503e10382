from collections.abc import Iterator

import pytest

from darts_server.caller import Caller, caller
from darts_server.exceptions import InvalidRequest, Overloaded, QuotaReached
from darts_server.serving.admission import Admission, AdmissionLimits

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


def an_admission(engine: Engine, capacity: int | None = CAPACITY, **limits: int) -> Admission:
    return Admission(lambda: engine.unfinished, capacity, AdmissionLimits(**limits))


@pytest.mark.parametrize(("unfinished", "waiting"), [(0, 0), (CAPACITY, 0), (CAPACITY + 3, 3)])
def test_candidates_beyond_the_capacity_wait(engine: Engine, unfinished: int, waiting: int) -> None:
    engine.unfinished = unfinished
    assert (an_admission(engine).waiting, an_admission(engine, None).waiting) == (waiting, 0)


def test_admitted_candidates_count_until_the_engine_counts_them(engine: Engine) -> None:
    admission = an_admission(engine)
    with admission.admit(8) as ticket:
        ticket.resize(12)
        assert admission.waiting == 2
        ticket.mark_started(5)
        engine.unfinished = 5
        assert (admission.waiting, admission.not_in_engine) == (2, 7)
        ticket.mark_started()
        engine.unfinished = 12
        assert (admission.waiting, admission.not_in_engine) == (2, 0)
        ticket.mark_started(1)
        assert admission.not_in_engine == 0
    engine.unfinished = 0
    assert (admission.waiting, admission.unanswered_requests) == (0, 0)


def test_no_more_candidates_wait_than_the_limit(engine: Engine) -> None:
    admission = an_admission(engine, max_waiting=20)
    with pytest.raises(InvalidRequest, match=r"needs 31 candidates, and at most 30 may run and wait") as alone:
        admission.admit(31, "prompts")
    assert alone.value.field == "prompts"
    with admission.admit(29):
        caller.set(Caller())
        with pytest.raises(Overloaded, match=r"19 candidates wait .* with 2 more .* 20 \(--max-queued") as error:
            admission.admit(2)
        assert error.value.retry_after
        with admission.admit(1):
            caller.set(Caller())
            with pytest.raises(Overloaded):
                admission.admit(1)
    engine.unfinished = 30
    with pytest.raises(Overloaded):
        admission.admit(1)
    engine.unfinished = 0
    admission.admit(30)


def test_each_key_has_its_own_quota_and_admins_have_none(engine: Engine) -> None:
    admission = an_admission(engine, max_per_caller=8)
    one = Caller("one")
    other = Caller("other")
    caller.set(one)
    with admission.admit(5):
        again = Caller("one")
        caller.set(again)
        with admission.admit(3):
            late = Caller("one")
            caller.set(late)
            with pytest.raises(QuotaReached, match="8 candidates in flight, and 1 more"):
                admission.admit(1)
            assert isinstance(late.refusal, QuotaReached)
        with pytest.raises(InvalidRequest, match="needs 9 candidates, and a key may have 8") as error:
            admission.admit(9, "prompts")
        assert error.value.field == "prompts"
        for who in (other, Caller(), Caller("root", is_admin=True)):
            caller.set(who)
            admission.admit(8).release()
            assert who.refusal is None
    caller.set(again)
    admission.admit(8)


def test_a_request_whose_prompts_together_exceed_the_quota_is_invalid(engine: Engine) -> None:
    admission = an_admission(engine, max_per_caller=8)
    caller.set(Caller("one"))
    first = admission.admit(6)
    with pytest.raises(InvalidRequest, match="needs 12 candidates"):
        admission.admit(6)
    first.release()
    admission.admit(6)


def test_a_ticket_grows_only_within_the_limits(engine: Engine) -> None:
    admission = an_admission(engine, max_waiting=10, max_per_caller=8)
    caller.set(Caller("one"))
    with admission.admit(4) as ticket:
        ticket.resize(6)
        with pytest.raises(InvalidRequest):
            ticket.resize(9)
        assert (ticket.candidates, admission.not_in_engine) == (6, 6)
        assert [ticket.resize_within_limits(most) for most in (7, 20, 3)] == [7, 8, 3]
        caller.set(Caller("other"))
        with admission.admit(8), admission.admit(0):
            caller.set(Caller())
            with admission.admit(7):
                assert ticket.resize_within_limits(8) == 5
    assert admission.not_in_engine == 0


def test_parts_of_a_ticket_outlive_it_and_can_be_merged(engine: Engine) -> None:
    admission = an_admission(engine, max_per_caller=8)
    who = Caller("one")
    caller.set(who)
    ticket = admission.admit(8)
    part = ticket.split(3)
    assert (ticket.candidates, part.candidates, who.num_candidates) == (5, 3, 5)
    ticket.mark_started()
    ticket.release()
    assert (admission.not_in_engine, admission.unanswered_requests, who.num_candidates) == (3, 0, 0)
    caller.set(Caller("one"))
    with admission.admit(5) as second:
        part.merge(second)
        assert (part.candidates, second.candidates, admission.unanswered_requests) == (8, 0, 1)
        with pytest.raises(QuotaReached):
            admission.admit(1)
    part.release()
    admission.admit(8)


def test_a_caller_sees_its_own_work_and_admins_see_all_work() -> None:
    assert [Caller("one").may_see(owner) for owner in ("one", "other", None)] == [True, False, False]
    assert [Caller().may_see(owner) for owner in ("one", None)] == [False, True]
    assert all(Caller("root", is_admin=True).may_see(owner) for owner in ("one", None, "root"))
