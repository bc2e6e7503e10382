from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from darts_server.records import GroupKey, GroupRecord
from darts_server.serving.fair_cache import FairCache

DEFAULT_KEPT = 10_000
"""Dozens of training steps."""
DEFAULT_KEPT_CANDIDATES = 160_000
"""16 per group. A candidate takes 0.45 KB, all candidates 72 MB."""

MAX_NUMBER_DIGITS = 7
"""Longer numbers are random ids that happen to have no letter."""


class Provenance:
    """Keeps the records of ``kept`` groups with ``kept_candidates`` candidates. At a limit, see `FairCache`."""

    def __init__(self, kept: int = DEFAULT_KEPT, kept_candidates: int = DEFAULT_KEPT_CANDIDATES) -> None:
        # By owner and group id.
        self._records: FairCache[str, GroupRecord] = FairCache(kept, kept_candidates)
        self._keys_by_name: dict[str, list[GroupKey]] = {}

    def group_ended(self, record: GroupRecord) -> None:
        # A caller may reuse a request id. The newer group replaces the older.
        reused = self._records.pop(record.owner, record.group_id)
        if reused is not None:
            self._forget_names(reused)
        for name in _names(record):
            self._keys_by_name.setdefault(name, []).append(record.key)
        for _, dropped in self._records.put(record.owner, record.group_id, record, len(record.candidates)):
            self._forget_names(dropped)

    def find(self, name: str, may_see: Callable[[str | None], bool]) -> list[GroupRecord]:
        """Find the newest group with the id ``name``, or all groups of the response with this id in prompt order.

        A joined group is also found by the id of each request, and by the callers' name.
        """
        keys = self._keys_by_name.get(name, ())
        records = [self._records.entries_of(owner)[group_id] for owner, group_id in keys if may_see(owner)]
        # Callers may choose the same group id.
        with_group_id = [record for record in records if record.group_id == name]
        if with_group_id:
            return with_group_id[-1:]
        return sorted(records, key=lambda record: _prompt_number(record, name))

    def newest(self, may_see: Callable[[str | None], bool], count: int) -> list[GroupRecord]:
        newest_of_owners: list[GroupRecord] = []
        for owner, _ in self._records:
            if may_see(owner):
                newest_of_owners += islice(self._records.newest(owner), count)
        newest_of_owners.sort(key=attrgetter("ended_at"), reverse=True)
        return newest_of_owners[:count]

    def _forget_names(self, record: GroupRecord) -> None:
        for name in _names(record):
            keys = self._keys_by_name[name]
            keys.remove(record.key)
            if not keys:
                del self._keys_by_name[name]


def _names(record: GroupRecord) -> set[str]:
    """Return all names that a group is found by."""
    ids = {record.group_id, *record.request_ids}
    return ids | set(map(response_id, ids))


def response_id(group_id: str) -> str:
    """Return the id of a group's response. vLLM may append a dash and the prompt's number to it."""
    response, dash, prompt_number = group_id.rpartition("-")
    if dash and prompt_number.isdigit() and len(prompt_number) <= MAX_NUMBER_DIGITS:
        return response
    return group_id


def _prompt_number(record: GroupRecord, response: str) -> int:
    """Return the lowest number of the response's prompts in the group, or 0 if no name has a number."""
    # vLLM names the requests of a response RESPONSE-0, RESPONSE-1, and so on.
    numbers = []
    for name in (record.group_id, *record.request_ids):
        if name != response and response_id(name) == response:
            numbers.append(int(name.rpartition("-")[2]))
    return min(numbers, default=0)
