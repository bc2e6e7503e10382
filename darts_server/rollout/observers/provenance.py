"""Records of the last groups, by group id and by the id of the response that returned them."""

from collections import OrderedDict

from darts_server.observers import GroupObserver
from darts_server.types import GroupRecord

DEFAULT_KEPT = 10_000
"""Number of groups: the last dozens of training steps. A record of 12 candidates takes about 3 KB."""

MAX_NUMBER_DIGITS = 7
"""Digits of a prompt's number. Longer ones are random ids that happen to have no letter."""


class Provenance(GroupObserver):
    """Keep the records of the newest ``kept`` groups that have ended."""

    def __init__(self, kept: int = DEFAULT_KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, GroupRecord] = OrderedDict()
        self._by_response: dict[str, list[str]] = {}

    def group_ended(self, record: GroupRecord) -> None:
        if record.group_id in self._records:
            self._drop(record.group_id)  # a caller has reused its request id: the newer group counts
        self._records[record.group_id] = record
        for name in _other_names(record):
            self._by_response.setdefault(name, []).append(record.group_id)
        while len(self._records) > self._kept:
            self._drop(next(iter(self._records)))

    def find(self, name: str) -> list[GroupRecord]:
        """Find the group with that id, or all groups of that response in prompt order; empty if none is kept.

        A group joined from single requests is found by each request's id, and by its callers' name for it.
        """
        if name in self._records:
            return [self._records[name]]
        records = [self._records[group] for group in self._by_response.get(name, ())]
        return sorted(records, key=lambda record: _prompt_number(record, name))

    def _drop(self, group_id: str) -> None:
        for name in _other_names(self._records.pop(group_id)):
            groups = self._by_response[name]
            groups.remove(group_id)
            if not groups:
                del self._by_response[name]


def _other_names(record: GroupRecord) -> set[str]:
    """The names by which a group is found beside its own id: those of responses and of single requests."""
    return {response_id(name) for name in (record.group_id, *record.request_ids)} | set(record.request_ids)


def response_id(group_id: str) -> str:
    """The id of the response that returned a group: vLLM appends a dash and the prompt's number to it, or nothing."""
    head, dash, number = group_id.rpartition("-")
    return head if dash and number.isdigit() and len(number) <= MAX_NUMBER_DIGITS else group_id


def _prompt_number(record: GroupRecord, response: str) -> int:
    """Number of the first of the response's prompts that the group answered."""
    names = (name for name in (record.group_id, *record.request_ids) if response_id(name) == response != name)
    return min((int(name.rpartition("-")[2]) for name in names), default=0)
