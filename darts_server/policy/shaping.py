"""What a named policy does to a prompt: how many candidates, and which rule chooses among them."""

from dataclasses import dataclass
from enum import StrEnum
from math import floor

from darts_server.exceptions import InvalidRequest
from darts_server.policy.deadline import Deadline
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.selection.quality_rules import AllSurvivors, Balanced
from darts_server.policy.selection.rules import FirstFinish, SelectionRule, Shadow, Shortest
from darts_server.policy.selection.tail_rules import CutTail, DeadlineTail, LongestTail, SampledTail


class Tail(StrEnum):
    """Who gets the L places that are not for the shortest."""

    LONGEST = "longest"
    SAMPLED = "sampled"


class BudgetKind(StrEnum):
    """What decides the mean number of candidates."""

    FIXED = "fixed"
    CV_LOG = "cv_log"
    UTILITY = "utility"


@dataclass(frozen=True, slots=True)
class Shaping:
    """How one policy shapes.

    ``redundancy``: M'/M, at least 1; of a policy that gives prompts different numbers, the mean under a fixed budget.
    ``budget``, ``budget_aversion``: what decides that mean, and lambda of the utility. ``num_longest``: L.
    ``num_shortest``: K; ``None`` means M - L. ``adaptive``: prompts get candidates by the spread of their lengths,
    between M and ``max_redundancy`` * M (M_low and M_up). ``deadline``: of the tail, ``None`` to wait for all of it; a
    sampled tail is cut there, and of the longest only those in time count. ``finish_order``: saturated prompts take
    finish order for length order, as the paper's public code does. ``pruning``: how candidates are pruned by quality;
    ``None`` for not at all. ``refill``: a new one is started for each that is pruned, as far as M_up goes. ``target``:
    the M are returned whose expected share of right ones is nearest it (rho), and length is nothing; ``None`` for ends
    of the length order. ``survivors``: all that are not pruned are returned, M at least. ``shadow``: nothing is
    shaped, only recorded.
    """

    redundancy: float = 1.5
    num_shortest: int | None = None
    num_longest: int = 1
    tail: Tail = Tail.SAMPLED
    adaptive: bool = False
    max_redundancy: float = 2.0
    budget: BudgetKind = BudgetKind.FIXED
    budget_aversion: float = 1.0
    deadline: Deadline | None = None
    finish_order: bool = False
    pruning: Pruning | None = None
    refill: bool = False
    target: float | None = None
    survivors: bool = False
    shadow: bool = False

    @property
    def uses_cohort(self) -> bool:
        """Whether groups that come together are looked at together."""
        return self.adaptive or self.deadline is not None or self.budget is not BudgetKind.FIXED

    @property
    def prunes(self) -> bool:
        """Whether candidates are scored, and some of them pruned."""
        return self.pruning is not None and not self.shadow

    def bounds(self, size: int) -> tuple[int, int]:
        """M_low and M_up for a group of ``size``."""
        return size, max(size, floor(self.max_redundancy * size + 0.5))

    def candidates(self, size: int) -> int:
        """M' = redundancy * M, rounded half up."""
        return max(size, floor(self.redundancy * size + 0.5))

    def max_candidates(self, size: int) -> int:
        """Candidates up to which pruned ones are replaced by new ones; 0 for never."""
        return self.bounds(size)[1] if self.prunes and self.refill else 0

    def selection_rule(self, size: int, candidates: int | None = None) -> SelectionRule:
        """The selection rule for a group of ``size`` with that many candidates.

        Raises:
            InvalidRequest: K + L is not the group size, or pruning has nobody to spare.
        """
        self._check_room(size)
        rule = self._rule(size, candidates)
        return Shadow(rule) if self.shadow else rule

    def _rule(self, size: int, candidates: int | None) -> SelectionRule:
        if self.survivors:
            return AllSurvivors(size)
        return self._by_length(size, candidates) if self.target is None else Balanced(size, self.target)

    def _by_length(self, size: int, candidates: int | None) -> SelectionRule:
        shortest = self._shortest(size)
        if self.num_longest == 0:
            return Shortest(size)
        if self.deadline is not None:
            return (CutTail if self.tail is Tail.SAMPLED else DeadlineTail)(shortest, self.num_longest)
        if self.adaptive and candidates is not None and candidates >= self.bounds(size)[1] > size:
            # Saturated: its tail is so long that only the shortest are kept (DARTS, variance-guided tail pruning).
            # With a deadline there is no need to: nobody waits for the tail beyond it.
            return FirstFinish(size) if self.finish_order else Shortest(size)
        return (SampledTail if self.tail is Tail.SAMPLED else LongestTail)(shortest, self.num_longest)

    def _check_room(self, size: int) -> None:
        """Pruning needs more candidates than the group returns. A keep ratio of 1 scores without pruning."""
        if self.pruning is None or self.pruning.keep_ratio == 1:
            return
        if self.adaptive and self.bounds(size)[1] == size:
            raise InvalidRequest(
                "n",
                f"no prompt may get more than the {size} candidates that are returned, so none can be pruned; raise "
                f"--max-redundancy, which is {self.max_redundancy:g}",
            )
        if not self.adaptive and self.candidates(size) == size:
            raise InvalidRequest(
                "n",
                f"n / keep_ratio = {size} / {self.pruning.keep_ratio:g} comes to no more candidates than the {size} "
                f"that are returned, so none can be pruned; raise n, or lower --keep-ratio",
            )

    def _shortest(self, size: int) -> int:
        shortest = size - self.num_longest if self.num_shortest is None else self.num_shortest
        if shortest + self.num_longest != size:
            raise InvalidRequest(
                "n",
                f"the server keeps the {shortest} shortest and {self.num_longest} from the tail, which needs "
                f"n = {shortest + self.num_longest}, got {size}; change n, or start the server without --num-shortest",
            )
        if shortest < 1:
            raise InvalidRequest(
                "n",
                f"the tail alone takes num_longest = {self.num_longest} trajectories, so n must be larger than that, "
                f"got {size}; raise n, or lower --num-longest",
            )
        return shortest
