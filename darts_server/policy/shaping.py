"""What a named policy does to a prompt: how many candidates, and which rule chooses among them."""

from dataclasses import dataclass
from enum import StrEnum
from math import floor

from darts_server.exceptions import InvalidRequest
from darts_server.policy.selection import LongestTail, SampledTail, SelectionRule, Shortest


class Tail(StrEnum):
    """Who gets the L places that are not for the shortest."""

    LONGEST = "longest"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True)
class Shaping:
    """How one policy shapes.

    ``redundancy``: M'/M, at least 1; of an adaptive policy, its mean over prompts. ``num_longest``: L.
    ``num_shortest``: K; ``None`` means M - L. ``adaptive``: prompts get candidates by the spread of their lengths,
    between M and ``max_redundancy`` * M (M_low and M_up).
    """

    redundancy: float = 1.5
    num_shortest: int | None = None
    num_longest: int = 1
    tail: Tail = Tail.SAMPLED
    adaptive: bool = False
    max_redundancy: float = 2.0

    def bounds(self, size: int) -> tuple[int, int]:
        """M_low and M_up for a group of ``size``."""
        return size, max(size, floor(self.max_redundancy * size + 0.5))

    def candidates(self, size: int) -> int:
        """M' = redundancy * M, rounded half up."""
        return max(size, floor(self.redundancy * size + 0.5))

    def rule(self, size: int, candidates: int | None = None) -> SelectionRule:
        """The selection rule for a group of ``size`` with that many candidates.

        A prompt that an adaptive policy gave all it may have is saturated: its tail is so long that only the shortest
        are kept (DARTS, variance-guided tail pruning).

        Raises:
            InvalidRequest: K + L is not the group size.
        """
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
        saturated = self.adaptive and candidates is not None and candidates >= self.bounds(size)[1] > size
        if self.num_longest == 0 or saturated:
            return Shortest(size)
        tail = SampledTail if self.tail is Tail.SAMPLED else LongestTail
        return tail(shortest, self.num_longest)
