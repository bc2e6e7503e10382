"""The records of the last groups, by group id and by the id of the response they went out with."""

from collections import OrderedDict

from darts_server.types import GroupRecord

DEFAULT_KEPT = 10_000
"""Groups kept: the last dozens of training steps. A record of 12 candidates takes about 3 KB."""

LONGEST_NUMBER = 7
"""Digits of a prompt's number. Longer ones are random ids that happen to have no letter."""


class Provenance:
    """Implements the observer: keeps what it hears of ended groups, the newest ``kept`` of them."""

    def __init__(self, kept: int = DEFAULT_KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, GroupRecord] = OrderedDict()
        self._of_response: dict[str, list[str]] = {}

    def candidates_started(self, count: int) -> None:
        """Of no interest here."""

    def group_ended(self, record: GroupRecord) -> None:
        if record.group_id in self._records:
            self._forget(record.group_id)  # a caller used its request id again: the newer one counts
        self._records[record.group_id] = record
        self._of_response.setdefault(response_id(record.group_id), []).append(record.group_id)
        while len(self._records) > self._kept:
            self._forget(next(iter(self._records)))

    def find(self, name: str) -> list[GroupRecord]:
        """The group of that id, or all groups of that response in prompt order; empty if it is not kept."""
        if name in self._records:
            return [self._records[name]]
        return [self._records[group] for group in sorted(self._of_response.get(name, ()), key=_prompt_number)]

    def _forget(self, group_id: str) -> None:
        del self._records[group_id]
        groups = self._of_response[response_id(group_id)]
        groups.remove(group_id)
        if not groups:
            del self._of_response[response_id(group_id)]


def response_id(group_id: str) -> str:
    """The id of the response a group went out with: vLLM adds a dash and the prompt's number to it, or nothing."""
    head, dash, number = group_id.rpartition("-")
    return head if dash and number.isdigit() and len(number) <= LONGEST_NUMBER else group_id


def _prompt_number(group_id: str) -> int:
    return int(group_id.rpartition("-")[2])
