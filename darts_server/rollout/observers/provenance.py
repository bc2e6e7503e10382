"""Records of the last groups, by group id and by the id of the response that returned them."""

from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from darts_server.records import GroupKey, GroupRecord
from darts_server.serving.kept import Kept

DEFAULT_KEPT = 10_000
"""Number of groups: the last dozens of training steps."""
DEFAULT_KEPT_CANDIDATES = 160_000
"""Of all kept groups together: 16 for each of 10,000 groups. A candidate takes 0.45 KB, all of them 72 MB."""

MAX_NUMBER_DIGITS = 7
"""Digits of a prompt's number. Longer ones are random ids that happen to have no letter."""


class Provenance:
    """Keep the records of the newest groups that have ended: at most ``kept``, with ``kept_candidates`` in all.

    At these limits, the server drops the oldest group of the caller that has most, see `Kept`.
    """

    def __init__(self, kept: int = DEFAULT_KEPT, kept_candidates: int = DEFAULT_KEPT_CANDIDATES) -> None:
        self._records: Kept[str, GroupRecord] = Kept(kept, kept_candidates)  # by id
        self._by_name: dict[str, list[GroupKey]] = {}

    def group_ended(self, record: GroupRecord) -> None:
        reused = self._records.pop(record.owner, record.group_id)
        if reused is not None:  # a caller has reused its request id: the newer group counts
            self._forget_names(reused)
        for name in _names(record):
            self._by_name.setdefault(name, []).append(record.key)
        for _, dropped in self._records.put(record.owner, record.group_id, record, len(record.candidates)):
            self._forget_names(dropped)

    def find(self, name: str, may_see: Callable[[str | None], bool]) -> list[GroupRecord]:
        """Find the group with that id, or all groups of that response in prompt order; empty if none is kept.

        A group joined from single requests is found by each request's id, and by its callers' name for it.

        ``may_see``: whether the groups of an owner may be returned.
        """
        records = [self._records.of(owner)[each] for owner, each in self._by_name.get(name, ()) if may_see(owner)]
        same = [record for record in records if record.group_id == name]
        return same[-1:] or sorted(records, key=lambda record: _prompt_number(record, name))

    def newest(self, may_see: Callable[[str | None], bool], count: int) -> list[GroupRecord]:
        """Return the records of these owners' groups that ended last, the newest first."""
        found: list[GroupRecord] = []
        for owner, _ in self._records:
            if may_see(owner):
                found += islice(self._records.newest(owner), count)
        found.sort(key=attrgetter("ended_at"), reverse=True)
        return found[:count]

    def _forget_names(self, record: GroupRecord) -> None:
        for name in _names(record):
            keys = self._by_name[name]
            keys.remove(record.key)
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
