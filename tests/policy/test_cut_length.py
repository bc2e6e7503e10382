"""Deadlines whose cut length limits every group, in worlds with runaways.

All candidates of a cohort start together and get one token a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from numpy.random import Generator, default_rng

from darts_server.group.candidate import Candidate
from darts_server.group.events import Finished, Progress, Started
from darts_server.group.group import Group
from darts_server.group.selection import SelectionRule
from darts_server.policy.deadline import CohortDeadline, Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.types import FinishReason
from examples.tiny_rl.replay import Replay, replay

CAP = 8192
SIZE = 8
RULE = Deadline()
POLICIES = build_policies(Shaping(), RULE)
CUTTING = ["darts_cut", "cap"]


def group(lengths: Iterable[int], rng: Generator) -> list[Candidate]:
    """Return candidates with these lengths and the length limit `CAP`."""
    return [
        Candidate(
            i,
            float(rng.random()),
            tokens=min(length, CAP),
            finish_reason=FinishReason.STOP if length < CAP else FinishReason.LENGTH,
        )
        for i, length in enumerate(lengths)
    ]


Cohort = Sequence[Sequence[Candidate]]


def cohort(runaways: Sequence[float]) -> Cohort:
    """Return 64 prompts with lengths around 300. ``runaways``: share of each prompt's 12 candidates that never end."""
    rng = default_rng(0)
    means = 300 * rng.lognormal(0, 0.3, len(runaways))
    return [
        group(np.where(rng.random(12) < share, CAP, mean * rng.lognormal(0, 0.4, 12)).astype(int), rng)
        for mean, share in zip(means, runaways, strict=True)
    ]


def completion_length(rule: SelectionRule, candidates: Sequence[Candidate]) -> int | None:
    valid = sorted(c.tokens for c in candidates if c.is_valid)
    return valid[rule.completion_place - 1] if len(valid) >= rule.completion_place else None


def deadline_of(rule: SelectionRule, groups: Cohort, how: Deadline) -> tuple[int, int] | None:
    """Return the deadline, and the first step in which it is known."""
    lengths = [completion_length(rule, candidates) for candidates in groups]
    needs = sorted(length for length in lengths if length is not None)
    reported = [how.from_known_lengths(needs[:count], len(groups) - count) for count in range(len(needs) + 1)]
    ends = sorted({*needs, CAP, *(how.cut_length_of(tokens) for tokens in reported if tokens is not None)})
    for step in ends:
        known = [length for length in lengths if length is not None and length <= step]
        # Groups that have ended without a completion length do not count.
        others = len(lengths) - len(known) if step < CAP else 0
        if (tokens := of_cohort(how, known, [step + 1] * others)) is not None:
            return tokens, step
    return None


def of_cohort(how: Deadline, needs: Sequence[int], minimums: Sequence[int | None]) -> int | None:
    groups = CohortDeadline(how, len(needs) + len(minimums))
    for group, tokens in enumerate(needs):
        groups.report_need(group, tokens)
    for group, minimum in enumerate(minimums, start=len(needs)):
        groups.report_minimum(group, minimum)
    return groups.tokens


def steps_of(policy: str, groups: Cohort, how: Deadline = RULE) -> int:
    """Return the steps until the last group is complete.

    The deadline counts as known from the start, because it is known before any candidate reaches the cut length.
    """
    rule = POLICIES[policy].selection_rule(SIZE)
    started = [candidates[: POLICIES[policy].candidates(SIZE)] for candidates in groups]
    found = deadline_of(rule, started, how)
    assert found is not None
    tokens, known_at = found
    limit = how.cut_length_of(tokens)
    assert known_at <= limit
    played = [replay(rule, candidates, tokens, limit) for candidates in started]
    assert all(is_bounded(result, limit) for result in played)
    return max(result.steps for result in played)


def is_bounded(result: Replay, limit: int) -> bool:
    return max(result.lengths) <= limit >= result.steps and len(result.selection) == SIZE


@pytest.mark.parametrize("policy", CUTTING)
def test_a_group_with_seven_valid_and_five_runaways_ends_at_the_cut_length(policy: str) -> None:
    lengths = [*range(300, 510, 30), *[CAP] * 5]
    # If there are eight candidates, three are valid.
    candidates = group(lengths, default_rng(0))[-POLICIES[policy].candidates(SIZE) :]
    rule = POLICIES[policy].selection_rule(SIZE)
    result = replay(rule, candidates, 600, 1200)
    assert is_bounded(result, 1200)
    assert result.steps == 1200
    if policy != "cap":
        without = replay(rule, candidates, 600)
        assert (without.steps, without.generated) == (CAP, 7 * 390 + 5 * CAP)
        assert result.generated == 7 * 390 + 5 * 1200


@pytest.mark.parametrize("policy", CUTTING)
def test_a_group_may_have_only_truncated_candidates(policy: str) -> None:
    candidates = group([CAP] * POLICIES[policy].candidates(SIZE), default_rng(0))
    assert replay(POLICIES[policy].selection_rule(SIZE), candidates, 600, 1200).generated == 1200 * len(candidates)


@pytest.mark.parametrize("policy", CUTTING)
def test_a_cohort_with_runaways_ends_at_the_cut_length_of_its_own_deadline(policy: str) -> None:
    assert steps_of(policy, cohort([0.75] * 12 + [0.05] * 52)) < 0.3 * CAP


@pytest.mark.parametrize("policy", CUTTING)
@pytest.mark.parametrize(("without", "most"), [(17, 0.3), (32, 0.8), (64, 0.9)])
def test_earlier_groups_set_the_deadline_if_over_a_quarter_has_no_completion_length(
    policy: str, without: int, most: float
) -> None:
    how = replace(RULE, recent=400)
    assert steps_of(policy, cohort([1.0] * without + [0.0] * (64 - without)), how) < most * CAP


@pytest.mark.parametrize("policy", CUTTING)
def test_half_the_prompts_may_need_answers_several_times_as_long(policy: str) -> None:
    """Earlier groups had short answers, and there are no rewards. The cut length is beyond all completion lengths."""
    rng = default_rng(0)
    groups = [group((m * rng.lognormal(0, 0.3, 12)).astype(int), rng) for m in [300] * 32 + [1500] * 32]
    rule = POLICIES[policy].selection_rule(SIZE)
    started = [candidates[: POLICIES[policy].candidates(SIZE)] for candidates in groups]
    found = deadline_of(rule, started, replace(RULE, recent=400))
    assert found is not None
    longest = max(n for c in started if (n := completion_length(rule, c)) is not None)
    assert RULE.cut_length_of(found[0]) > longest


@pytest.mark.parametrize(("known", "factor"), [(8, 1.0), (6, 1.0), (4, 1.5**3), (3, 4.0), (0, 4.0)])
def test_a_deadline_of_earlier_groups_is_later_the_fewer_groups_have_a_completion_length(
    known: int, factor: float
) -> None:
    rule = replace(RULE, recent=100, factor=2.0)
    assert rule.from_known_lengths([50] * known, 8 - known) == (100 if known >= 6 else ceil(200 * factor))
    assert rule.from_known_lengths([150] * 4, 4) == ceil(300 * 1.5**3)
    assert RULE.from_known_lengths([50] * 5, 3) is None


def test_the_least_that_a_group_can_need_follows_from_running_candidates() -> None:
    started = Group(rng=default_rng(0))
    started.open(POLICIES["cap"].selection_rule(4), 4)
    started.handle(*(Started(i) for i in range(4)), Finished(0, 5, FinishReason.STOP), Progress(1, 7))
    assert [started.selector.min_nth_shortest_length(n, {2: 9, 3: 2}) for n in range(1, 6)] == [3, 5, 8, 10, None]
    started.handle(Finished(2, 30, FinishReason.LENGTH))
    assert [started.selector.min_nth_shortest_length(n, {}) for n in (3, 4)] == [8, None]


def test_the_cut_length_is_a_factor_rounded_up() -> None:
    assert [replace(RULE, cut_factor=b).cut_length_of(10) for b in (1.0, 1.1, 1.11, 2.0)] == [10, 11, 12, 20]
