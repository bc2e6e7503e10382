"""Keep the records of groups."""

from darts_server.types import CohortRecord, GroupRecord


class Records:
    """Implements :class:`darts_server.rollout.observers.base.GroupObserver`."""

    def __init__(self) -> None:
        self.groups: list[GroupRecord] = []

    @property
    def generated(self) -> int:
        """Tokens of all candidates."""
        return sum(record.generated_tokens for record in self.groups)

    @property
    def candidates(self) -> int:
        return sum(len(record.candidates) for record in self.groups)

    def candidates_started(self, count: int) -> None:
        """Do nothing: the records have the candidates."""

    def group_ended(self, record: GroupRecord) -> None:
        self.groups.append(record)

    def cohort_ended(self, record: CohortRecord) -> None:
        """Do nothing: the report shows nothing of cohorts."""
