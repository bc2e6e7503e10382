"""The queue as a state machine: what was put, runs, is ready, is leased and was acknowledged. No I/O and no clock.

Every method that changes something adds to `changes` what has to be on the disk before its caller is answered. After a
crash the ledger is what `load` makes of the changes that were written, in their order.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from darts_server.exceptions import Conflict, NotFound, QuotaReached, TooLarge
from darts_server.rollout.queue.entries import (
    Acknowledged,
    AckOutcome,
    Entry,
    EntryState,
    Job,
    JobId,
    JobOptions,
    Terms,
)
from darts_server.rollout.queue.history import ACKNOWLEDGED, PUT, Acknowledgements, Changes, PutResult, Puts
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.order import FairShare

RETRY_SECONDS = 5
MAX_JOBS = 1_000
"""Of each owner."""
MODEL, JOB, TERMS, ENTRY, PROMPT, GROUP = "model", "job", "terms", "entry", "prompt", "group"
"""Kinds of what is on the disk, with those of `history`."""
LOST_VERSION = -(2**40)
"""Of groups whose weights are not those that have their number now: they are too old for every job."""
REMEDY = "take and acknowledge groups, and retry"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Of each owner. ``prompts``: that have not been acknowledged. ``bytes``: of prompts and of ready groups."""

    prompts: int = 100_000
    bytes: int = 1 << 29


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt to put. ``name``: the caller's id; ``None`` for one of ours. ``document``: the prompt, encoded.

    ``digest``: of the prompt and its terms. ``field``: names it in errors.
    """

    document: bytes
    digest: str
    name: str | None = None
    prompt_key: str | None = None
    field: str = "prompts"


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


class Ledger:
    """Keep jobs and their entries.

    Args:
        limits: of each owner.
        default_staleness: of jobs that name none.
        new_name: returns a string that cannot be guessed and that is never used twice.
    """

    def __init__(self, limits: QueueLimits, default_staleness: int, new_name: Callable[[], str]) -> None:
        self.limits = limits
        self.counts = Counts()
        self.changes: Changes = {}
        """What is to be written: by kind and key, ``None`` to delete. Whoever writes it empties it."""
        self.stopped: list[int] = []
        """Numbers of entries whose groups run and are no longer wanted; whoever stops them empties the list."""
        self.staleness: list[int] = []
        """Weight versions since the first token of each group that was handed out; emptied by whoever counts them."""
        self._default_options = JobOptions(max_staleness=default_staleness)
        self._new_name = new_name
        self._version = 0
        self._model = ""
        self._entries: dict[int, Entry] = {}
        self._jobs: dict[JobId, JobEntries] = {}
        self._terms: dict[int, tuple[JobId, Terms]] = {}
        self._terms_used: Counter[int] = Counter()
        self._number = 0
        self._ready_number = 0
        self._owned: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._leases: dict[str, Entry] = {}  # the latest of each entry
        self._expiries: list[tuple[float, int, str]] = []
        self._acknowledgements = Acknowledgements(self.changes)
        self._puts = Puts(self.changes)
        self._owners: FairShare[str] = FairShare()
        self._shares: dict[str, FairShare[JobId]] = {}
        self._charged: dict[int, float] = {}  # tokens that a running group is expected to take

    def load(self, items: Callable[[str], Iterable[tuple[str, bytes]]]) -> None:
        """Read everything that was written. ``items``: yields keys and values of a kind."""
        for _, value in items(MODEL):
            self._model = value.decode()
        for _, value in items(JOB):
            job = Job.decode(value)
            self._jobs[job.id] = JobEntries(job)
        for key, value in items(TERMS):
            (owner, name), terms = json.loads(value)
            self._terms[int(key)] = (owner, name), Terms(**terms)
        for entry in sorted((Entry.decode(value) for _, value in items(ENTRY)), key=lambda entry: entry.number):
            self._add(entry)
        self._acknowledgements.load(value for _, value in items(ACKNOWLEDGED))
        self._puts.load(value for _, value in items(PUT))
        self._number = max([self._acknowledgements.last_number, *self._entries])
        self._ready_number = max((entry.ready_number for entry in self._entries.values()), default=0)

    # --- versions -----------------------------------------------------------

    def set_version(self, version: int, model: str = "") -> None:
        """Set the version of the weights that the server starts with, and the model.

        What was generated under other weights starts again: their number says nothing any more, as the server counts
        from its own start. Nothing counts as taken, so no job waits for an update that was lost.
        """
        is_other_model = self._model not in ("", model)
        self._version = version
        if model != self._model:
            self._model = model
            self.changes[MODEL, ""] = model.encode()
        for each in self._jobs.values():
            if each.job.taken:
                each.job.taken = 0
                self._save_job(each.job)
            for entry in [*each.ready.values(), *each.leased.values()]:
                entry.leased_version = LOST_VERSION
                if is_other_model or entry.version != version:
                    each.remove(entry)
                    entry.version = LOST_VERSION
                    each.place(entry, entry.state)
                self._save(entry)
        self.restart_stale(version)

    @property
    def version(self) -> int:
        return self._version

    def update(self, version: int) -> None:
        """Follow an update: what is too old now, or of a version that is gone, starts again."""
        self._version = version
        self.restart_stale(version)

    def restart_stale(self, version: int, *, ready: bool = True) -> None:
        """Start all groups again that run and would be too old under a version, and those that are ``ready``."""
        for each in self._jobs.values():
            self._restart_stale(each, version, ready=ready)

    def begun_under(self, number: int, version: int) -> None:
        """Set the version of the first token of a running group, as far as it is known."""
        if self.is_running(number):
            entry = self._entries[number]
            each = self._jobs[entry.job]
            each.remove(entry)
            entry.version = version
            each.place(entry, EntryState.RUNNING)

    # --- prompts in ---------------------------------------------------------

    def put(
        self,
        job_id: JobId,
        prompts: Sequence[NewPrompt],
        terms: Terms,
        now: float,
        *,
        priority: int = 0,
        options: Mapping[str, object] | None = None,
        is_admin: bool = False,
        key: str | None = None,
        digest: str = "",
    ) -> PutResult:
        """Add prompts to a job, which is created if there is none. Prompts whose name is known are not added again.

        ``now``: Unix seconds. ``options``: of the job, those that change. ``key``: an idempotency key, and the
        ``digest`` of its request.

        Raises:
            Conflict: the key, or the name of a prompt, was used for something else.
            TooLarge, QuotaReached: the owner would have too much. Whatever is raised, nothing was changed.
        """
        if key is not None and (known := self._puts.find(job_id[0], key, digest)) is not None:
            return known
        new = self._new_names(job_id, prompts)
        self._check_room(job_id, [prompt for prompt in prompts if prompt.name is None or prompt.name in new])
        each = self._open_job(job_id, options or {}, is_admin)
        terms_number = self._terms_number(job_id, terms) if prompts else 0
        names: list[str] = []
        before = self.counts.put
        for prompt in prompts:
            if prompt.name is not None and prompt.name not in new:
                names.append(prompt.name)
                continue
            self._number += 1
            number = self._number
            name = prompt.name or f"{number}-{self._new_name()}"
            new.discard(name)
            names.append(name)
            entry = Entry(
                number=number,
                job=each.job.id,
                name=name,
                terms=terms_number,
                digest=prompt.digest,
                prompt_key=prompt.prompt_key,
                priority=priority,
                prompt_bytes=len(prompt.document),
                queued_at=now,
            )
            self._add(entry)
            self._save(entry)
            self.changes[PROMPT, str(number)] = prompt.document
            self.counts.put += 1
        if prompts and not self._terms_used[terms_number]:  # all of them were known
            self._drop_terms(terms_number)
        result = PutResult(names, self.counts.put - before)
        if key is not None:
            self._puts.add(job_id[0], key, digest, result)
        return result

    # --- running ------------------------------------------------------------

    def start_next(self, expected: Callable[[Entry], float]) -> Entry | None:
        """Start the next prompt: of the owner, and of its job, that got least. ``None`` if none may start now.

        ``expected``: returns how many tokens a group will take.
        """
        able: dict[str, list[JobId]] = {}
        for job_id, each in self._jobs.items():
            if len(each.order) and self.waits_for(job_id) is None:
                able.setdefault(job_id[0], []).append(job_id)
        if not able:
            return None
        owner = self._owners.choose(able)
        job_id = self._shares.setdefault(owner, FairShare()).choose(able[owner])
        each = self._jobs[job_id]
        most = each.startable(self._version)
        entry = self._entries[each.order.pop(most, self._entries, expected)]
        each.remove(entry)
        entry.version = self._version
        each.place(entry, EntryState.RUNNING)
        self._charged[entry.number] = expected(entry)
        self._charge(entry, self._charged[entry.number])
        return entry

    def waits_for(self, job_id: JobId) -> str | None:
        """Return why no prompt of a job may start: ``weights`` or ``consumer``; ``None`` if one may."""
        each = self._jobs[job_id]
        if self._bytes[job_id[0]] >= self.limits.bytes and self._has_groups(job_id[0]):
            return "consumer"
        if each.startable(self._version) > 0:
            return None
        size = each.job.options.groups_per_version or 0
        return "consumer" if each.job.taken_under(self._version) < size else "weights"

    def is_running(self, number: int) -> bool:
        entry = self._entries.get(number)
        return entry is not None and entry.state is EntryState.RUNNING

    def end(self, number: int, group: bytes, version: int | None, tokens: int, *, failed: bool) -> None:
        """Record the group of a running entry; ``group``: encoded. Of one that does not run, nothing.

        ``version``: of its first token; ``None`` if it is not known better than it was.
        """
        if not self.is_running(number):
            return
        entry = self._entries[number]
        each = self._jobs[entry.job]
        self._charge(entry, tokens - self._charged.pop(number))
        each.remove(entry)
        self._ready_number += 1
        entry.is_failed, entry.group_bytes, entry.ready_number = failed, len(group), self._ready_number
        entry.version = entry.version if version is None else version
        self._bytes[entry.owner] += entry.group_bytes
        each.place(entry, EntryState.READY)
        self.counts.failed += failed
        self.changes[GROUP, str(number)] = group
        self._save(entry)
        self._restart_if_stale(each, entry, self._version)

    def give_back(self, number: int, *, aborted: bool = False) -> None:
        """Queue a running entry again, as its group was not started or was aborted from outside."""
        if self.is_running(number):
            entry = self._entries[number]
            self.counts.aborted += aborted
            entry.aborts += aborted
            self._queue_again(entry)

    # --- groups out ---------------------------------------------------------

    def take(self, job_id: JobId, count: int, at_least: int, now: float, lease_seconds: float) -> list[Entry]:
        """Lease the next groups of a job: up to ``count``, and none if there are fewer than ``at_least``."""
        self.expire(now)
        each = self._jobs.get(job_id)
        if each is None:
            return []
        chosen = each.next_ready(count, at_least, self._version)
        for entry in chosen:
            each.remove(entry)
            if entry.lease is not None:
                del self._leases[entry.lease]
            entry.lease, entry.lease_until = f"{entry.number}-{self._new_name()}", now + lease_seconds
            entry.leased_version = self._version
            self._leases[entry.lease] = entry
            heapq.heappush(self._expiries, (entry.lease_until, entry.number, entry.lease))
            each.place(entry, EntryState.LEASED)
            self._count_taken(entry, 1)
            if not entry.is_failed:
                self.staleness.append(max(0, self._version - entry.version))
            self.counts.handed_out += 1
            self._save(entry)
        return chosen

    def release(self, lease: str) -> None:
        """Take a lease back that did not reach its consumer."""
        entry = self._leases.get(lease)
        if entry is not None and entry.state is EntryState.LEASED:
            self._end_lease(entry)

    def is_leased(self, lease: str) -> bool:
        """Return whether a lease has neither been acknowledged nor expired."""
        entry = self._leases.get(lease)
        return entry is not None and entry.state is EntryState.LEASED

    def acknowledge(self, leases: Sequence[str], may_see: Callable[[str], bool]) -> list[AckOutcome]:
        """Acknowledge leases, in their order. ``may_see``: whether what belongs to an owner is the caller's."""
        return [self._acknowledge(lease, may_see) for lease in leases]

    def expire(self, now: float) -> None:
        """Make groups ready again whose leases have expired."""
        while self._expiries and self._expiries[0][0] <= now:
            _, number, lease = heapq.heappop(self._expiries)
            entry = self._entries.get(number)
            if entry is not None and entry.state is EntryState.LEASED and entry.lease == lease:
                self.counts.expired += 1
                self._end_lease(entry)

    @property
    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    # --- jobs ---------------------------------------------------------------

    def drop(self, job_id: JobId) -> int:
        """Delete a job with everything in it; how many entries it had. What runs is stopped.

        Raises:
            NotFound
        """
        each = self._jobs.get(job_id)
        if each is None:
            raise NotFound("job", f"you have no job {job_id[1]!r}; GET /darts/v1/queue lists yours")
        entries = list(each)
        for entry in entries:
            self._remove(entry)
        self._acknowledgements.drop(job_id)
        del self._jobs[job_id]
        self._shares.get(job_id[0], FairShare()).forget(job_id)
        self.changes[JOB, json.dumps(job_id)] = None
        self.counts.dropped += len(entries)
        return len(entries)

    def jobs(self, may_see: Callable[[str], bool] = lambda owner: True) -> Iterator[JobEntries]:
        """Yield the jobs of owners that a caller may see."""
        return (each for each in self._jobs.values() if may_see(each.job.id[0]))

    def job(self, job_id: JobId) -> Job | None:
        return None if (each := self._jobs.get(job_id)) is None else each.job

    def entry(self, number: int) -> Entry | None:
        return self._entries.get(number)

    def terms(self, entry: Entry) -> Terms:
        return self._terms[entry.terms][1]

    def oldest(self) -> float | None:
        """Return when the oldest prompt came that was not acknowledged, in Unix seconds."""
        first = next(iter(self._entries.values()), None)  # in the order of arrival
        return None if first is None else first.queued_at

    # --- helpers ------------------------------------------------------------

    def _new_names(self, job_id: JobId, prompts: Sequence[NewPrompt]) -> set[str]:
        """Return the callers' ids that are not known.

        Raises:
            Conflict: one is that of another prompt.
        """
        each = self._jobs.get(job_id)
        new: dict[str, str] = {}
        for prompt in prompts:
            if prompt.name is None:
                continue
            known: Entry | Acknowledged | None = None if each is None else each.names.get(prompt.name)
            known = known or self._acknowledgements.named(job_id, prompt.name)
            digest = new.setdefault(prompt.name, prompt.digest) if known is None else known.digest
            if digest != prompt.digest:
                raise Conflict(
                    f"{prompt.field}.id", f"{prompt.name!r} is another prompt of this job; choose another id"
                )
        return set(new)

    def _check_room(self, job_id: JobId, new: Sequence[NewPrompt]) -> None:
        if not new and job_id in self._jobs:
            return
        owner, limits, size = job_id[0], self.limits, sum(len(prompt.document) for prompt in new)
        if len(new) > limits.prompts or size > limits.bytes:
            raise TooLarge(
                "prompts",
                f"must be at most {limits.prompts} (--queue-prompts), with {limits.bytes} bytes (half of "
                "--queue-bytes); send less per request",
            )
        if self._owned[owner] + len(new) > limits.prompts:
            raise QuotaReached(
                f"this key has {self._owned[owner]} prompts in the queue, and {len(new)} more would exceed "
                f"{limits.prompts} (--queue-prompts); {REMEDY}",
                RETRY_SECONDS,
            )
        if self._bytes[owner] + size > limits.bytes:
            raise QuotaReached(
                f"this key's prompts and groups in the queue have {self._bytes[owner]} bytes, and {size} more would "
                f"exceed {limits.bytes} (half of --queue-bytes); {REMEDY}",
                RETRY_SECONDS,
            )
        if job_id not in self._jobs and sum(each[0] == owner for each in self._jobs) >= MAX_JOBS:
            raise QuotaReached(f"this key has {MAX_JOBS} jobs; delete one that is done, and retry", RETRY_SECONDS)

    def _open_job(self, job_id: JobId, options: Mapping[str, object], is_admin: bool) -> JobEntries:
        each = self._jobs.get(job_id)
        if each is None:
            each = self._jobs[job_id] = JobEntries(Job(job_id, self._default_options, is_admin, self._version))
        each.job.options = replace(each.job.options, **options)  # type: ignore[arg-type]
        self._save_job(each.job)
        self._restart_stale(each, self._version)
        return each

    def _terms_number(self, job_id: JobId, terms: Terms) -> int:
        """Return the number of these terms, which are kept while an entry has them."""
        last = max(self._terms, default=0)
        if self._terms.get(last) == (job_id, terms):  # most prompts have those of the previous one
            return last
        number = next((number for number, each in self._terms.items() if each == (job_id, terms)), last + 1)
        self._terms[number] = job_id, terms
        self.changes[TERMS, str(number)] = json.dumps([job_id, asdict(terms)], separators=(",", ":")).encode()
        return number

    def _add(self, entry: Entry) -> None:
        """Add an entry that is new, or was loaded."""
        self._entries[entry.number] = entry
        self._owned[entry.owner] += 1
        self._bytes[entry.owner] += entry.size
        self._terms_used[entry.terms] += 1
        if entry.lease is not None:
            self._leases[entry.lease] = entry
            heapq.heappush(self._expiries, (entry.lease_until, entry.number, entry.lease))
        self._jobs[entry.job].place(entry, entry.state)

    def _remove(self, entry: Entry) -> None:
        """Delete an entry, wherever it is."""
        self._stop(entry)
        self._jobs[entry.job].remove(entry)
        self._leases.pop(entry.lease or "", None)
        del self._entries[entry.number]
        self._owned[entry.owner] -= 1
        self._bytes[entry.owner] -= entry.size
        for kind in (ENTRY, PROMPT, GROUP):
            self.changes[kind, str(entry.number)] = None
        self._terms_used[entry.terms] -= 1
        if not self._terms_used[entry.terms]:
            self._drop_terms(entry.terms)

    def _drop_terms(self, number: int) -> None:
        del self._terms[number]
        self.changes[TERMS, str(number)] = None

    def _stop(self, entry: Entry) -> None:
        """Stop an entry's group, if it runs."""
        if entry.state is EntryState.RUNNING:
            self.stopped.append(entry.number)
            self._charge(entry, -self._charged.pop(entry.number))

    def _restart_stale(self, each: JobEntries, version: int, *, ready: bool = True) -> None:
        for entry in [*each.running.values(), *(each.ready.values() if ready else ())]:
            self._restart_if_stale(each, entry, version)

    def _restart_if_stale(self, each: JobEntries, entry: Entry, version: int) -> None:
        of_the_future = not entry.is_failed and entry.version > version
        if of_the_future or each.is_stale(entry, version):
            self.counts.stale += 1
            self._queue_again(entry)

    def _queue_again(self, entry: Entry) -> None:
        each = self._jobs[entry.job]
        self._stop(entry)
        each.remove(entry)
        self._bytes[entry.owner] -= entry.group_bytes
        self.changes[GROUP, str(entry.number)] = None
        entry.was_restarted, entry.is_failed, entry.group_bytes = True, False, 0
        each.place(entry, EntryState.QUEUED)
        self._save(entry)

    def _end_lease(self, entry: Entry) -> None:
        each = self._jobs[entry.job]
        each.remove(entry)
        self._count_taken(entry, -1)
        each.place(entry, EntryState.READY)
        self._save(entry)
        self._restart_if_stale(each, entry, self._version)

    def _count_taken(self, entry: Entry, more: int) -> None:
        if not entry.is_failed and entry.leased_version == self._version:
            job = self._jobs[entry.job].job
            job.taken, job.version = max(0, job.taken_under(self._version) + more), self._version
            self._save_job(job)

    def _acknowledge(self, lease: str, may_see: Callable[[str], bool]) -> AckOutcome:
        entry = self._leases.get(lease)
        if entry is not None and may_see(entry.owner):
            if entry.state is not EntryState.LEASED:  # it expired, but was not handed out again
                self._count_taken(entry, 1)
            self._remove(entry)
            self._acknowledgements.add(Acknowledged(entry.number, entry.job, entry.name, entry.digest, lease))
            self.counts.acknowledged += 1
            return AckOutcome.ACKNOWLEDGED
        number = _number_of(lease)
        if (known := self._entries.get(number)) is not None:
            return AckOutcome.EXPIRED if may_see(known.owner) else AckOutcome.UNKNOWN
        if (done := self._acknowledgements.numbered(number, may_see)) is not None:
            return AckOutcome.ALREADY if done.lease == lease else AckOutcome.EXPIRED
        return AckOutcome.UNKNOWN

    def _has_groups(self, owner: str) -> bool:
        return any(each.ready or each.leased for each in self.jobs(lambda other: other == owner))

    def _save(self, entry: Entry) -> None:
        self.changes[ENTRY, str(entry.number)] = entry.encode()

    def _save_job(self, job: Job) -> None:
        self.changes[JOB, json.dumps(job.id)] = job.encode()

    def _charge(self, entry: Entry, tokens: float) -> None:
        weight = self._jobs[entry.job].job.options.weight
        self._owners.charge(entry.owner, tokens)
        self._shares.setdefault(entry.owner, FairShare()).charge(entry.job, tokens, weight)


def _number_of(lease: str) -> int:
    head = lease.partition("-")[0]
    return int(head) if head.isascii() and head.isdecimal() and len(head) <= 18 else 0
