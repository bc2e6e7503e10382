"""What a named policy does to one prompt: how many candidates, and which rule chooses among them."""

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
    """Uniform over-generation: every prompt gets the same redundancy.

    ``redundancy``: M'/M, at least 1. ``num_longest``: L. ``num_shortest``: K; ``None`` means M - L.
    """

    redundancy: float = 1.5
    num_shortest: int | None = None
    num_longest: int = 1
    tail: Tail = Tail.SAMPLED

    def candidates(self, size: int) -> int:
        """M' = redundancy * M, rounded half up."""
        return max(size, floor(self.redundancy * size + 0.5))

    def rule(self, size: int) -> SelectionRule:
        """The selection rule for a group of ``size``.

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
        if self.num_longest == 0:
            return Shortest(size)
        tail = SampledTail if self.tail is Tail.SAMPLED else LongestTail
        return tail(shortest, self.num_longest)
