"""The expected gradient of a shaped group is the true gradient, by enumeration of all answers of a small policy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest

from darts_client import Group, Trajectory
from darts_client.advantages import unbiased_advantages
from darts_client.integrations._weighting import weighted_advantages
from darts_client.tensors import to_tensors
from darts_server.group.group import Group as Run
from darts_server.group.group import count_sampling_pool, selection_weights
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, InOrder, SampledSurvivors
from tests.group.test_weights import CELLS, Survival, complete, run_with_scores

MAX_TOKENS = 3
STOP_PROBABILITY = np.array([0.35, 0.5, 0.3])
"""Logits of a policy that stops or continues at each position."""
CANDIDATES = 4
DRAWS = [(cell + 0.5) / CELLS for cell in range(CELLS)]
Rule = SampledTail | CutTail | InOrder


class Outcome:
    """All that the policy can generate: it stops at one of the positions, or reaches the limit."""

    def __init__(self, tokens: int, stopped: bool) -> None:
        self.tokens = tokens
        self.stopped = stopped
        ends = np.arange(MAX_TOKENS) == tokens - 1
        going_on = np.arange(MAX_TOKENS) < (tokens - 1 if stopped else tokens)
        self.probability = float(
            np.prod(np.where(going_on, 1 - STOP_PROBABILITY, 1.0)) * (STOP_PROBABILITY[tokens - 1] if stopped else 1)
        )
        self.score = np.where(going_on, -STOP_PROBABILITY, 0.0) + (ends & stopped) * (1 - STOP_PROBABILITY)
        self.reward = {1: 0.2, 2: 1.0, 3: 0.7}[tokens] if stopped else 0.1


OUTCOMES = [*(Outcome(tokens, True) for tokens in range(1, MAX_TOKENS + 1)), Outcome(MAX_TOKENS, False)]
TRUE = np.sum([o.probability * o.reward * o.score for o in OUTCOMES], axis=0)


@dataclass(frozen=True, eq=False)
class ShapedGroup:
    probability: float
    candidates: Sequence[Outcome]
    group: Group
    chosen: Sequence[int]


def shaped(probability: float, candidates: Sequence[Outcome], run: Run) -> ShapedGroup:
    """Return the group of the caller, and the indices of its candidates."""
    weights, count = selection_weights(run), len(candidates)
    chosen = [c for c in run.candidates if c.selected_as is not None]
    ranks = {c.index: rank for rank, c in enumerate(sorted(chosen, key=lambda c: (c.tokens, c.index)))}
    trajectories = tuple(
        Trajectory(
            k,
            "",
            (7,) * c.tokens,
            None,
            "stop",
            rank=ranks[c.index],
            selected_as=c.selected_as,
            weight=weights.get(c.index),
        )
        for k, c in enumerate(chosen)
    )
    shortest = run.rule.num_shortest if run.rule.samples_rest else None
    group = Group(
        "g", None, trajectories, num_eligible=count, num_shortest=shortest, sampled_from=count_sampling_pool(run)
    )
    return ShapedGroup(probability, candidates, group, [c.index for c in chosen])


def lengths_of(candidates: Sequence[Outcome]) -> list[tuple[int, bool]]:
    return [(c.tokens, c.stopped) for c in candidates]


def shaped_groups(rule: Rule, count: int, deadline: int | None = None) -> Iterator[ShapedGroup]:
    """Yield all groups that the policy can generate under a rule, with their probabilities."""
    draws = [i / 10 for i in range(count)]
    # In all orders, or in one order if the order does not matter.
    orders = list(permutations(draws)) if rule.samples_rest and rule.size < count else [tuple(draws)]
    for candidates in product(OUTCOMES, repeat=count):
        chance = prod(c.probability for c in candidates) / len(orders)
        for order in orders:
            yield shaped(chance, candidates, complete(rule, lengths_of(candidates), order, deadline))


def expectation(
    groups: Iterable[ShapedGroup],
    advantages: Callable[[Group, Sequence[float]], Sequence[float]] = unbiased_advantages,
) -> np.ndarray:
    """Return the expected gradient over all groups."""
    total = np.zeros(MAX_TOKENS)
    for each in groups:
        rewards = [each.candidates[i].reward for i in each.chosen]
        for i, advantage in zip(each.chosen, advantages(each.group, rewards), strict=True):
            total += each.probability * advantage * each.candidates[i].score / len(each.chosen)
    return total


def test_the_gradient_is_the_true_one_also_if_a_group_compares_seconds_and_slow_sessions_have_few_tokens() -> None:
    def turned(group: Group, rewards: Sequence[float]) -> Sequence[float]:
        slow = [replace(t, token_ids=(7,) * (MAX_TOKENS + 1 - t.length)) for t in group.trajectories]
        return unbiased_advantages(replace(group, trajectories=tuple(slow)), rewards)

    np.testing.assert_allclose(expectation(shaped_groups(SampledTail(2, 1), 4), turned), TRUE, atol=1e-12)


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


def pruned_groups(rule: AllSurvivors | SampledSurvivors, seed: int, count: int) -> Iterator[ShapedGroup]:
    """Yield all groups of ``count`` candidates, some pruned while they run, with their probabilities."""
    survival = Survival(seed)
    orders = list(permutations(range(count))) if isinstance(rule, SampledSurvivors) else [tuple(range(count))]
    for candidates in product(OUTCOMES, repeat=count):
        chance = prod(c.probability for c in candidates) / CELLS**count / len(orders)
        for draws in product(DRAWS, repeat=count):
            for order in orders:
                run = run_with_scores(rule, lengths_of(candidates), order, draws, survival)
                yield shaped(chance, candidates, run)


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
    """It holds if the group needs candidates, and if others decide which candidates may be pruned."""
    np.testing.assert_allclose(expectation(pruned_groups(rule, seed, count)), TRUE, atol=1e-9)


def test_others_of_a_sample_estimate_the_mean_of_all_survivors_whichever_are_sampled() -> None:
    rewards, weights, count, size = [0.2, 1.0, 0.7, 0.1], [1.0, 2.0, 4.0, 2.0], 6, 3
    survivors = range(len(rewards))
    for one in survivors:
        baselines = []
        for sample in (each for each in combinations(survivors, size) if one in each):
            sampled = group([weights[i] * len(survivors) / size for i in sample], sampled_from=len(survivors))
            advantages = unbiased_advantages(replace(sampled, num_eligible=count), [rewards[i] for i in sample])
            own_weight = weights[one] * len(survivors) / size
            baselines.append(rewards[one] - advantages[sample.index(one)] * count / (size * own_weight))
        others = sum(weights[i] * rewards[i] for i in survivors if i != one)
        assert np.mean(baselines) == pytest.approx(others / (count - 1))


def cut(outcome: Outcome, limit: float) -> Outcome:
    """Return a trajectory cut at a length limit."""
    return outcome if outcome.tokens <= limit else Outcome(int(limit), False)


@pytest.mark.parametrize("deadline", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("rule", [CutTail(2, 1), CutTail(2, 2, completion_rank=2)], ids=["darts_cut", "cap"])
def test_with_a_cut_the_gradient_is_that_of_the_expected_reward_below_a_limit_that_the_others_set(
    rule: CutTail, deadline: int
) -> None:
    """A trajectory is cut at the deadline or, if that is longer, at the M-th shortest of the others."""
    true, total = np.zeros(MAX_TOKENS), np.zeros(MAX_TOKENS)
    for others in product(OUTCOMES, repeat=CANDIDATES - 1):
        valid = sorted(o.tokens for o in others if o.stopped)
        enough = len(valid) >= rule.completion_place
        limit = max(deadline, valid[rule.completion_place - 1]) if enough else MAX_TOKENS
        for one in OUTCOMES:
            left = cut(one, limit)
            true += prod(o.probability for o in others) * one.probability * left.reward * left.score
    for each in shaped_groups(rule, CANDIDATES, deadline):
        pairs = zip(each.chosen, each.group.trajectories, strict=True)
        returned = [cut(each.candidates[i], trajectory.length) for i, trajectory in pairs]
        advantages = unbiased_advantages(each.group, [one.reward for one in returned])
        for one, advantage in zip(returned, advantages, strict=True):
            total += each.probability * advantage * one.score / len(returned)
    np.testing.assert_allclose(total, true, atol=1e-9)


def test_without_weights_the_gradient_is_biased() -> None:
    groups = shaped_groups(SampledTail(1, 1), 3)
    gradient = expectation(groups, lambda _, rewards: [r - sum(rewards) / len(rewards) for r in rewards])
    scaled = gradient / np.linalg.norm(gradient) * np.linalg.norm(TRUE)
    assert np.linalg.norm(scaled - TRUE) > 0.1 * np.linalg.norm(TRUE)


def group(weights: Sequence[float | None], **more: Any) -> Group:
    trajectories = tuple(Trajectory(k, "", (1,), None, "stop", weight=weight) for k, weight in enumerate(weights))
    return Group("g", None, trajectories, number=3, num_eligible=len(weights), **more)


def test_groups_without_weights_and_wrong_numbers_of_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="group 3 have no weights"):
        unbiased_advantages(group([1.0, None]), [1.0, 0.0])
    with pytest.raises(ValueError, match="group 3 has 2 trajectories, got 1 values"):
        unbiased_advantages(group([1.0, 1.0]), [1.0])


def test_tensors_have_weights_and_unbiased_advantages_also_with_a_baseline_that_was_known_before() -> None:
    groups = [group([1.0, 1.0], earlier_pass_rate=0.25), group([1.0, 1.0])]
    baselines = [each.earlier_pass_rate for each in groups]
    tensors = to_tensors(groups, [[1.0, 0.0]] * 2, advantages="unbiased", baselines=baselines)
    assert tensors.weights is not None
    assert tensors.advantages is not None
    assert tensors.weights.tolist() == [1.0] * 4
    assert tensors.advantages.tolist() == [0.75, -0.25, 1.0, -1.0]
    with pytest.raises(ValueError, match="baselines must be 2 numbers, one for each group, got 1"):
        to_tensors(groups, [[1.0, 0.0]] * 2, advantages="unbiased", baselines=[0.5])
    with pytest.raises(ValueError, match="baselines need"):
        to_tensors(groups, [[1.0, 0.0]] * 2, baselines=baselines)
    assert to_tensors([group([1.0, None])], [[1.0, 0.0]]).weights is None


@pytest.mark.parametrize("scale", [True, False])
def test_a_batch_without_groups_has_no_advantages(scale: bool) -> None:
    assert weighted_advantages([], [], scale=scale) == []
