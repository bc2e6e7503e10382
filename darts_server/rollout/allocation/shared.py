"""Cohorts whose groups run on several servers: what each server knows of the whole, and what its groups report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Grant:
    """How many candidates groups of a cohort get, before the load reduces them.

    ``candidates``: of each group. ``mean``: M', candidates per group of the whole cohort.
    """

    candidates: Sequence[int]
    mean: float


@dataclass(frozen=True, slots=True)
class CohortPart:
    """A part of a cohort, on one of several servers. Its deadline comes from outside.

    ``groups``: of the whole cohort. ``leads``: whether this part decides if the whole cohort explores. ``grant``: how
    many candidates its groups get, where that was decided for the whole cohort; ``None`` if it decides for itself.
    """

    groups: int
    leads: bool = False
    grant: Grant | None = None


@dataclass(frozen=True, slots=True)
class SharedDeadline:
    """What is known of the deadline of a cohort that runs on several servers.

    ``tokens``: the deadline; ``None`` while it is not known. ``waits_beyond``: see `CohortDeadline`. ``explored``:
    whether all groups run past it. ``stretch``, ``bound``: see `Deadline`; those with which it is computed.
    """

    tokens: int | None = None
    waits_beyond: int | None = None
    explored: bool = False
    stretch: float = 1.0
    bound: float = 1.0


class CohortReports(Protocol):
    """Receives what the groups of a part report, by their numbers in it. Called synchronously."""

    def need_reported(self, number: int, tokens: int) -> None:
        """See `CohortDeadline.report_need`."""
        ...

    def minimum_reported(self, number: int, tokens: int | None) -> None:
        """See `CohortDeadline.report_minimum`."""
        ...
