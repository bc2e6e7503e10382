"""Prompts that a trainer gets if more prompts start than it needs, or if the next batch is sampled ahead."""

from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from darts_client import Group, ProtocolError
from darts_client.integrations._ahead import BatchesAhead, Position, rollout_options

START = Position()


class Server:
    """Completes the groups of a random choice of prompts, with ``more`` sometimes more groups than are needed."""

    def __init__(self, seed: int = 0, more: bool = False) -> None:
        self.rng = Random(seed)
        self.more = more
        self.started: list[list[int]] = []

    def request(self, numbers: Sequence[int], prompts: Sequence[Sequence[int]], wanted: int) -> list[Group]:
        assert [number for (number,) in prompts] == list(numbers)
        self.started.append([number for (number,) in prompts])
        count = self.rng.randint(wanted, len(prompts)) if self.more else wanted
        return [Group(None, None, (), place) for place in sorted(self.rng.sample(range(len(prompts)), count))]


def batches_of(
    server: Server, batches: int, position: Position = START, ahead: float = 0.25, **more: Any
) -> BatchesAhead:
    return BatchesAhead(
        islice(count(), position.drawn, None),
        position,
        size=4,
        ahead_share=ahead,
        batches=batches,
        tokenize=lambda numbers: [[number] for number in numbers],
        request=server.request,
        **more,
    )


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("long_rounds", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("ahead", "prefetched"), [(0.25, False), (1.0, False), (0.0, True), (0.5, True)])
def test_every_prompt_is_trained_on_once(
    seed: int, ahead: float, prefetched: bool, long_rounds: bool, more: bool
) -> None:
    server = Server(seed, more)
    batches = batches_of(server, 6, ahead=ahead, long_rounds=long_rounds)
    trained: Counter[int] = Counter()
    for _ in range(6):
        batch = batches.next()
        if prefetched:
            batches.prefetch()
        assert len(batch.prompts) == len(batch.groups) == 4
        assert [[number] for number in batch.prompts] == batch.token_ids
        trained += Counter(batch.prompts)
        left = Counter(range(batch.position.drawn)) - trained
        assert left == Counter(batch.position.pending), "what a checkpoint goes on with"
    assert not batches.is_prefetched
    assert trained == Counter(range(24))
    if not long_rounds and not more:
        assert [len(started) for started in server.started[:4]] == [4 + round(4 * ahead)] * 4
    if not more:
        assert len(server.started[-1]) == 4
    assert batch.position == Position(24, ())
    batches.close()


@pytest.mark.parametrize(
    ("ahead", "batches", "sizes", "long"),
    [
        (1.0, 7, [8, 4, 8, 4, 8, 4, 4], [1, 3, 5]),  # the last batch has as many as there are left
        (0.5, 7, [6, 6, 4, 6, 6, 4, 4], [2, 5]),
        (0.75, 4, [7, 7, 4, 4], [2]),  # the last batch has the two that wait, and the last two new ones
    ],
)
def test_in_long_rounds_unfinished_prompts_wait_until_they_fill_a_batch(
    ahead: float, batches: int, sizes: list[int], long: list[int]
) -> None:
    server = Server(1)
    every = batches_of(server, batches, ahead=ahead, long_rounds=True)
    waiting: tuple[int, ...] = ()
    for number in range(batches):
        position = every.next().position
        started = tuple(server.started[number])
        if number in long:
            assert started == waiting[:4], "the oldest, and no new ones"
        elif number < batches - 1:
            assert not set(started) & set(waiting)
        waiting = position.pending
    assert [len(started) for started in server.started] == sizes
    assert (position.drawn, waiting) == (4 * batches, ())


@pytest.mark.parametrize("stop", range(1, 6))
def test_training_from_a_saved_position_trains_on_the_remaining_prompts(stop: int, tmp_path: Path) -> None:
    first = batches_of(Server(stop), 6)
    trained: Counter[int] = Counter()
    for _ in range(stop):
        batch = first.next()
        first.prefetch()
        trained += Counter(batch.prompts)
    batch.position.save(tmp_path / "position")
    position = Position.load(tmp_path / "position")
    assert position == batch.position
    rest = batches_of(Server(7), 6 - stop, position)
    for _ in range(6 - stop):
        trained += Counter(rest.next().prompts)
    assert trained == Counter(range(24))


def test_a_batch_with_too_few_groups_or_one_twice_is_an_error() -> None:
    for places in ([0, 1, 2], [0, 1, 2, 2]):
        server = Server()
        server.request = lambda numbers, prompts, wanted, places=places: [  # type: ignore[method-assign, misc]  # to answer wrong
            Group(None, None, (), place) for place in places
        ]
        with pytest.raises(ProtocolError, match="not 4 different ones of 5"):
            batches_of(server, 2).next()


def test_groups_of_equal_rewards_fill_up_a_batch_and_are_not_kept_for_the_next() -> None:
    server = Server()
    numbers: list[int] = []

    def request(started: Sequence[int], prompts: Sequence[Sequence[int]], wanted: int) -> list[Group]:
        numbers.extend(started)
        # Two informative groups, and all others with equal rewards.
        return [Group(None, None, (), place, zero_variance=place > 1) for place in range(len(prompts))]

    server.request = request  # type: ignore[method-assign, assignment]  # to say what is informative
    batches = batches_of(server, 2, ahead=1.0)
    first = batches.next()
    assert [group.zero_variance for group in first.groups] == [False, False, True, True]
    assert first.position.pending == (), "prompts of groups with equal rewards were decided"
    second = batches.next()
    assert not set(first.prompts) & set(second.prompts)
    assert len(numbers) == len(set(numbers))


def test_groups_without_rewards_are_not_kept_for_the_next_batch_under_dynamic_sampling() -> None:
    server = Server()

    def request(started: Sequence[int], prompts: Sequence[Sequence[int]], wanted: int) -> list[Group]:
        # The wanted informative groups come first. Half of the others have no rewards.
        unrewarded = [None if place % 2 else True for place in range(len(prompts))]
        return [
            Group(None, None, (), place, zero_variance=False if place < wanted else unrewarded[place])
            for place in range(len(prompts))
        ]

    server.request = request  # type: ignore[method-assign, assignment]  # to say what is informative
    batches = batches_of(server, 3, ahead=1.0, only_informative=True)
    for _ in range(3):
        assert [group.zero_variance for group in batches.next().groups] == [False] * 4


def test_more_pending_prompts_than_the_remaining_batches_need_start_no_new_prompt() -> None:
    server = Server()
    batches = batches_of(server, 1, Position(12, tuple(range(12))))
    assert len(batches.next().prompts) == 4
    assert server.started == [list(range(12))]


def test_the_error_of_a_prefetched_batch_is_raised_by_next() -> None:
    server = Server()
    server.request = lambda numbers, prompts, wanted: 1 / 0  # type: ignore[method-assign, assignment, return-value]  # to fail
    failing = batches_of(server, 2)
    failing.prefetch()
    with pytest.raises(ZeroDivisionError):
        failing.next()


def test_the_policy_is_taken_from_xargs_which_must_have_nothing_else() -> None:
    shaped = {"top_k": 5, "vllm_xargs": {"darts_policy": "darts_cut"}}
    assert rollout_options(shaped) == {"top_k": 5, "policy": "darts_cut"}
    assert rollout_options({"top_k": 5}) == {"top_k": 5}
    with pytest.raises(ValueError, match="vllm_xargs has darts_prompt_key, other"):
        rollout_options({"vllm_xargs": {"other": 1, "darts_prompt_key": "a"}})
