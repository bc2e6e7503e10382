"""How far the expected gradient of each policy's groups is from the true one, by enumeration on two toy policies.

    python -m benchmarks.gradient_bias

A toy policy stops or goes on after each of three tokens; its parameters are the logits of that. The expectation is over
all that the candidates of a group can be, and over all draws of the selection. The true gradient is that of the mean
reward of plain samples, without any deadline. The relative bias is the length of the difference from it, relative to
the true gradient's length; the cosine is that of the angle between both.

Advantages: "group mean" is (r - mean) M / (M - 1) of the returned rewards, which is exact for plain samples. "weighted"
is weight * (r - weighted mean), the correction that is nearly right. "exact" is `unbiased_advantages` of the client.
Truncated answers earn 0.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, combinations_with_replacement, permutations, product
from math import factorial, prod

import numpy as np
from numpy.typing import NDArray

from darts_client import Group, Trajectory
from darts_client.advantages import unbiased_advantages
from darts_server.policy.deadline import Deadline
from darts_server.policy.events import DeadlineSet, Finished, Scored, Started
from darts_server.policy.group import Group as Run
from darts_server.policy.group_weights import selection_weights
from darts_server.policy.named_policies import build_policies
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.replay import RecordedDraws
from darts_server.policy.selection.quality_rules import AllSurvivors
from darts_server.policy.selection.rules import InOrder, SelectionRule, Shortest
from darts_server.policy.selection.tail_rules import LongestTail
from darts_server.policy.shaping import Shaping
from darts_server.types import FinishReason

Floats = NDArray[np.float64]

MAX_TOKENS = 3
SIZE, CANDIDATES = 3, 5
"""M and M' of policies that select by length: K = 2, L = 1."""
PRUNED_SIZE, PRUNED_CANDIDATES = 2, 4
"""Of policies that prune: a keep ratio of a half."""
DEADLINE = 2
LATE = 2
"""So many candidates of a group, and so many tokens, by which these start later: `first_finish` under load."""


class Answer:
    """What the toy policy can generate: it stops after so many tokens, or is truncated there."""

    def __init__(self, toy: "Toy", tokens: int, stopped: bool) -> None:
        self.tokens, self.stopped = tokens, stopped
        stop = np.array(toy.stop)
        places = np.arange(MAX_TOKENS)
        goes_on = places < (tokens - 1 if stopped else tokens)
        self.probability = float(np.prod(np.where(goes_on, 1 - stop, 1.0)) * (stop[tokens - 1] if stopped else 1))
        self.score: Floats = np.where(goes_on, -stop, 0.0) + ((places == tokens - 1) & stopped) * (1 - stop)
        self.reward = toy.rewards[tokens - 1] if stopped else 0.0


@dataclass(frozen=True)
class Toy:
    """``stop``: probability to stop after each token, if not before. ``rewards``: of answers of so many tokens."""

    stop: tuple[float, float, float]
    rewards: tuple[float, float, float]

    @cached_property
    def answers(self) -> list[Answer]:
        ends = [Answer(self, tokens, True) for tokens in range(1, MAX_TOKENS + 1)]
        return [*ends, Answer(self, MAX_TOKENS, False)]

    @cached_property
    def gradient(self) -> Floats:
        """The true one."""
        true: Floats = np.sum([a.probability * a.reward * a.score for a in self.answers], axis=0)
        return true

    def returned(self, answer: Answer, tokens: int) -> Answer:
        """Return what is left of an answer of which so many tokens are returned."""
        return answer if answer.tokens == tokens else Answer(self, tokens, False)


TOYS = {
    "long ones are wrong": Toy((0.35, 0.5, 0.3), (0.9, 0.6, 0.2)),
    "long ones are right": Toy((0.35, 0.5, 0.3), (0.2, 0.6, 0.9)),
}


@dataclass(frozen=True)
class Returned:
    """A group as its trainer gets it, with its ``probability``. ``answers``: in the order of its trajectories."""

    probability: float
    group: Group
    answers: Sequence[Answer]


Groups = Callable[[Toy], Iterator[Returned]]
Advantages = Callable[[Group, Sequence[float]], Sequence[float]]


# --- groups ------------------------------------------------------------------


def selected_by_length(
    rule: SelectionRule, count: int = CANDIDATES, deadline: int | None = None, late: int = 0
) -> Groups:
    """Return all groups of a rule without scores. ``late``: so many candidates start `LATE` tokens after the others."""
    draws = list(permutations([i / 10 for i in range(count)])) if rule.samples_rest else [(0.0,) * count]
    cases = list(product(draws, combinations(range(count), late)))

    def groups(toy: Toy) -> Iterator[Returned]:
        # Candidates are exchangeable, so one order of them stands for all.
        for chosen in combinations_with_replacement(range(len(toy.answers)), count):
            answers = [toy.answers[i] for i in chosen]
            orders = factorial(count) // prod(map(factorial, Counter(chosen).values()))
            probability = orders * prod(a.probability for a in answers) / len(cases)
            for tail_draws, starts_late in cases:
                run = _open(rule, count, tail_draws)
                if deadline is not None:
                    run.handle(DeadlineSet(deadline))
                _finish(run, answers, starts_late)
                yield _returned(run, rule, toy, answers, probability)

    return groups


def pruned(rule: SelectionRule, count: int = PRUNED_CANDIDATES) -> Groups:
    """Return all groups of a rule whose candidates are scored after their first token, by scores that are right."""

    def groups(toy: Toy) -> Iterator[Returned]:
        going_on = [a for a in toy.answers if a.tokens > 1]
        curve = Pruning().fit([a.reward for a in going_on], [a.probability for a in going_on])
        for answers in product(toy.answers, repeat=count):
            survival = [curve.survival(a.reward) if a.tokens > 1 else 1.0 for a in answers]
            for kept in product(*((True,) if p == 1 else (True, False) for p in survival)):
                chances = [p if k else 1 - p for p, k in zip(survival, kept, strict=True)]
                run = _open(rule, count, [0.0] * count, [0.0 if k else p for p, k in zip(survival, kept, strict=True)])
                for i, answer in enumerate(answers):
                    if answer.tokens > 1:
                        run.handle(Scored(i, answer.reward, survival[i], 1))
                _finish(run, answers)
                yield _returned(run, rule, toy, answers, prod(a.probability for a in answers) * prod(chances))

    return groups


def _open(rule: SelectionRule, count: int, draws: Sequence[float], survival_draws: Sequence[float] = ()) -> Run:
    rng, survival_rng = RecordedDraws(draws), RecordedDraws(survival_draws) if survival_draws else None
    run = Run(rng=rng, survival_rng=survival_rng, max_replacements=0)
    run.open(rule, count)
    run.handle(*(Started(i) for i in range(count)))
    return run


def _finish(run: Run, answers: Sequence[Answer], late: Sequence[int] = ()) -> None:
    """Let candidates finish in the order in which they would."""
    for i in sorted(range(len(answers)), key=lambda i: (answers[i].tokens + LATE * (i in late), i)):
        if run.candidates[i].running:
            reason = FinishReason.STOP if answers[i].stopped else FinishReason.LENGTH
            run.handle(Finished(i, answers[i].tokens, reason))


def _returned(run: Run, rule: SelectionRule, toy: Toy, answers: Sequence[Answer], probability: float) -> Returned:
    weights, chosen = selection_weights(run), [c for c in run.candidates if c.selected_as is not None]
    trajectories = tuple(
        Trajectory(k, "", (0,) * c.tokens, None, "stop", selected_as=c.selected_as, weight=weights.get(c.index))
        for k, c in enumerate(chosen)
    )
    shortest = rule.num_shortest if weights and rule.samples_rest else None
    group = Group("g", None, trajectories, counted=len(answers), num_shortest=shortest)
    return Returned(probability, group, [toy.returned(answers[c.index], c.tokens) for c in chosen])


# --- advantages --------------------------------------------------------------


def by_group_mean(group: Group, rewards: Sequence[float]) -> list[float]:
    """As GRPO's, without the standard deviation. One answer alone teaches nothing."""
    count, mean = len(rewards), sum(rewards) / len(rewards)
    return [(r - mean) * count / max(count - 1, 1) for r in rewards]


def by_weighted_mean(group: Group, rewards: Sequence[float]) -> list[float]:
    weights = [t.weight or 0.0 for t in group.trajectories]
    mean = sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
    scale = len(rewards) / (group.counted or 1)
    return [scale * w * (r - mean) for w, r in zip(weights, rewards, strict=True)]


# --- the table ---------------------------------------------------------------

_LENGTH = build_policies(Shaping(), Deadline())
_BALANCED = build_policies(Shaping(), Deadline(), Pruning())["arrol"].selection_rule(PRUNED_SIZE)
_UNIFORM, _CUT = (_LENGTH[name].selection_rule(SIZE) for name in ("uniform", "darts_cut"))

CASES: dict[tuple[str, str], tuple[Groups, Advantages]] = {
    ("off", "group mean"): (selected_by_length(InOrder(SIZE), SIZE), by_group_mean),
    ("uniform", "group mean"): (selected_by_length(_UNIFORM), by_group_mean),
    ("uniform", "weighted"): (selected_by_length(_UNIFORM), by_weighted_mean),
    ("uniform", "exact"): (selected_by_length(_UNIFORM), unbiased_advantages),
    ("saturated prompts of darts, L = 0", "group mean"): (selected_by_length(Shortest(SIZE)), by_group_mean),
    ("longest tail", "group mean"): (selected_by_length(LongestTail(SIZE - 1, 1)), by_group_mean),
    ("darts_deadline", "group mean"): (
        selected_by_length(_LENGTH["darts_deadline"].selection_rule(SIZE), deadline=DEADLINE),
        by_group_mean,
    ),
    ("first_finish, saturated, all start together", "group mean"): (
        selected_by_length(_LENGTH["first_finish"].selection_rule(SIZE, saturated=True)),
        by_group_mean,
    ),
    ("first_finish, saturated, two start late", "group mean"): (
        selected_by_length(_LENGTH["first_finish"].selection_rule(SIZE, saturated=True), late=LATE),
        by_group_mean,
    ),
    ("darts_cut", "group mean"): (selected_by_length(_CUT, deadline=DEADLINE), by_group_mean),
    ("darts_cut", "exact"): (selected_by_length(_CUT, deadline=DEADLINE), unbiased_advantages),
    ("cap", "group mean"): (
        selected_by_length(_LENGTH["cap"].selection_rule(SIZE), SIZE, deadline=DEADLINE),
        by_group_mean,
    ),
    ("arrol, all survivors", "group mean"): (pruned(AllSurvivors(PRUNED_SIZE)), by_group_mean),
    ("arrol, all survivors", "exact"): (pruned(AllSurvivors(PRUNED_SIZE)), unbiased_advantages),
    ("arrol, M of the survivors", "group mean"): (pruned(_BALANCED), by_group_mean),
}
"""By policy and advantages."""


def expected_gradient(toy: Toy, groups: Groups, advantages: Advantages) -> Floats:
    total: Floats = np.zeros(MAX_TOKENS)
    for each in groups(toy):
        values = advantages(each.group, [a.reward for a in each.answers])
        for answer, value in zip(each.answers, values, strict=True):
            total += each.probability * value * answer.score / len(each.answers)
    return total


def compare(toy: Toy, groups: Groups, advantages: Advantages) -> tuple[float, float]:
    """Return the relative bias of the expected gradient, and its cosine with the true one."""
    gradient, true = expected_gradient(toy, groups, advantages), toy.gradient
    size = float(np.linalg.norm(true))
    cosine = float(gradient @ true) / (float(np.linalg.norm(gradient)) * size)
    return float(np.linalg.norm(gradient - true)) / size, cosine


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser("python -m benchmarks.gradient_bias", description=__doc__.split("\n")[0]).parse_args(argv)
    print(f"| policy | advantages | {' | '.join(f'{name}: bias, cosine' for name in TOYS)} |")
    print("|---" * (2 + len(TOYS)) + "|")
    for (policy, kind), (groups, advantages) in CASES.items():
        found = [compare(toy, groups, advantages) for toy in TOYS.values()]
        print(f"| {policy} | {kind} | {' | '.join(f'{bias:.2f}, {cosine:.2f}' for bias, cosine in found)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
