"""Advantages with which the groups of a shaping policy give an unbiased policy gradient.

A shaped group returns short trajectories more often than long trajectories. The `weight` of a trajectory is
1 / (probability of its return, given all candidates of the group), so a weighted sum over returned trajectories
estimates the sum over all candidates (Horvitz and Thompson, 1952).

A baseline keeps the gradient unbiased if it does not depend on the trajectory itself. The mean of the returned rewards
does, because the trajectory's length decides which others are returned.
"""

from collections.abc import Sequence

from ._models import Group, Trajectory
from ._records import CandidateRecord, GroupRecord


def run_weight(group: Group | GroupRecord) -> float:
    """Return 1 / (probability that the server ran the group's prompt), a factor of all advantages."""
    if group.run_probability is None:
        return 1.0
    return 1 / group.run_probability


def unbiased_advantages(
    group: Group | GroupRecord,
    rewards: Sequence[float],
    baseline: float | None = None,
) -> list[float]:
    """Return A_i = (n / N) w_i (r_i - b_i) for each of the n returned trajectories of a group with N candidates.

    All are times `run_weight`. The group's mean of A_i times the gradient of the trajectory's log-probability is an
    unbiased estimate of the policy gradient. If groups have different n, take the mean within each group first.

    The default b_i is a mean reward of other trajectories of the group. If the group is the K shortest and a sample of
    the rest, it is that of the K - 1 shortest others, which are always returned and do not depend on i. Otherwise it is
    the weighted mean of all N - 1 others, or 0 without others. Pruning keeps it exact: given the lengths and rewards of
    all candidates, the product of two weights (0 for a pruned candidate) has the expectation 1. But if candidates
    failed or were aborted after they were scored, only a given `baseline` is exact.

    Args:
        rewards: one for each trajectory of the group, or for each choice of the answer for a record.
        baseline: a mean reward that was known before the group, such as the prompt's in earlier epochs.

    Raises:
        ValueError: the number of rewards is wrong, the group's policy returns no weights, or it selects by rewards and
            no `baseline` is given.
    """
    weights, num_candidates = _checked_weights(group, rewards)
    if group.num_rewarded is not None and baseline is None:
        # A sample of as many right as wrong trajectories says nothing about the mean reward of the others.
        raise ValueError(
            "the trajectories were selected by their rewards, so a baseline from the group's rewards is biased; use "
            "server_advantages, or give a baseline"
        )
    if baseline is not None:
        baselines = [baseline] * len(rewards)
    elif group.num_shortest is not None:
        # Each trajectory has K - 1 shortest others that are always returned.
        baselines = _means_of_shortest_others(group, group.num_shortest - 1, rewards)
    else:
        baselines = _weighted_means_of_others(weights, rewards, num_candidates, group.sampled_from)
    # A_i = (n / N) w_i (r_i - b_i). `run_weight` and w_i are 1 / probability, of the run and of the return.
    scale = run_weight(group) * len(rewards) / num_candidates
    return [scale * w * (r - b) for w, r, b in zip(weights, rewards, baselines, strict=True)]


def server_advantages(group: Group | GroupRecord) -> list[float]:
    """Return (M / M') w_i A_i for each of the M returned trajectories of a group with M' rewarded candidates.

    A_i is the trajectory's `advantage` over all M', and w_i its `weight`. The group's mean of these numbers times the
    gradient of the trajectory's log-probability has the expectation of GRPO's gradient with groups of M'. A trajectory
    without a weight, of a biased selection, counts with its advantage alone. All are times `run_weight`.

    Raises:
        ValueError: the group's policy does not select by rewards.
    """
    returned = _returned_trajectories(group)
    advantages = []
    for trajectory in returned:
        if trajectory.advantage is None or group.num_rewarded is None:
            raise ValueError(
                f"the trajectories of {_name(group)} have no advantages from the server; sample with the policy "
                '"informative" through client.rollouts'
            )
        scale = run_weight(group)
        # A biased selection has no weights. Otherwise this is (M / M') w_i.
        if trajectory.weight is not None:
            scale *= trajectory.weight * len(returned) / max(group.num_rewarded, 1)
        advantages.append(scale * trajectory.advantage)
    return advantages


def _weighted_means_of_others(
    weights: Sequence[float],
    rewards: Sequence[float],
    num_candidates: int,
    sampled_from: int | None,
) -> list[float]:
    n = len(weights)
    # Without another returned trajectory there is no estimate.
    if n == 1:
        return [0.0]
    # If n of the S unpruned candidates were sampled, and one of them is given, each other candidate was returned with
    # probability (n - 1) / (S - 1). The weights assume n / S.
    scale = 1.0
    if sampled_from is not None:
        scale = (sampled_from - 1) / (n - 1) * n / sampled_from
    weighted_rewards = [weight * reward for weight, reward in zip(weights, rewards, strict=True)]
    total = sum(weighted_rewards)
    return [scale * (total - weighted_reward) / (num_candidates - 1) for weighted_reward in weighted_rewards]


def _means_of_shortest_others(group: Group | GroupRecord, count: int, rewards: Sequence[float]) -> list[float]:
    returned = _returned_trajectories(group)

    def place(index: int) -> tuple[int, int]:
        # The server may order sessions by seconds. Then `rank` is that order, and the number of tokens is not.
        rank = returned[index].rank
        return (returned[index].length if rank is None else rank), index

    # The shortest are always returned, so their mean needs no weights.
    shortest = [index for index, trajectory in enumerate(returned) if trajectory.selected_as == "short"]
    shortest.sort(key=place)
    means = []
    for index in range(len(rewards)):
        rewards_of_others = [rewards[other] for other in shortest if other != index][:count]
        means.append(sum(rewards_of_others) / max(len(rewards_of_others), 1))
    return means


def _checked_weights(group: Group | GroupRecord, rewards: Sequence[float]) -> tuple[list[float], int]:
    """Return the weight of each trajectory, and N. Check that each has a reward."""
    returned = _returned_trajectories(group)
    name = _name(group)
    if len(rewards) != len(returned):
        raise ValueError(f"{name} has {len(returned)} trajectories, got {len(rewards)} values")
    weights = [trajectory.weight for trajectory in returned if trajectory.weight is not None]
    if group.num_eligible is None or len(weights) < len(returned):
        remedy = "through client.rollouts" if isinstance(group, Group) else f"not {group.policy!r}"
        raise ValueError(
            f"the trajectories of {name} have no weights, so their advantages cannot be unbiased; sample with a "
            f'policy that returns weights, such as "uniform", {remedy}'
        )
    return weights, group.num_eligible


def _name(group: Group | GroupRecord) -> str:
    return f"group {group.number if isinstance(group, Group) else group.group_id}"


def _returned_trajectories(group: Group | GroupRecord) -> Sequence[Trajectory | CandidateRecord]:
    return group.trajectories if isinstance(group, Group) else group.selected
