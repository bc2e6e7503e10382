"""Advantages with which the groups of a shaping policy give an unbiased policy gradient.

A shaped group is not a random sample of the policy: short trajectories are returned more often than long ones. Each
trajectory's `weight` is 1 / (its probability to be returned, given all candidates of the group), so sums over returned
trajectories, weighted by it, estimate sums over all candidates (Horvitz and Thompson, 1952).

A baseline keeps the gradient unbiased if it does not depend on the trajectory itself. The mean of the returned rewards
does: which others are returned depends on its length.
"""

from collections.abc import Sequence

from ._models import Group, Trajectory
from ._records import CandidateRecord, GroupRecord


def unbiased_advantages(
    group: Group | GroupRecord, rewards: Sequence[float], baseline: float | None = None
) -> list[float]:
    """Return A_i = (n / N) w_i (r_i - b_i) for each of the n returned trajectories of a group with N candidates.

    The mean over the group of A_i times the gradient of the trajectory's log-probability is an unbiased estimate of the
    policy gradient. If groups have different n, take the mean within each group first. Rewards are in the order of the
    group's trajectories; for a record (`client.groups.get`), in that of the answer's choices.

    `baseline`: a mean reward that was known before, such as that of the prompt in earlier epochs. By default b_i is
    computed from other trajectories of the group. Where the group is the K shortest and a sample of the rest, it is the
    mean reward of the K - 1 shortest others, which are always returned and do not depend on i. Otherwise it is the
    weighted mean of all N - 1 others: exact also where candidates were pruned at random, and depending on one another,
    since given what all would have generated, a product of two weights (0 for the pruned) keeps its expectation of 1
    at every decision. It is 0 where there are none. If candidates failed or were aborted after they were scored, only a
    given `baseline` is exact: the weights of all survivors then depend on one another. A truncated trajectory is
    rewarded for what was returned of it.

    Raises:
        ValueError: not one reward for each trajectory; or trajectories without weights, because under the group's
            policy some candidates can never be returned.
    """
    weights, count = _weights(group, rewards)
    if baseline is not None:
        baselines = [baseline] * len(rewards)
    elif group.num_shortest is not None:
        baselines = _means_of_shortest_others(group, group.num_shortest - 1, rewards)
    else:
        baselines = _weighted_means_of_others(weights, rewards, count, group.sampled_from)
    scale = len(rewards) / count
    return [scale * w * (r - b) for w, r, b in zip(weights, rewards, baselines, strict=True)]


def _weighted_means_of_others(
    weights: Sequence[float], rewards: Sequence[float], count: int, sampled_from: int | None
) -> list[float]:
    """For each trajectory, estimate the mean reward of the other ``count`` - 1 candidates.

    Where n trajectories were sampled from S, others weigh (S - 1) / (n - 1) rather than S / n, given that one was.
    """
    n = len(weights)
    total = sum(w * r for w, r in zip(weights, rewards, strict=True))
    if n == 1:  # without others
        return [0.0]
    scale = 1.0 if sampled_from is None else (sampled_from - 1) / (n - 1) * n / sampled_from
    return [scale * (total - w * r) / (count - 1) for w, r in zip(weights, rewards, strict=True)]


def _means_of_shortest_others(group: Group | GroupRecord, count: int, rewards: Sequence[float]) -> list[float]:
    """For each trajectory, return the mean reward of the ``count`` shortest valid ones among the others."""
    returned = _returned(group)
    shortest = [i for i, t in enumerate(returned) if t.selected_as == "short"]
    shortest.sort(key=lambda i: (returned[i].length, i))
    means = []
    for index in range(len(rewards)):
        others = [rewards[i] for i in shortest if i != index][:count]
        means.append(sum(others) / len(others) if others else 0.0)
    return means


def _weights(group: Group | GroupRecord, values: Sequence[float]) -> tuple[list[float], int]:
    """Return the weight of each trajectory, and N."""
    returned = _returned(group)
    if isinstance(group, Group):
        name, remedy = f"group {group.number}", "through client.rollouts"
    else:
        name, remedy = f"group {group.group_id}", f"not {group.policy!r}"
    if len(values) != len(returned):
        raise ValueError(f"{name} has {len(returned)} trajectories, got {len(values)} values")
    weights = [each.weight for each in returned if each.weight is not None]
    if group.counted is None or len(weights) < len(values):
        raise ValueError(
            f"the trajectories of {name} have no weights, so nothing makes it unbiased; sample with a "
            f'policy that returns weights, such as "uniform", {remedy}'
        )
    return weights, group.counted


def _returned(group: Group | GroupRecord) -> Sequence[Trajectory | CandidateRecord]:
    return group.trajectories if isinstance(group, Group) else group.selected
