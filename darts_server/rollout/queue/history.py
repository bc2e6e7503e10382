"""What was done before, remembered for a while so that repeated requests change nothing."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from darts_server.exceptions import Conflict
from darts_server.rollout.queue.entries import Acknowledged, Entry, JobId

KEPT_ACKNOWLEDGED = 40_000
"""Of each owner: an acknowledgement, or a put with the same id, may be repeated while so many newer ones came. It is as
many as a request acknowledges."""
KEPT_NAMES = 100_000
"""Of each owner: ids that puts with an idempotency key returned."""

ACKNOWLEDGED, PUT = "acknowledged", "put"
Changes = dict[tuple[str, str], bytes | None]


@dataclass(slots=True)
class Counts:
    """What has happened since the start. ``stale``, ``aborted``: groups that started again, and why."""

    put: int = 0
    handed_out: int = 0
    acknowledged: int = 0
    expired: int = 0
    failed: int = 0
    stale: int = 0
    aborted: int = 0
    dropped: int = 0


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
        self._by_job: dict[JobId, dict[str, Acknowledged]] = {}
        self._last = 0

    def add(self, entry: Entry, lease: str) -> None:
        self._last += 1
        done = Acknowledged(entry.number, entry.job, entry.name, entry.digest, lease, self._last)
        kept = self._keep(done)
        self._changes[ACKNOWLEDGED, str(done.number)] = done.encode()
        while len(kept) > KEPT_ACKNOWLEDGED:
            self._forget(kept.popitem(last=False)[1])

    def load(self, values: Iterator[bytes]) -> None:
        for done in sorted(map(Acknowledged.decode, values), key=lambda done: (done.order, done.number)):
            self._keep(done)
            self._last = done.order

    def of_job(self, job_id: JobId) -> Mapping[str, Acknowledged]:
        """Return what was acknowledged of a job, by the caller's ids."""
        return self._by_job.get(job_id, {})

    def numbered(self, number: int, may_see: Callable[[str], bool]) -> Acknowledged | None:
        """Find what was acknowledged, if it is the caller's."""
        return next((kept[number] for owner, kept in self._by_owner.items() if number in kept and may_see(owner)), None)

    def drop(self, job_id: JobId) -> None:
        """Forget everything of a job."""
        kept = self._by_owner.get(job_id[0], OrderedDict())
        for done in self._by_job.pop(job_id, {}).values():
            del kept[done.number]
            self._changes[ACKNOWLEDGED, str(done.number)] = None

    @property
    def last_number(self) -> int:
        return max((number for kept in self._by_owner.values() for number in kept), default=0)

    def _keep(self, done: Acknowledged) -> OrderedDict[int, Acknowledged]:
        self._by_job.setdefault(done.job, {})[done.name] = done
        kept = self._by_owner.setdefault(done.job[0], OrderedDict())
        kept[done.number] = done
        return kept

    def _forget(self, done: Acknowledged) -> None:
        del self._by_job[done.job][done.name]
        self._changes[ACKNOWLEDGED, str(done.number)] = None


@dataclass(frozen=True, slots=True)
class KnownPut:
    """A put with an idempotency key. ``names``: that it returned. ``job``: the number of its job."""

    owner: str
    key: str
    digest: str
    names: Sequence[str]
    number: int = 0
    job: int = 0


class Puts:
    """The newest idempotency keys of each owner, with what their requests returned."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._by_owner: dict[str, OrderedDict[str, KnownPut]] = {}
        self._by_job: dict[int, dict[tuple[str, str], KnownPut]] = {}
        self._names: Counter[str] = Counter()
        self._last = 0

    def find(self, owner: str, key: str, digest: str) -> KnownPut | None:
        """Find the same request.

        Raises:
            Conflict: the key was used for another one.
        """
        found = self._by_owner.get(owner, OrderedDict()).get(key)
        if found is not None and found.digest != digest:
            raise Conflict("Idempotency-Key", "names a request with another body; choose another key for this one")
        return found

    def add(self, owner: str, key: str, digest: str, names: Sequence[str], job: int) -> None:
        self._last += 1
        put = KnownPut(owner, key, digest, list(names), self._last, job)
        kept = self._keep(put)
        row = [owner, key, digest, put.names, put.number, job]
        self._changes[PUT, _put_key(put)] = json.dumps(row).encode()
        while self._names[owner] > KEPT_NAMES and len(kept) > 1:
            self._forget(next(iter(kept.values())))

    def drop(self, job: int) -> None:
        """Forget the puts of a job, by its number."""
        for put in list(self._by_job.get(job, {}).values()):
            self._forget(put)

    def load(self, values: Iterator[bytes]) -> None:
        for put in sorted((KnownPut(*json.loads(value)) for value in values), key=lambda put: put.number):
            self._keep(put)
            self._last = put.number

    def _keep(self, put: KnownPut) -> OrderedDict[str, KnownPut]:
        kept = self._by_owner.setdefault(put.owner, OrderedDict())
        kept[put.key] = put
        self._by_job.setdefault(put.job, {})[put.owner, put.key] = put
        self._names[put.owner] += len(put.names) + 1
        return kept

    def _forget(self, put: KnownPut) -> None:
        del self._by_owner[put.owner][put.key]
        of_job = self._by_job[put.job]
        del of_job[put.owner, put.key]
        if not of_job:
            del self._by_job[put.job]
        self._names[put.owner] -= len(put.names) + 1
        self._changes[PUT, _put_key(put)] = None


def _put_key(put: KnownPut) -> str:
    return json.dumps([put.owner, put.key])
