"""Records of the last groups, by group id and by the id of the response that returned them."""

from collections import OrderedDict
from collections.abc import Callable

from darts_server.records import GroupKey, GroupRecord

DEFAULT_KEPT = 10_000
"""Number of groups: the last dozens of training steps."""
DEFAULT_KEPT_CANDIDATES = 160_000
"""Of all kept groups together: 16 for each of 10,000 groups. A candidate takes 0.45 KB, all of them 72 MB."""

MAX_NUMBER_DIGITS = 7
"""Digits of a prompt's number. Longer ones are random ids that happen to have no letter."""


class Provenance:
    """Keep the records of the newest groups that have ended: at most ``kept``, with ``kept_candidates`` in all."""

    def __init__(self, kept: int = DEFAULT_KEPT, kept_candidates: int = DEFAULT_KEPT_CANDIDATES) -> None:
        self._kept = kept
        self._kept_candidates = kept_candidates
        self._candidates = 0
        self._records: OrderedDict[GroupKey, GroupRecord] = OrderedDict()
        self._by_name: dict[str, list[GroupKey]] = {}

    def group_ended(self, record: GroupRecord) -> None:
        key = record.key
        if key in self._records:
            self._drop(key)  # a caller has reused its request id: the newer group counts
        self._records[key] = record
        self._candidates += len(record.candidates)
        for name in _names(record):
            self._by_name.setdefault(name, []).append(key)
        # The newest group is kept in any case.
        while len(self._records) > self._kept or (self._candidates > self._kept_candidates and len(self._records) > 1):
            self._drop(next(iter(self._records)))

    def find(self, name: str, may_see: Callable[[str | None], bool]) -> list[GroupRecord]:
        """Find the group with that id, or all groups of that response in prompt order; empty if none is kept.

        A group joined from single requests is found by each request's id, and by its callers' name for it.

        ``may_see``: whether the groups of an owner may be returned.
        """
        records = [self._records[key] for key in self._by_name.get(name, ()) if may_see(key[0])]
        same = [record for record in records if record.group_id == name]
        return same[-1:] or sorted(records, key=lambda record: _prompt_number(record, name))

    def _drop(self, key: GroupKey) -> None:
        record = self._records.pop(key)
        self._candidates -= len(record.candidates)
        for name in _names(record):
            keys = self._by_name[name]
            keys.remove(key)
            if not keys:
                del self._by_name[name]


def _names(record: GroupRecord) -> set[str]:
    """The names by which a group is found: its id, and those of responses and of single requests."""
    names: set[str] = set()
    for name in (record.group_id, *record.request_ids):
        names |= {name, response_id(name)}
    return names


def response_id(group_id: str) -> str:
    """The id of the response that returned a group: vLLM appends a dash and the prompt's number to it, or nothing."""
    head, dash, number = group_id.rpartition("-")
    return head if dash and number.isdigit() and len(number) <= MAX_NUMBER_DIGITS else group_id


def _prompt_number(record: GroupRecord, response: str) -> int:
    """Number of the first of the response's prompts that the group answered."""
    names = (name for name in (record.group_id, *record.request_ids) if response_id(name) == response != name)
    return min((int(name.rpartition("-")[2]) for name in names), default=0)
