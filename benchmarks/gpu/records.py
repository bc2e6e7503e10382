"""Keep the records of groups."""

from darts_server.observers import GroupObserver
from darts_server.records import GroupRecord


class Records(GroupObserver):
    """Implements :class:`darts_server.observers.GroupObserver`."""

    def __init__(self) -> None:
        self.groups: list[GroupRecord] = []

    @property
    def generated(self) -> int:
        """Tokens of all candidates."""
        return sum(record.generated_tokens for record in self.groups)

    @property
    def candidates(self) -> int:
        return sum(len(record.candidates) for record in self.groups)

    def group_ended(self, record: GroupRecord) -> None:
        self.groups.append(record)
