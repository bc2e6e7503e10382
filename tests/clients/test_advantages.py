"""The expected gradient of a shaped group is the true one, by enumeration of all that a small policy can generate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest

from darts_client import Group, Trajectory
from darts_client.advantages import unbiased_advantages
from darts_client.tensors import to_tensors
from darts_server.policy.group import Group as Run
from darts_server.policy.group import sampled_from, selection_weights
from darts_server.policy.sampled_tail import CutTail, SampledTail
from darts_server.policy.selection import AllSurvivors, InOrder, SampledSurvivors, SelectionRule
from darts_server.types import DiscardReason
from tests.policy.test_weights import CELLS, Survival, complete, run_with_scores

MAX_TOKENS = 3
STOP_PROBABILITY = np.array([0.35, 0.5, 0.3])
"""Of a policy that at each position either stops or goes on: its parameters are the logits of these."""
CANDIDATES = 4
Rule = SampledTail | CutTail | InOrder


class Outcome:
    """All that the policy can generate: it stops at one of the positions, or reaches the limit."""

    def __init__(self, tokens: int, stopped: bool) -> None:
        self.tokens, self.stopped = tokens, stopped
        ends = np.arange(MAX_TOKENS) == tokens - 1
        going_on = np.arange(MAX_TOKENS) < (tokens - 1 if stopped else tokens)
        self.probability = float(
            np.prod(np.where(going_on, 1 - STOP_PROBABILITY, 1.0)) * (STOP_PROBABILITY[tokens - 1] if stopped else 1)
        )
        self.score = np.where(going_on, -STOP_PROBABILITY, 0.0) + (ends & stopped) * (1 - STOP_PROBABILITY)
        self.reward = {1: 0.2, 2: 1.0, 3: 0.7}[tokens] if stopped else 0.1


OUTCOMES = [*(Outcome(tokens, True) for tokens in range(1, MAX_TOKENS + 1)), Outcome(MAX_TOKENS, False)]


def likelihood(candidates: Sequence[Outcome]) -> float:
    return prod(c.probability for c in candidates)


TRUE = np.sum([o.probability * o.reward * o.score for o in OUTCOMES], axis=0)


def group_of(
    rule: SelectionRule, candidates: Sequence[Outcome], draws: Sequence[float], deadline: int | None = None
) -> tuple[Group, list[int]]:
    """Return the group as a caller gets it, and which candidates are in it."""
    run = complete(rule, [(c.tokens, c.stopped) for c in candidates], draws, deadline)
    weights = selection_weights(run)
    chosen = [c for c in run.candidates if c.selected_as is not None]
    trajectories = tuple(
        Trajectory(k, "", (7,) * c.tokens, None, "stop", selected_as=c.selected_as, weight=weights.get(c.index))
        for k, c in enumerate(chosen)
    )
    count, shortest = len(candidates), rule.num_shortest if rule.samples_rest else None
    group = Group("g", None, trajectories, candidates=count, counted=count, num_shortest=shortest)
    return group, [c.index for c in chosen]


@dataclass(frozen=True, eq=False)
class ShapedGroup:
    probability: float
    candidates: Sequence[Outcome]
    group: Group
    chosen: Sequence[int]

    @property
    def rewards(self) -> list[float]:
        return [self.candidates[i].reward for i in self.chosen]


def orders_of(rule: SelectionRule, count: int) -> list[tuple[float, ...]]:
    """Return draws of the candidates in all orders; one where these do not matter."""
    draws = [i / 10 for i in range(count)]
    return list(permutations(draws)) if rule.samples_rest and rule.size < count else [tuple(draws)]


@cache
def shaped_groups(rule: Rule, count: int = CANDIDATES) -> Sequence[ShapedGroup]:
    """Return all groups that the policy can generate under a rule, and how likely each is."""
    orders = orders_of(rule, count)
    return [
        ShapedGroup(
            prod(c.probability for c in candidates) / len(orders), candidates, *group_of(rule, candidates, draws)
        )
        for candidates in product(OUTCOMES, repeat=count)
        for draws in orders
    ]


Advantages = Callable[[Group, Sequence[float]], Sequence[float]]


def expectation(groups: Iterable[ShapedGroup], advantages: Advantages = unbiased_advantages) -> np.ndarray:
    """Return the expected gradient over all of these groups."""
    total = np.zeros(MAX_TOKENS)
    for shaped in groups:
        for i, advantage in zip(shaped.chosen, advantages(shaped.group, shaped.rewards), strict=True):
            total += shaped.probability * advantage * shaped.candidates[i].score / len(shaped.chosen)
    return total


@pytest.mark.parametrize("baseline", [None, pytest.param(0.4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("rule", "count"),
    [
        (SampledTail(2, 1), 4),
        (SampledTail(1, 1), 3),
        pytest.param(SampledTail(1, 2), 4, marks=pytest.mark.nightly),
        (CutTail(1, 1), 3),
        pytest.param(CutTail(2, 1), 4, marks=pytest.mark.nightly),
        (InOrder(3), 3),
    ],
    ids=str,
)
def test_the_expected_gradient_is_the_true_one(rule: Rule, count: int, baseline: float | None) -> None:
    groups = shaped_groups(rule, count)
    found = expectation(groups, lambda group, rewards: unbiased_advantages(group, rewards, baseline))
    np.testing.assert_allclose(found, TRUE, atol=1e-9)


def pruned_group(probability: float, candidates: Sequence[Outcome], run: Run) -> ShapedGroup:
    weights, chosen = selection_weights(run), [c.index for c in run.candidates if c.selected_as is not None]
    trajectories = tuple(
        Trajectory(k, "", (7,) * candidates[i].tokens, None, "stop", weight=weights[i]) for k, i in enumerate(chosen)
    )
    group = Group("g", None, trajectories, counted=len(candidates), sampled_from=sampled_from(run))
    return ShapedGroup(probability, candidates, group, chosen)


@cache
def pruned_groups(rule: AllSurvivors | SampledSurvivors, seed: int, count: int) -> Sequence[ShapedGroup]:
    """Return all groups of ``count`` candidates, of which some are pruned on their way, and how likely each is."""
    survival = Survival(seed)
    orders = list(permutations(range(count))) if isinstance(rule, SampledSurvivors) else [tuple(range(count))]
    chance = 1 / (CELLS**count * len(orders))
    pruned = []
    for candidates in product(OUTCOMES, repeat=count):
        weight = likelihood(candidates) * chance
        lengths = [(c.tokens, c.stopped) for c in candidates]
        for cells in product(range(CELLS), repeat=count):
            for order in orders:
                draws = [(cell + 0.5) / CELLS for cell in cells]
                run = run_with_scores(rule, lengths, order, draws, survival)
                pruned.append(pruned_group(weight, candidates, run))
    return pruned


@pytest.mark.parametrize(
    ("rule", "count", "seed"),
    [
        (AllSurvivors(1), 3, 1),
        pytest.param(AllSurvivors(1), 3, 2, marks=pytest.mark.nightly),
        (AllSurvivors(2), 2, 3),
        pytest.param(SampledSurvivors(2), 3, 2, marks=pytest.mark.nightly),
        (SampledSurvivors(1), 2, 3),
    ],
    ids=str,
)
def test_after_pruning_the_expected_gradient_is_the_true_one(
    rule: AllSurvivors | SampledSurvivors, count: int, seed: int
) -> None:
    """Also where candidates are kept because the group needs them, and where others decide who may be pruned."""
    np.testing.assert_allclose(expectation(pruned_groups(rule, seed, count)), TRUE, atol=1e-9)


@pytest.mark.parametrize(("count", "doomed", "seed"), [(2, 1, 1), pytest.param(3, 1, 2, marks=pytest.mark.nightly)])
def test_with_a_given_baseline_it_is_the_true_one_if_candidates_fail_after_scores(
    count: int, doomed: int, seed: int
) -> None:
    """Over all sets of ``doomed`` candidates; a group of which nothing is left counts as 0.

    With the mean of the others for a baseline it is not, if survival depends on them.
    """
    survival, groups, corrected = Survival(seed), list[ShapedGroup](), 0
    sets = list(combinations(range(count), doomed))
    for failing, candidates in product(sets, product(OUTCOMES, repeat=count)):
        lengths = [(9, True) if i in failing else (c.tokens, c.stopped) for i, c in enumerate(candidates)]
        chance = prod(c.probability for c in candidates) / CELLS**count / len(sets)
        for cells in product(range(CELLS), repeat=count):
            draws = [(cell + 0.5) / CELLS for cell in cells]
            fails_at = dict.fromkeys(failing, 3)
            run = run_with_scores(AllSurvivors(1), lengths, range(count), draws, survival, failing=fails_at)
            pruned = pruned_group(chance, candidates, run)
            if not pruned.chosen:
                continue
            failed = [c.survival for c in run.candidates if c.reason is DiscardReason.FAILED]
            corrected += any(each < 1 for each in failed)
            groups.append(replace(pruned, group=replace(pruned.group, counted=count - len(failed))))
    assert corrected
    given = expectation(groups, lambda group, rewards: unbiased_advantages(group, rewards, 0.4))
    np.testing.assert_allclose(given, TRUE, atol=1e-9)
    assert min(expectation(groups) / TRUE) == pytest.approx(1 if count == 2 else 0.970, abs=5e-4)


def test_others_of_a_sample_estimate_the_mean_of_all_survivors_whichever_are_sampled() -> None:
    rewards, weights, count, size = [0.2, 1.0, 0.7, 0.1], [1.0, 2.0, 4.0, 2.0], 6, 3
    survivors = range(len(rewards))
    for one in survivors:
        baselines = []
        for sample in (each for each in combinations(survivors, size) if one in each):
            sampled = group([weights[i] * len(survivors) / size for i in sample], sampled_from=len(survivors))
            advantages = unbiased_advantages(replace(sampled, counted=count), [rewards[i] for i in sample])
            own_weight = weights[one] * len(survivors) / size
            baselines.append(rewards[one] - advantages[sample.index(one)] * count / (size * own_weight))
        others = sum(weights[i] * rewards[i] for i in survivors if i != one)
        assert np.mean(baselines) == pytest.approx(others / (count - 1))


def cut(outcome: Outcome, limit: float) -> Outcome:
    """Return what is left of a trajectory below a length limit."""
    return outcome if outcome.tokens <= limit else Outcome(int(limit), False)


@pytest.mark.parametrize("deadline", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("rule", [CutTail(2, 1), CutTail(2, 2, last_needed=2)], ids=["darts_cut", "cap"])
def test_with_a_cut_it_is_that_of_the_expected_reward_below_a_limit_that_the_others_set(
    rule: CutTail, deadline: int
) -> None:
    """A trajectory is cut at the deadline or, if that is longer, at the M-th shortest of the others."""
    orders = orders_of(rule, CANDIDATES)
    true, total = np.zeros(MAX_TOKENS), np.zeros(MAX_TOKENS)
    for others in product(OUTCOMES, repeat=CANDIDATES - 1):
        valid = sorted(o.tokens for o in others if o.stopped)
        enough = len(valid) >= rule.completion_place
        limit = max(deadline, valid[rule.completion_place - 1]) if enough else MAX_TOKENS
        for one in OUTCOMES:
            left = cut(one, limit)
            true += prod(o.probability for o in others) * one.probability * left.reward * left.score
    for candidates in product(OUTCOMES, repeat=CANDIDATES):
        probability = prod(c.probability for c in candidates) / len(orders)
        for draws in orders:
            group, chosen = group_of(rule, candidates, draws, deadline)
            returned = [cut(candidates[i], len(t.token_ids)) for i, t in zip(chosen, group.trajectories, strict=True)]
            advantages = unbiased_advantages(group, [one.reward for one in returned])
            for one, advantage in zip(returned, advantages, strict=True):
                total += probability * advantage * one.score / len(chosen)
    np.testing.assert_allclose(total, true, atol=1e-9)


def test_without_weights_the_gradient_is_biased() -> None:
    groups = shaped_groups(SampledTail(1, 1), 3)
    gradient = expectation(groups, lambda _, rewards: [r - sum(rewards) / len(rewards) for r in rewards])
    scaled = gradient / np.linalg.norm(gradient) * np.linalg.norm(TRUE)
    assert np.linalg.norm(scaled - TRUE) > 0.1 * np.linalg.norm(TRUE)


def group(weights: Sequence[float | None], **more: Any) -> Group:
    trajectories = tuple(Trajectory(k, "", (1,), None, "stop", weight=weight) for k, weight in enumerate(weights))
    return Group("g", None, trajectories, number=3, counted=len(weights), **more)


def test_groups_without_weights_and_wrong_numbers_of_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="group 3 have no weights"):
        unbiased_advantages(group([1.0, None]), [1.0, 0.0])
    with pytest.raises(ValueError, match="group 3 has 2 trajectories, got 1 values"):
        unbiased_advantages(group([1.0, 1.0]), [1.0])


def test_tensors_have_weights_and_unbiased_advantages() -> None:
    tensors = to_tensors([group([1.0, 1.0])], [[1.0, 0.0]], advantages="unbiased")
    assert tensors.weights is not None
    assert tensors.advantages is not None
    assert tensors.weights.tolist() == [1.0, 1.0]
    assert tensors.advantages.tolist() == [1.0, -1.0]
    assert to_tensors([group([1.0, None])], [[1.0, 0.0]]).weights is None


def test_a_group_may_have_a_baseline_that_was_known_before() -> None:
    groups = [group([1.0, 1.0], earlier_pass_rate=0.25), group([1.0, 1.0])]
    baselines = [each.earlier_pass_rate for each in groups]
    tensors = to_tensors(groups, [[1.0, 0.0]] * 2, advantages="unbiased", baselines=baselines)
    assert tensors.advantages is not None
    assert tensors.advantages.tolist() == [0.75, -0.25, 1.0, -1.0]
    with pytest.raises(ValueError, match="baselines must be 2 numbers, one for each group, got 1"):
        to_tensors(groups, [[1.0, 0.0]] * 2, advantages="unbiased", baselines=[0.5])
    with pytest.raises(ValueError, match="baselines need"):
        to_tensors(groups, [[1.0, 0.0]] * 2, baselines=baselines)
