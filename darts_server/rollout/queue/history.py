"""What was done before, remembered for a while so that repeated requests change nothing."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from darts_server.exceptions import Conflict
from darts_server.rollout.queue.entries import Acknowledged, JobId

KEPT_ACKNOWLEDGED = 20_000
"""Of each owner: an acknowledgement, or a put with the same id, may be repeated while so many newer ones came."""
KEPT_NAMES = 100_000
"""Of each owner: ids that puts with an idempotency key returned."""

ACKNOWLEDGED, PUT = "acknowledged", "put"
Changes = dict[tuple[str, str], bytes | None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """``names``: ids, in the order of the prompts. ``added``: how many of them are new."""

    names: Sequence[str]
    added: int


class Acknowledgements:
    """The newest acknowledgements of each owner."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._by_owner: dict[str, OrderedDict[int, Acknowledged]] = {}
        self._by_name: dict[tuple[JobId, str], Acknowledged] = {}

    def add(self, done: Acknowledged) -> None:
        kept = self._by_owner.setdefault(done.job[0], OrderedDict())
        kept[done.number] = done
        self._by_name[done.job, done.name] = done
        self._changes[ACKNOWLEDGED, str(done.number)] = done.encode()
        while len(kept) > KEPT_ACKNOWLEDGED:
            self._forget(kept.popitem(last=False)[1])

    def load(self, values: Iterator[bytes]) -> None:
        for done in sorted(map(Acknowledged.decode, values), key=lambda done: done.number):
            self._by_owner.setdefault(done.job[0], OrderedDict())[done.number] = done
            self._by_name[done.job, done.name] = done

    def named(self, job_id: JobId, name: str) -> Acknowledged | None:
        """Find what was acknowledged of a job under a caller's id."""
        return self._by_name.get((job_id, name))

    def numbered(self, number: int, may_see: Callable[[str], bool]) -> Acknowledged | None:
        """Find what was acknowledged, if it is the caller's."""
        return next((kept[number] for owner, kept in self._by_owner.items() if number in kept and may_see(owner)), None)

    def drop(self, job_id: JobId) -> None:
        """Forget everything of a job."""
        kept = self._by_owner.get(job_id[0], OrderedDict())
        for number in [number for number, done in kept.items() if done.job == job_id]:
            self._forget(kept.pop(number))

    @property
    def last_number(self) -> int:
        return max((number for kept in self._by_owner.values() for number in kept), default=0)

    def _forget(self, done: Acknowledged) -> None:
        self._by_name.pop((done.job, done.name), None)
        self._changes[ACKNOWLEDGED, str(done.number)] = None


class Puts:
    """The newest idempotency keys of each owner, with what their requests returned."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._by_owner: dict[str, OrderedDict[str, tuple[str, PutResult]]] = {}

    def find(self, owner: str, key: str, digest: str) -> PutResult | None:
        """Find the result of the same request.

        Raises:
            Conflict: the key was used for another one.
        """
        found = self._by_owner.get(owner, OrderedDict()).get(key)
        if found is None:
            return None
        if found[0] != digest:
            raise Conflict("Idempotency-Key", "names a request with another body; choose another key for this one")
        return PutResult(found[1].names, 0)

    def add(self, owner: str, key: str, digest: str, result: PutResult) -> None:
        kept = self._by_owner.setdefault(owner, OrderedDict())
        kept[key] = digest, result
        self._changes[PUT, _put_key(owner, key)] = json.dumps([owner, key, digest, list(result.names)]).encode()
        total = sum(len(each.names) + 1 for _, each in kept.values())
        while total > KEPT_NAMES and len(kept) > 1:
            old, (_, each) = kept.popitem(last=False)
            total -= len(each.names) + 1
            self._changes[PUT, _put_key(owner, old)] = None

    def load(self, values: Iterator[bytes]) -> None:
        for value in values:
            owner, key, digest, names = json.loads(value)
            self._by_owner.setdefault(owner, OrderedDict())[key] = digest, PutResult(names, 0)


def _put_key(owner: str, key: str) -> str:
    return json.dumps([owner, key])
