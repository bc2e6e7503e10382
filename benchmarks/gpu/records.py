"""Keep the records of groups."""

from darts_server.records import GroupRecord


class Records:
    """The records of groups that have ended."""

    def __init__(self) -> None:
        self.groups: list[GroupRecord] = []

    @property
    def generated(self) -> int:
        """Tokens of all candidates."""
        return sum(record.generated_tokens for record in self.groups)

    @property
    def candidates(self) -> int:
        return sum(len(record.candidates) for record in self.groups)
