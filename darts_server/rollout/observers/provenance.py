"""The records of the last groups, by group id and by the id of the response they went out with."""

from collections import OrderedDict

from darts_server.observers import GroupObserver
from darts_server.types import GroupRecord

DEFAULT_KEPT = 10_000
"""Groups kept: the last dozens of training steps. A record of 12 candidates takes about 3 KB."""

LONGEST_NUMBER = 7
"""Digits of a prompt's number. Longer ones are random ids that happen to have no letter."""


class Provenance(GroupObserver):
    """Implements the observer: keeps what it hears of ended groups, the newest ``kept`` of them."""

    def __init__(self, kept: int = DEFAULT_KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, GroupRecord] = OrderedDict()
        self._of_response: dict[str, list[str]] = {}

    def group_ended(self, record: GroupRecord) -> None:
        if record.group_id in self._records:
            self._forget(record.group_id)  # a caller used its request id again: the newer one counts
        self._records[record.group_id] = record
        for name in _names(record):
            self._of_response.setdefault(name, []).append(record.group_id)
        while len(self._records) > self._kept:
            self._forget(next(iter(self._records)))

    def find(self, name: str) -> list[GroupRecord]:
        """The group of that id, or all groups of that response in prompt order; empty if it is not kept.

        A group of single requests is found by each of them, and by the name that its callers gave it.
        """
        if name in self._records:
            return [self._records[name]]
        records = [self._records[group] for group in self._of_response.get(name, ())]
        return sorted(records, key=lambda record: _prompt_number(record, name))

    def _forget(self, group_id: str) -> None:
        for name in _names(self._records.pop(group_id)):
            groups = self._of_response[name]
            groups.remove(group_id)
            if not groups:
                del self._of_response[name]


def _names(record: GroupRecord) -> set[str]:
    """What the group is found by, beside its own id."""
    return {response_id(name) for name in (record.group_id, *record.request_ids)} | set(record.request_ids)


def response_id(group_id: str) -> str:
    """The id of the response a group went out with: vLLM adds a dash and the prompt's number to it, or nothing."""
    head, dash, number = group_id.rpartition("-")
    return head if dash and number.isdigit() and len(number) <= LONGEST_NUMBER else group_id


def _prompt_number(record: GroupRecord, response: str) -> int:
    """Of the response's prompts the first that the group answered."""
    names = (name for name in (record.group_id, *record.request_ids) if response_id(name) == response != name)
    return min((int(name.rpartition("-")[2]) for name in names), default=0)
