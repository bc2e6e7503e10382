"""Options of a policy: how many candidates a prompt gets, and which rule selects among them; and the named policies."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, floor

from darts_server.estimates.checks import ROUNDING
from darts_server.exceptions import InvalidRequest
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors, SelectionRule
from darts_server.policy.allocation import cv_log_mean
from darts_server.policy.deadline import Deadline
from darts_server.policy.survival import Pruning

REDUNDANCY = 1.5
"""With 12 candidates for 8 places, a group does not wait for its four longest candidates."""


class Tail(StrEnum):
    """Which candidates get the L places that are not for the shortest."""

    LONGEST = "longest"
    SAMPLED = "sampled"


class BudgetKind(StrEnum):
    """How the mean number of candidates per prompt is chosen."""

    FIXED = "fixed"
    CV_LOG = "cv_log"


@dataclass(frozen=True, slots=True)
class Shaping:
    """Options of one policy.

    How many candidates:

    * ``redundancy``: M'/M, at least 1; of an adaptive policy the mean over prompts, under a fixed budget.
    * ``max_redundancy``: M_up/M, the bound for a single prompt of an adaptive policy.
    * ``adaptive``: allocate by the spread of each prompt's lengths, between M and M_up.
    * ``budget``: how the mean is chosen.

    Which ones are returned:

    * ``num_longest``: L, so that the other K = M - L places are for the shortest; ``tail``: who gets the L places.
    * ``deadline``: at which the tail, then a sampled one, is cut; ``None`` waits for all of it.
    * ``completion_share``: returns all candidates, cut at the deadline, which is at least the length of the shortest at
      this share of them; ``None`` returns some, with a deadline of at least the M-th shortest length.
    * ``sample_survivors``: returns M of the candidates that are not pruned, all with the same probability.
    * ``return_survivors``: returns all candidates that are not pruned, more or fewer than M.

    Pruning:

    * ``pruning``: how candidates are pruned; ``None`` prunes nothing.
    """

    redundancy: float = REDUNDANCY
    num_longest: int = 1
    tail: Tail = Tail.SAMPLED
    adaptive: bool = False
    max_redundancy: float = 2.0
    budget: BudgetKind = BudgetKind.FIXED
    deadline: Deadline | None = None
    completion_share: float | None = None
    pruning: Pruning | None = None
    sample_survivors: bool = False
    return_survivors: bool = False

    @property
    def uses_cohort(self) -> bool:
        """Whether groups that come together are allocated together."""
        return self.adaptive or self.deadline is not None or self.budget is not BudgetKind.FIXED

    @property
    def prunes(self) -> bool:
        """Whether candidates are pruned."""
        return self.pruning is not None

    @property
    def may_return_survivors(self) -> bool:
        """Whether callers that take groups of any size get all survivors unless they say otherwise."""
        return self.prunes and self.sample_survivors

    def bounds(self, size: int) -> tuple[int, int]:
        """Return M_low and M_up for a group of ``size``."""
        is_constant = not self.adaptive and self.budget is BudgetKind.FIXED  # M' is all that it has, so no bound on it
        highest = max(self.max_redundancy, self.redundancy) if is_constant else self.max_redundancy
        return size, max(size, floor(highest * size + 0.5))

    def candidates(self, size: int) -> int:
        """Return M' = redundancy * M, rounded half up."""
        return max(size, floor(self.redundancy * size + 0.5))

    def mean_candidates(self, size: int, length_std: float | None, length_mean: float | None) -> float:
        """Return M', the mean number of candidates of a group of ``size``, at most M_up.

        ``length_std``, ``length_mean``: of lengths, as in `cv_log_mean`. While one of the two is not known, every kind
        of budget is the fixed one. If all prompts get the same fixed number, M' is a whole number.
        """
        mean: float = self.candidates(size)
        if self.budget is BudgetKind.CV_LOG and length_std is not None and length_mean:
            mean = cv_log_mean(length_std, length_mean, size)
        elif self.adaptive:
            mean = self.redundancy * size
        return min(mean, self.bounds(size)[1])

    def is_saturated(self, size: int, candidates: int) -> bool:
        """Whether a prompt to which so many candidates were allocated is saturated: its tail is not waited for."""
        return self.adaptive and candidates >= self.bounds(size)[1] > size

    def selection_rule(self, size: int, saturated: bool = False) -> SelectionRule:
        """Build the selection rule for a group of ``size``. ``saturated``: see `is_saturated`.

        Raises:
            InvalidRequest: the tail takes all places of the group, or no candidate can be pruned.
        """
        # A group must get more candidates than it returns, unless a keep ratio of 1 scores without pruning.
        if self.pruning is not None and self.pruning.prunes:
            if self.adaptive and self.bounds(size)[1] == size:
                raise InvalidRequest(
                    "n",
                    f"no prompt may get more than the {size} candidates that are returned, so none can be pruned; "
                    f"raise --max-redundancy, which is {self.max_redundancy:g}",
                )
            if not self.adaptive and self.candidates(size) == size:
                raise InvalidRequest(
                    "n",
                    f"n / keep_ratio = {size} / {self.pruning.keep_ratio:g} comes to no more candidates than the "
                    f"{size} that are returned, so none can be pruned; raise n, or lower --keep-ratio",
                )
        if self.return_survivors:
            return AllSurvivors(size)
        if self.sample_survivors:
            return SampledSurvivors(size)
        if self.completion_share is not None:
            place = ceil(self.completion_share * size - ROUNDING)
            return CutTail(place, size - place, place)
        longest = self.num_longest
        shortest = size - longest
        if shortest < 1:
            raise InvalidRequest(
                "n",
                f"the tail alone takes num_longest = {longest} trajectories, so n must be larger than that, "
                f"got {size}; raise n, or lower --num-longest",
            )
        # No candidate more than is returned, and none that is stopped or cut: nothing is selected by its length.
        if longest == 0 and self.bounds(size)[1] == size and self.deadline is None and self.pruning is None:
            return InOrder(size)
        # The tail of a saturated prompt is so long that only the shortest are returned (DARTS, variance-guided tail
        # pruning). With a deadline this is not needed, since the wait for any tail is bounded.
        if longest == 0 or (saturated and self.deadline is None):
            return DualEnd(size)
        if self.deadline is not None:
            return CutTail(shortest, longest)
        return (SampledTail if self.tail is Tail.SAMPLED else DualEnd)(shortest, longest)


def build_policies(base: Shaping, deadline: Deadline, pruning: Pruning | None = None) -> dict[str, Shaping]:
    """Build all policies except ``off`` and ``auto``, by name. ``base`` is ``uniform``, from which others are derived.

    Without ``pruning`` the policies that prune are left out.
    """
    darts, fixed = replace(base, adaptive=True), replace(base, budget=BudgetKind.FIXED)
    policies = {
        "uniform": base,
        "darts": darts,
        "darts_cut": replace(darts, tail=Tail.SAMPLED, deadline=deadline),
        "cap": replace(fixed, redundancy=1.0, deadline=deadline, completion_share=1 / base.redundancy),
    }
    if pruning is not None:
        policies |= {
            # So many candidates that as many as are returned are left after pruning, on average.
            "arrol": replace(fixed, redundancy=1 / pruning.keep_ratio, sample_survivors=True, pruning=pruning),
            "darts+arrol": replace(darts, pruning=pruning),
        }
    return policies
