from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_client import Delta, Discard, ProtocolError, TrajectoryEvent
from darts_client._assembly import Assembly, ToldEnd
from darts_client._group_wire import ToldTrajectory

from .transcripts import delta, discard, ended, trajectory


def grow(assembly: Assembly, *where: int, **changes: Any) -> Delta:
    number, index, start, end = where
    return assembly.grow(Delta.model_validate(delta(number, index, start, end, **changes), strict=False))


def keep(assembly: Assembly, number: int, index: int, length: int, **changes: Any) -> TrajectoryEvent:
    return assembly.keep(ToldEnd.model_validate(ended(number, index, length, **changes)))


def drop(assembly: Assembly, number: int, index: int) -> Discard:
    return assembly.discard(Discard.model_validate(discard(number, index, 1)))


def in_group(number: int, index: int, length: int) -> ToldTrajectory:
    return ToldTrajectory.model_validate(trajectory(number, index, length, tokens=False))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 40))
def test_deltas_of_any_sizes_are_put_together_and_cut(sizes: list[int], cut: int) -> None:
    assembly, start = Assembly(True), 0
    for size in sizes:
        grow(assembly, 0, 0, start, start + size)
        start += size
    length = min(cut, start)
    event = keep(assembly, 0, 0, length, cut=length < start)
    expected = (tuple(range(length)), tuple(-0.5 * k for k in range(length)))
    assert (event.token_ids, event.logprobs) == expected
    assert assembly.tokens(0, in_group(0, 0, length)) == expected


def test_candidates_and_groups_grow_side_by_side() -> None:
    assembly = Assembly(False)
    grow(assembly, 0, 0, 0, 2, logprobs=None)
    grow(assembly, 1, 0, 0, 1, logprobs=None)
    grow(assembly, 0, 0, 2, 3, logprobs=None)
    assert keep(assembly, 0, 0, 3).token_ids == (0, 1, 2)
    assert keep(assembly, 1, 0, 1).token_ids == (0,)


def test_a_trajectory_without_tokens_needs_no_delta() -> None:
    assert keep(Assembly(True), 0, 0, 0).token_ids == ()


@pytest.mark.parametrize("start", [1, 3])
def test_a_gap_and_an_overlap_are_refused(start: int) -> None:
    assembly = Assembly(True)
    grow(assembly, 0, 0, 0, 2)
    with pytest.raises(ProtocolError, match=f"starts at {start}, not at 2"):
        grow(assembly, 0, 0, start, 5)


@pytest.mark.parametrize("logprobs", [None, [0.0]])
def test_a_delta_without_its_logprobs_is_refused(logprobs: list[float] | None) -> None:
    with pytest.raises(ProtocolError, match="one logprob for each token"):
        grow(Assembly(True), 0, 0, 0, 2, logprobs=logprobs)


def test_nothing_comes_after_a_candidates_end() -> None:
    assembly = Assembly(True)
    for index in (0, 1):
        grow(assembly, 0, index, 0, 1)
    drop(assembly, 0, 0)
    keep(assembly, 0, 1, 1)
    for again in (
        lambda: grow(assembly, 0, 0, 1, 2),
        lambda: keep(assembly, 0, 0, 1),
        lambda: drop(assembly, 0, 1),
        lambda: grow(assembly, 0, 1, 1, 2),
    ):
        with pytest.raises(ProtocolError, match="after its end"):
            again()


def test_a_trajectory_has_all_tokens_that_were_sent_unless_it_was_cut() -> None:
    assembly = Assembly(True)
    grow(assembly, 0, 0, 0, 4)
    for length, cut in ((3, False), (5, False), (5, True)):
        with pytest.raises(ProtocolError, match=f"has 4 tokens but says {length}"):
            keep(assembly, 0, 0, length, cut=cut)


def test_a_group_has_only_what_was_streamed_as_its_trajectories() -> None:
    assembly = Assembly(True)
    grow(assembly, 0, 0, 0, 1)
    grow(assembly, 0, 1, 0, 1)
    drop(assembly, 0, 1)
    for index in (0, 1, 2):
        with pytest.raises(ProtocolError, match="was not streamed"):
            assembly.tokens(0, in_group(0, index, 1))


def test_a_decided_group_has_no_open_candidate_and_nothing_comes_of_it() -> None:
    assembly = Assembly(True)
    grow(assembly, 0, 0, 0, 1)
    grow(assembly, 1, 0, 0, 1)
    keep(assembly, 0, 0, 1)
    assembly.close(0)
    with pytest.raises(ProtocolError, match="after its end"):
        grow(assembly, 0, 1, 0, 1)
    with pytest.raises(ProtocolError, match="group 1 is decided, but roll-1-1:0 has not ended"):
        assembly.close(1)
