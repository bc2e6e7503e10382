"""The named policies, and which combination of rules each one is."""

from dataclasses import replace

from darts_server.policy.deadline import Deadline
from darts_server.policy.pruning.roulette import Roulette
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import BudgetKind, Shaping, Tail


def build_policies(
    base: Shaping,
    deadline: Deadline,
    pruning: Pruning | None = None,
    refill: bool = False,
    roulette: Roulette | None = None,
) -> dict[str, Shaping]:
    """Build all policies except ``off``, by name. ``base`` is ``uniform``, from which the others are derived.

    Without ``pruning`` the policies that prune are left out.
    """
    darts = replace(base, adaptive=True)
    shaped = {
        "uniform": base,
        "darts": darts,
        "darts_deadline": replace(darts, tail=Tail.LONGEST, deadline=deadline),
        "darts_cut": replace(darts, tail=Tail.SAMPLED, deadline=deadline),
        "cap": replace(
            base,
            redundancy=1.0,
            budget=BudgetKind.FIXED,
            deadline=deadline,
            completion_share=1 / base.redundancy,
        ),
        "first_finish": replace(darts, tail=Tail.LONGEST, finish_order=True),
    }
    pruned = {} if pruning is None else _pruning_policies(base, darts, pruning, refill, roulette or Roulette())
    return shaped | pruned


def _pruning_policies(
    base: Shaping, darts: Shaping, pruning: Pruning, refill: bool, roulette: Roulette
) -> dict[str, Shaping]:
    started = 1 / pruning.keep_ratio  # of which the keep ratio survives: M on average
    return {
        "arrol": replace(
            base,
            redundancy=started,
            budget=BudgetKind.FIXED,
            pruning=pruning,
            refill=refill,
            target_positive_ratio=pruning.target_positive_ratio,
        ),
        "darts+arrol": replace(darts, pruning=pruning, refill=refill),
        "roulette": replace(
            base,
            budget=BudgetKind.FIXED,
            pruning=roulette,
            sample_survivors=True,
        ),
    }
