"""The shapings that the named policies stand for."""

from dataclasses import replace

from darts_server.policies import POLICIES, Candidates, NamedPolicy, Returned
from darts_server.policy.deadline import Deadline
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import BudgetKind, Shaping, Tail


def build_policies(
    base: Shaping, deadline: Deadline, pruning: Pruning | None = None, refill: bool = False
) -> dict[str, Shaping]:
    """Build all policies except ``off`` and ``auto``, by name. ``base`` is ``uniform``, from which others are derived.

    Without ``pruning`` the policies that prune are left out.
    """
    return {
        name: _compose(policy, base, deadline, pruning or Pruning(), refill)
        for name, policy in POLICIES.items()
        if policy.is_shaping and (pruning is not None or not policy.prunes)
    }


def _compose(policy: NamedPolicy, base: Shaping, deadline: Deadline, pruning: Pruning, refill: bool) -> Shaping:
    shaping = base
    match policy.candidates:
        case Candidates.SIZE:
            shaping = replace(shaping, redundancy=1.0, budget=BudgetKind.FIXED)
        case Candidates.SPREAD:
            shaping = replace(shaping, adaptive=True)
        case Candidates.KEEP_RATIO:
            shaping = replace(shaping, redundancy=1 / pruning.keep_ratio, budget=BudgetKind.FIXED)
    match policy.returned:
        case Returned.CUT_TAIL:
            shaping = replace(shaping, tail=Tail.SAMPLED, deadline=deadline)
        case Returned.ALL_CUT:
            shaping = replace(shaping, deadline=deadline, completion_share=1 / base.redundancy)
        case Returned.SURVIVORS:
            shaping = replace(shaping, sample_survivors=True)
    return replace(shaping, pruning=pruning, refill=refill) if policy.prunes else shaping
