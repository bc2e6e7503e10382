"""Options of a policy: how many candidates a prompt gets, and which rule selects among them."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, floor

from darts_server.estimates.checks import ROUNDING
from darts_server.exceptions import InvalidRequest
from darts_server.group.informative import Informative, Select
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors, SelectionRule
from darts_server.policy.allocation import cv_log_mean
from darts_server.policy.deadline import Deadline
from darts_server.policy.survival import Pruning

REDUNDANCY = 1.5
"""With 12 candidates for 8 places, a group does not wait for its four longest candidates."""
INFORMATIVE_REDUNDANCY = 2.0
"""Simulated: eight trajectories of 16 candidates carry the signal of nine (pass rate .5) to fifteen (pass rate .03)."""
INFORMATIVE_SPREAD = 1.5
"""Maximum candidates of a prompt, by the mean number. Simulated with 16 on average and at most 24."""


class Tail(StrEnum):
    """Which candidates get the L places of the tail."""

    LONGEST = "longest"
    SAMPLED = "sampled"


class BudgetKind(StrEnum):
    """How the mean number of candidates per prompt is chosen."""

    FIXED = "fixed"
    CV_LOG = "cv_log"


@dataclass(frozen=True, slots=True)
class Shaping:
    """Options of a policy.

    Number of candidates:

    * ``redundancy``: M'/M, at least 1; in an adaptive policy with a fixed budget the mean over prompts.
    * ``max_redundancy``: M_up/M, the limit for a single prompt of an adaptive policy.
    * ``adaptive``: whether candidates are allocated by the spread of each prompt's lengths, between M and M_up.
    * ``adapts_to_signal``: whether they are allocated by each prompt's pass rate, so that as many groups as possible
      have different rewards.
    * ``skip_floor``: with ``adapts_to_signal``, the probability with which a batch runs a prompt that is almost surely
      without signal, or None to run all.

    Selection:

    * ``num_longest``: L; the other K = M - L places are for the shortest candidates.
    * ``deadline``: where a sampled tail is cut, or None to wait for the whole tail.
    * ``completion_share``: all candidates are returned, and the deadline waits for this share of them, the shortest. If
      None, some candidates are returned, and the deadline waits for the M shortest.
    * ``sample_survivors``: whether M of the candidates that were not pruned are returned, at random.
    * ``return_survivors``: whether all candidates that were not pruned are returned, more or fewer than M.
    * ``select``: how candidates are selected by their rewards, or None to ignore rewards.
    * ``advantage_std``: whether advantages are divided by the standard deviation of the group's rewards.
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
    select: Select | None = None
    advantage_std: bool = False
    adapts_to_signal: bool = False
    skip_floor: float | None = None

    @property
    def uses_cohort(self) -> bool:
        """Whether groups that come together are allocated together."""
        return self.is_uneven or self.deadline is not None or self.budget is not BudgetKind.FIXED

    @property
    def is_uneven(self) -> bool:
        """Whether some prompts get more candidates than others."""
        return self.adaptive or self.adapts_to_signal

    @property
    def prunes(self) -> bool:
        """Whether candidates are scored, and pruned unless the keep ratio is 1."""
        return self.pruning is not None

    @property
    def needs_rewards(self) -> bool:
        """Whether trajectories are selected by their rewards, which only a verifier can give in time."""
        return self.select is not None

    @property
    def may_return_survivors(self) -> bool:
        """Whether callers that take groups of any size get all survivors by default."""
        return self.prunes and self.sample_survivors

    def candidate_limits(self, size: int) -> tuple[int, int]:
        """Return M_low and M_up for a group of ``size``."""
        max_redundancy = self.max_redundancy
        if not self.is_uneven and self.budget is BudgetKind.FIXED:
            # All prompts get the same number, so no limit applies.
            max_redundancy = max(max_redundancy, self.redundancy)
        return size, max(size, floor(max_redundancy * size + 0.5))

    def candidates(self, size: int) -> int:
        """Return M' = redundancy * M, rounded half up."""
        return max(size, floor(self.redundancy * size + 0.5))

    def mean_candidates(self, size: int, length_std: float | None, length_mean: float | None) -> float:
        """Return the mean M' over groups of ``size``, at most M_up.

        It is a whole number if all prompts get the same fixed number. ``length_std``, ``length_mean``: see
        `cv_log_mean`; while they are not known, the budget is fixed.
        """
        mean: float = self.candidates(size)
        if self.budget is BudgetKind.CV_LOG and length_std is not None and length_mean:
            mean = cv_log_mean(length_std, length_mean, size)
        elif self.is_uneven:
            mean = self.redundancy * size
        return min(mean, self.candidate_limits(size)[1])

    def is_saturated(self, size: int, candidates: int) -> bool:
        """Whether the group of a prompt with so many allocated candidates does not wait for its tail."""
        _, max_candidates = self.candidate_limits(size)
        return self.adaptive and candidates >= max_candidates > size

    def selection_rule(self, size: int, saturated: bool = False) -> SelectionRule:
        """Build the selection rule for a group of ``size``.

        Raises:
            InvalidRequest: the tail takes all places of the group, or no candidate can be pruned.
        """
        # A pruned group must get more candidates than it returns.
        if self.pruning is not None and self.pruning.prunes:
            if self.adaptive and self.candidate_limits(size)[1] == size:
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
        if self.select is not None:
            return Informative(size, select=self.select, by_std=self.advantage_std)
        if self.return_survivors:
            return AllSurvivors(size)
        if self.sample_survivors:
            return SampledSurvivors(size)
        if self.completion_share is not None:
            # All candidates are returned, and the deadline waits for the shortest.
            num_awaited = ceil(self.completion_share * size - ROUNDING)
            return CutTail(num_awaited, size - num_awaited, completion_rank=num_awaited)

        num_longest = self.num_longest
        num_shortest = size - num_longest
        if num_shortest < 1:
            raise InvalidRequest(
                "n",
                f"the tail alone takes num_longest = {num_longest} trajectories, so n must be larger than that, "
                f"got {size}; raise n, or lower --num-longest",
            )

        # All candidates are returned, and none is stopped or cut: nothing is selected by its length.
        _, max_candidates = self.candidate_limits(size)
        if num_longest == 0 and max_candidates == size and self.deadline is None and self.pruning is None:
            return InOrder(size)
        # The tail of a saturated prompt is so long that only the shortest are returned (DARTS, variance-guided tail
        # pruning). A deadline limits the wait for any tail, so with a deadline this is not needed.
        if num_longest == 0 or (saturated and self.deadline is None):
            return DualEnd(size)
        if self.deadline is not None:
            return CutTail(num_shortest, num_longest)
        if self.tail is Tail.SAMPLED:
            return SampledTail(num_shortest, num_longest)
        return DualEnd(num_shortest, num_longest)


def build_policies(
    base: Shaping,
    deadline: Deadline,
    pruning: Pruning | None = None,
    informative: Shaping | None = None,
) -> dict[str, Shaping]:
    """Build all policies except ``off`` and ``auto``, by name. Without ``pruning``, policies that prune are left out.

    ``base``: the policy ``uniform``. ``informative``: the policy of this name.
    """
    darts = replace(base, adaptive=True)
    fixed = replace(base, budget=BudgetKind.FIXED)
    # `cap` starts no extra candidates, and waits for the share of them that `uniform` returns.
    completion_share = 1 / base.redundancy
    policies = {
        "uniform": base,
        "darts": darts,
        "darts_cut": replace(darts, tail=Tail.SAMPLED, deadline=deadline),
        "cap": replace(
            fixed,
            redundancy=1.0,
            deadline=deadline,
            completion_share=completion_share,
        ),
    }
    if pruning is not None:
        # On average, pruning leaves as many candidates as are returned.
        redundancy = 1 / pruning.keep_ratio
        policies["arrol"] = replace(
            fixed,
            redundancy=redundancy,
            sample_survivors=True,
            pruning=pruning,
        )
        policies["darts+arrol"] = replace(darts, pruning=pruning)
    if informative is not None:
        policies["informative"] = informative
    return policies
