"""What the selected candidates of a complete group stand for: their inverse propensity weights."""

from math import isfinite

from darts_server.policy.candidate import Candidate
from darts_server.policy.group import Group
from darts_server.policy.pruning.survival import weight_factor
from darts_server.types import GONE, DiscardReason, Outcome, SelectedAs


def selection_weights(group: Group) -> dict[int, float]:
    """Return each selected candidate's weight, 1 / (its probability to be selected), by index.

    `GONE` candidates and those before a restart do not count; failures after a score are corrected for.
    Empty if the group is not complete, if its rule never selects some candidates, or if so many failed after
    scores that they exceed the range of floats.
    """
    if group.outcome is not Outcome.COMPLETED:
        return {}
    weights = group.rule.weights(_counted(group)) or {}
    candidates = group.candidates[group.restarted_from :]
    failed = [c.survival for c in candidates if c.reason in GONE]
    if min(failed, default=1.0) == 1:
        return weights
    factor = weight_factor(failed, len(candidates))
    weights = {index: weight * factor for index, weight in weights.items()}
    return weights if all(map(isfinite, weights.values())) else {}


def sampled_from(group: Group) -> int | None:
    """Return of how many candidates the complete group is a plain sample; ``None`` if it is selected otherwise."""
    return group.rule.sampled_from(_counted(group)) if group.outcome is Outcome.COMPLETED else None


def tail_share(group: Group) -> float:
    """Return which share of those that were not pruned, and are not among the shortest, a complete group has sampled.

    1 if its rule samples none. It is only nearly the probability to be selected, as who can be pruned depends on who
    was stopped, and so on the sample: good enough for labels, not for `selection_weights`.
    """
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_rest:
        return 1.0
    left = [
        c for c in _counted(group) if c.reason is not DiscardReason.PRUNED and c.selected_as is not SelectedAs.SHORT
    ]
    sampled = sum(c.selected_as is not None for c in left)
    return sampled / len(left) if sampled else 1.0


def _counted(group: Group) -> list[Candidate]:
    return [c for c in group.candidates[group.restarted_from :] if c.reason not in GONE]
