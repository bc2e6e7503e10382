"""Sessions of agents: turns, rows to train on, and the end."""

import tracemalloc
from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import IllegalMove
from darts_server.group import session as session_module
from darts_server.group.session import MAX_TOOL_INTERVALS, FinishedTurn, Row, Session
from darts_server.records import append_spans
from darts_server.types import SessionEnd


def turn(prompt: list[int], answer: list[int], version: int = 0) -> FinishedTurn:
    return FinishedTurn(prompt, answer, [-float(token) for token in answer], ((version, len(answer)),))


def run(session: Session, *turns: FinishedTurn) -> None:
    for each in turns:
        session.begin_turn(0.0)
        session.end_turn(0.0, len(each.token_ids), each)


def masks(session: Session) -> list[tuple[list[int], list[int]]]:
    return [(row.token_ids.tolist(), list(row.mask)) for row in session.rows]


def test_turns_whose_prompts_begin_with_all_earlier_tokens_make_one_row() -> None:
    session = Session(0)
    run(session, turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], version=2))
    assert masks(session) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])]
    row = session.rows[0]
    assert row.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert row.spans == ((0, 2), (2, 1))
    assert (session.turns, session.tokens, session.prompt_tokens) == (2, 3, 7)


def test_a_rewritten_history_begins_a_row_of_its_own() -> None:
    session = Session(0)
    run(session, turn([1, 2], [3, 4]), turn([1, 2, 9], [5]), turn([1, 2, 3, 4, 7], [8]))
    # The last turn continues the first row again.
    assert masks(session) == [([1, 2, 3, 4, 7, 8], [0, 0, 1, 1, 0, 1]), ([1, 2, 9, 5], [0, 0, 0, 1])]


def test_two_turns_at_once_are_two_rows() -> None:
    session = Session(0)
    session.begin_turn(0.0)
    session.begin_turn(0.0)
    session.end_turn(1.0, 1, turn([1], [2]))
    session.end_turn(1.0, 1, turn([1], [3]))
    assert masks(session) == [([1, 2], [0, 1]), ([1, 3], [0, 1])]
    assert session.row_tokens == 4


def test_an_unanswered_turn_counts_in_the_length_but_is_in_no_row() -> None:
    session = Session(0)
    session.begin_turn(0.0)
    session.end_turn(1.0, 5)
    run(session, turn([1], [2]))
    assert (session.turns, session.tokens) == (1, 6)
    assert masks(session) == [([1, 2], [0, 1])]


def test_tool_time_is_the_time_without_a_running_turn() -> None:
    session = Session(0)
    assert session.seconds(5.0) == 0.0
    session.begin_turn(10.0)
    session.begin_turn(11.0)
    session.end_turn(12.0, 1, turn([1], [2]))
    session.end_turn(14.0, 1, turn([1], [3]))
    session.begin_turn(17.0)
    assert session.tool_seconds == 3.0
    session.end_turn(18.0, 1)
    assert session.seconds(20.0) == 10.0
    session.end(SessionEnd.FINISHED, 21.0)
    assert session.seconds(30.0) == 11.0


def test_tool_time_is_kept_as_intervals_that_end_with_the_next_turn_or_with_the_session() -> None:
    session = Session(0)
    assert session.tool_since is None
    assert session.tool_times().tolist() == []
    session.begin_turn(10.0)
    assert session.tool_since is None
    session.end_turn(12.0, 1)
    assert session.tool_since == 12.0
    assert session.tool_times().tolist() == [12.0], "the tool runs now"
    session.begin_turn(15.0)
    assert session.tool_times().tolist() == [12.0, 15.0]
    session.end_turn(16.0, 1)
    session.end(SessionEnd.FINISHED, 18.0)
    assert session.tool_since is None
    assert session.tool_times().tolist() == [12.0, 15.0, 16.0, 18.0]
    assert session.tool_seconds == 3.0, "the seconds after the last turn are between no turns"


def test_a_session_that_ends_in_a_turn_or_before_its_first_has_no_tool_time() -> None:
    unused = Session(0)
    unused.end(SessionEnd.SILENT, 5.0)
    assert unused.tool_times().tolist() == []
    stopped = Session(1)
    stopped.begin_turn(1.0)
    stopped.end(SessionEnd.STOPPED, 5.0)
    stopped.end_turn(6.0, 3)
    assert stopped.tool_times().tolist() == []


def test_the_first_intervals_of_tool_time_are_kept_and_count_in_the_memory() -> None:
    session = Session(0)
    turns = MAX_TOOL_INTERVALS + 10
    for number in range(turns):
        session.begin_turn(2.0 * number)
        session.end_turn(2.0 * number + 1, 1)
    times = session.tool_times()
    assert len(times) == 2 * MAX_TOOL_INTERVALS + 1, "and the present interval"
    assert times[-3:].tolist() == [2.0 * MAX_TOOL_INTERVALS - 1, 2.0 * MAX_TOOL_INTERVALS, 2.0 * turns - 1]
    assert session.tool_seconds == turns - 1
    assert session.size_bytes == 16 * MAX_TOOL_INTERVALS


def test_a_session_ends_once_and_has_no_turn_afterwards() -> None:
    session = Session(0)
    assert not session.is_over
    session.end(SessionEnd.STOPPED, 1.0)
    assert session.is_over
    with pytest.raises(IllegalMove, match="stopped already"):
        session.end(SessionEnd.FINISHED, 2.0)
    with pytest.raises(IllegalMove, match="is over"):
        session.begin_turn(2.0)
    with pytest.raises(IllegalMove, match="no running turn"):
        session.end_turn(2.0, 1)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, []),
        (1, [([1, 2], [0, 1])]),
        (2, [([1, 2, 3], [0, 1, 1])]),
        (3, [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])]),
        (4, [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]), ([9, 6], [0, 1])]),
        (9, [([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]), ([9, 6, 7], [0, 1, 1])]),
    ],
)
def test_a_cut_keeps_the_first_generated_tokens(tokens: int, expected: list[tuple[list[int], list[int]]]) -> None:
    session = Session(0)
    run(session, turn([1], [2, 3]), turn([1, 2, 3, 4], [5], version=1), turn([9], [6, 7], version=1))
    session.cut(tokens)
    assert masks(session) == expected
    for row in session.rows:
        assert sum(count for _, count in row.spans) == row.num_generated
        assert len(row.logprobs) == len(row.token_ids)


def test_a_session_that_is_not_returned_frees_its_rows() -> None:
    session = Session(0)
    run(session, turn(list(range(1000)), [2]), turn([3], [4]))
    assert session.size_bytes > 4 * 1000
    session.drop_rows()
    assert (session.rows, session.row_tokens, session.tokens) == ([], 0, 2)
    assert session.size_bytes == 16, "the interval of tool time is left"


def test_spans_of_later_tokens_are_appended() -> None:
    assert append_spans((), ((1, 2),)) == ((1, 2),)
    assert append_spans(((1, 2),), ((1, 1), (3, 4))) == ((1, 3), (3, 4))
    assert Row().num_generated == 0


class PlainRow:
    """A row as lists of tokens, masks and log-probs, without shared blocks."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int, float]] = []

    def extend(self, each: FinishedTurn) -> None:
        self.tokens += [(token, 0, 0.0) for token in each.prompt_token_ids[len(self.tokens) :]]
        self.tokens += [(token, 1, logprob) for token, logprob in zip(each.token_ids, each.logprobs, strict=True)]


def add_plainly(rows: list[PlainRow], each: FinishedTurn) -> None:
    prompt = list(each.prompt_token_ids)
    for row in reversed(rows):
        history = [token for token, _, _ in row.tokens]
        if prompt[: len(history)] == history:
            row.extend(each)
            return
    rows.append(PlainRow())
    rows[-1].extend(each)


def cut_plainly(rows: list[PlainRow], generated: int) -> list[PlainRow]:
    kept = []
    for row in rows:
        places = [place for place, (_, mask, _) in enumerate(row.tokens) if mask]
        if generated <= 0:
            break
        if len(places) > generated:
            del row.tokens[places[generated - 1] + 1 :]
        kept.append(row)
        generated -= len(places)
    return kept


@given(data=st.data())
def test_rows_that_share_blocks_are_the_rows_that_share_nothing(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 1), max_size=9)
    session = Session(0)
    plain: list[PlainRow] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "BLOCK_TOKENS", 3)
        for _ in range(data.draw(st.integers(0, 8))):
            # The harness goes on from a part of a row, or from all of it.
            history = data.draw(st.sampled_from([[], *([token for token, _, _ in row.tokens] for row in plain)]))
            kept = data.draw(st.sampled_from([len(history), data.draw(st.integers(0, len(history)))]))
            each = turn(history[:kept] + data.draw(tokens), data.draw(tokens))
            run(session, each)
            add_plainly(plain, each)
            assert session.row_tokens == sum(len(row.tokens) for row in plain)
        if data.draw(st.booleans()):
            generated = data.draw(st.integers(0, 30))
            session.cut(generated)
            plain = cut_plainly(plain, generated)
        found = [list(zip(row.token_ids, row.mask, row.logprobs, strict=True)) for row in session.rows]
        assert found == [row.tokens for row in plain]
        assert [len(row) for row in session.rows] == [len(row.tokens) for row in plain]
        assert session.row_tokens == sum(len(row.tokens) for row in plain)
        for row in session.rows:
            assert row.num_generated == sum(row.mask) == sum(count for _, count in row.spans)
        session.drop_rows()
        assert (session.rows, session.row_tokens) == ([], 0)
        assert session.size_bytes <= 8 * len(session.tool_times()), "only tool times are left"


@pytest.mark.parametrize(
    ("keeps_history", "limit"),
    # A token id has 4 bytes. A generated token has 4 bytes more, and these are a twentieth of the tokens of a row.
    [(False, 4.8), (True, 0.5)],
)
def test_a_rewriting_session_takes_few_bytes_per_token_and_counts_them(keeps_history: bool, limit: float) -> None:
    rng = Random(1)

    def some(count: int) -> "array[int]":
        return array("i", rng.randbytes(4 * count))

    session = Session(0)
    tracemalloc.start()
    try:
        history = some(10_000)
        for _ in range(60):
            answer = some(500)
            run(session, FinishedTurn(history, answer, [-1.0] * len(answer), ((0, len(answer)),)))
            # Some templates drop the reasoning of the last answer, and others summarise the whole history.
            history = history + answer[250:] + some(150) if keeps_history else some(10_000)
        del history, answer
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(session.rows) == 60
    assert used < limit * session.row_tokens
    assert used <= session.size_bytes < 1.2 * used
