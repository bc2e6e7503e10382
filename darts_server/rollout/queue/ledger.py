"""The queue as a state machine: what was put, runs, is ready, is leased and was acknowledged. No I/O and no clock.

Every method that changes something adds to `changes` what has to be on the disk before its caller is answered. After a
crash the ledger is what `load` makes of the changes that were written, in their order.
"""

from collections.abc import Callable, Iterable, Mapping

from darts_server.exceptions import NotFound
from darts_server.rollout.queue.entries import JOB, MODEL, NUMBER, Entry, EntryState, JobId, JobOptions, Terms, WaitsFor
from darts_server.rollout.queue.entry_table import EntryTable
from darts_server.rollout.queue.history import ACKNOWLEDGED, PUT, Acknowledgements, Changes, Counts, PutResult, Puts
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.jobs import Jobs
from darts_server.rollout.queue.leases import Leases
from darts_server.rollout.queue.new_entries import NewEntries, Numbers, conflict
from darts_server.rollout.queue.owners import Owners, QueueLimits
from darts_server.rollout.queue.shares import AbleJobs, Shares

MOVED_AT_ONCE = 100
"""Ready groups that start again in one turn of the event loop: some milliseconds."""
LOST_VERSION = -(2**40)
"""Of groups whose weights are not those that have their number now: they are too old for every job."""


class Ledger:
    """Keep jobs and their entries.

    Args:
        limits: of each owner.
        default_staleness: of jobs that name none.
        new_name: returns a string that cannot be guessed and that is never used twice.
    """

    def __init__(self, limits: QueueLimits, default_staleness: int, new_name: Callable[[], str]) -> None:
        self.counts = Counts()
        self.changes: Changes = {}
        """What is to be written: by kind and key, ``None`` to delete. Whoever writes it empties it."""
        self.stopped: list[int] = []
        """Numbers of entries whose groups run and are no longer wanted; whoever stops them empties the list."""
        self.jobs = Jobs(self.changes, JobOptions(max_staleness=default_staleness))
        self._owners = Owners(limits)
        self.entries = EntryTable(self.changes, self._owners)
        self._acknowledgements = Acknowledgements(self.changes)
        self.leases = Leases(self.jobs, self.entries, self._acknowledgements, self.counts, self, new_name)
        self._puts = Puts(self.changes)
        self._shares = Shares()
        self._model = ""
        self._number = 0
        self._ready_number = 0

    def load(self, items: Callable[[str], Iterable[tuple[str, bytes]]]) -> None:
        """Read everything that was written. ``items``: yields keys and values of a kind."""
        for _, value in items(MODEL):
            self._model = value.decode()
        self.jobs.load(items(JOB))
        self.entries.load(items)
        entries = self.entries.by_number.values()
        for entry in entries:
            self.jobs[entry.job].place(entry, entry.state)
        self.leases.load(entries)
        self._acknowledgements.load(value for _, value in items(ACKNOWLEDGED))
        self._puts.load(value for _, value in items(PUT))
        numbers = [int(value) for _, value in items(NUMBER)]
        self._number = max([self._acknowledgements.last_number, *self.entries.by_number, *numbers])
        self._ready_number = max((entry.ready_number for entry in entries), default=0)

    # --- versions -----------------------------------------------------------

    def set_version(self, version: int, model: str = "") -> None:
        """Set the version of the weights that the server starts with, and the model.

        What was generated under other weights starts again: their number says nothing any more, as the server counts
        from its own start. Nothing counts as taken, so no job waits for an update that was lost.
        """
        is_other_model = self._model not in ("", model)
        self.jobs.version = version
        if model != self._model:
            self._model = model
            self.changes[MODEL, ""] = model.encode()
        for each in self.jobs:
            self._reset_taken(each, 0)
            for entry in [*each.ready.values(), *each.leased.values()]:
                if not entry.is_failed and (is_other_model or entry.version != version):
                    each.remove(entry)
                    entry.version = LOST_VERSION
                    each.place(entry, entry.state)
                    self.entries.save(entry)
        self.restart_stale(version)
        while self.restart_ready():
            pass

    @property
    def version(self) -> int:
        """The served weight version."""
        return self.jobs.version

    def update(self, version: int) -> None:
        """Follow an update: what is too old now, or of a version that is gone, starts again.

        Of ready groups the first `MOVED_AT_ONCE` do; `restart_ready` is to be called for the others.
        """
        self.jobs.version = version
        self.restart_stale(version)
        self.restart_ready()

    def restart_stale(self, version: int) -> None:
        """Start all groups again that run and would be too old under a version."""
        for each in self.jobs:
            self._restart_stale(each, version)

    def restart_ready(self) -> bool:
        """Start ready groups again that are too old, `MOVED_AT_ONCE` at most; whether there may be more.

        Until there are none, their job hands out nothing, and they count as open.
        """
        room = MOVED_AT_ONCE
        for each in self.jobs:
            for entry in each.stale_ready(self.version, room):
                self._restart_if_stale(each, entry, self.version)
                room -= 1
            if not room:
                return True
        return False

    def begun_under(self, number: int, version: int) -> None:
        """Set the version of the first token of a running group, as far as it is known."""
        if self.is_running(number):
            entry = self.entries.by_number[number]
            each = self.jobs[entry.job]
            each.remove(entry)
            entry.version = version
            each.place(entry, EntryState.RUNNING)

    # --- prompts in ---------------------------------------------------------

    def reserve_numbers(self, job_id: JobId, terms: Terms, count: int) -> Numbers:
        """Reserve the numbers of entries that are built, and then `put`."""
        first = self._number + 1
        self._number += count
        return Numbers(first, self.entries.terms.number_of(job_id, terms))

    def put(
        self,
        job_id: JobId,
        new: NewEntries,
        terms: Terms,
        *,
        options: Mapping[str, object] | None = None,
        taken: int | None = None,
        is_admin: bool = False,
        key: str | None = None,
        digest: str = "",
    ) -> PutResult:
        """Add prompts to a job, which is created if there is none. Prompts whose name is known are not added again.

        ``options``: of the job, those that change. ``taken``: how many groups count as taken
        under the served weights from now on. ``key``: an idempotency key, and the ``digest`` of its request.

        Raises:
            Conflict: the key, or the name of a prompt, was used for something else.
            NotFound: the job to which the same request has added prompts was deleted.
            TooLarge, QuotaReached: the owner would have too much. Whatever is raised, nothing was changed.
        """
        if key is not None and (known := self._puts.find(job_id[0], key, digest)) is not None:
            if (its_job := self.jobs.get(job_id)) is None or its_job.job.number != known.job:
                raise NotFound(
                    "job",
                    f"{job_id[1]!r} was deleted after this request; to put it again choose another Idempotency-Key",
                )
            return PutResult(known.names, 0)
        self._remove_known(job_id, new)
        if new.entries or job_id not in self.jobs:
            self._owners.check_room(job_id, len(new.entries), new.size)
        if (empty := self.jobs.find_replaceable(job_id)) is not None:
            self.drop_unused(empty)
        if job_id not in self.jobs:
            self._number += 1
        each = self.jobs.open(job_id, options or {}, is_admin, self._number)
        self.changes[NUMBER, ""] = str(self._number).encode()
        self._restart_stale(each, self.version)  # its options may have changed
        self.restart_ready()
        if taken is not None:
            self._reset_taken(each, taken)
        if new.entries:
            self.entries.terms.use(new.terms, job_id, terms, len(new.entries))
            self.entries.add(job_id, new)
            each.extend(new.entries)
        self.counts.put += len(new.entries)
        result = PutResult(new.names, len(new.entries))
        if key is not None:
            self._puts.add(job_id[0], key, digest, new.names, each.job.number)
        return result

    # --- running ------------------------------------------------------------

    def start(
        self,
        room: float,
        expected: Callable[[Entry], float],
        size: Callable[[Entry], int] = lambda entry: 1,
        may_start: Callable[[Entry], bool] = lambda entry: True,
    ) -> list[Entry]:
        """Start prompts while there is room, each of the owner, and of its job, that got least.

        ``expected``: returns how many tokens a group will take. ``size``: how much of the room. ``may_start``: whether
        the owner of a prompt may start it now; if not, other jobs go on, see `Shares.pass_over`.
        """
        able = AbleJobs()
        for each in self.jobs:
            if self._is_able(each):
                able.add(each.job.id)
        started: list[Entry] = []
        while room > 0 and (chosen := self._shares.choose(able)) is not None:
            each = self.jobs[chosen]
            most = each.startable(self.version)
            entry = self.entries.by_number[each.order.peek(most, self.entries.by_number, expected)]
            if not may_start(entry):
                self._shares.pass_over(able, entry, expected(entry), each.job.options.weight)
                continue
            each.remove(entry)
            entry.version = self.version
            each.place(entry, EntryState.RUNNING)
            self._shares.start(entry, expected(entry), each.job.options.weight)
            started.append(entry)
            room -= size(entry)
            if not self._is_able(each):
                able.remove(each.job.id)
        return started

    def waits_for(self, each: JobEntries) -> WaitsFor | None:
        """Return why no prompt of a job may start: ``weights`` or ``consumer``; ``None`` if one may."""
        if self._owners.must_take_groups(each.job.id):
            return "consumer"
        if each.startable(self.version) > 0:
            return None
        size = each.job.options.groups_per_version or 0
        return "consumer" if each.job.taken_under(self.version) < size else "weights"

    def is_running(self, number: int) -> bool:
        entry = self.entries.by_number.get(number)
        return entry is not None and entry.state is EntryState.RUNNING

    def end(self, number: int, group: bytes, version: int | None, tokens: int, *, failed: bool) -> None:
        """Record the group of a running entry; ``group``: encoded. Of one that does not run, nothing.

        ``version``: of its first token; ``None`` if it is not known better than it was.
        """
        if not self.is_running(number):
            return
        entry = self.entries.by_number[number]
        each = self.jobs[entry.job]
        self._shares.end(entry, tokens, each.job.options.weight)
        each.remove(entry)
        self._ready_number += 1
        entry.is_failed, entry.ready_number = failed, self._ready_number
        entry.version = entry.version if version is None else version
        self.entries.set_group(entry, group)
        each.place(entry, EntryState.READY)
        self.counts.failed += failed
        self.entries.save(entry)
        self.restart_if_stale(entry)

    def give_back(self, number: int, *, aborted: bool = False) -> None:
        """Queue a running entry again, as its group was not started or was aborted from outside."""
        if self.is_running(number):
            entry = self.entries.by_number[number]
            self.counts.aborted += aborted
            entry.aborts += aborted
            self._queue_again(entry)

    def restart_damaged(self, lease: str) -> None:
        """Start a leased group again that cannot be read."""
        entry = self.leases.release(lease)
        if entry is not None and entry.state is EntryState.READY:
            self._queue_again(entry)

    def restart_if_stale(self, entry: Entry) -> None:
        """Start a group again that is too old to be handed out."""
        self._restart_if_stale(self.jobs[entry.job], entry, self.version)

    # --- deleting -----------------------------------------------------------

    def delete(self, entry: Entry) -> None:
        """Delete an entry, wherever it is."""
        self._stop(entry)
        self.jobs[entry.job].remove(entry)
        self.leases.forget(entry)
        self.entries.remove(entry)

    def drop_unused(self, job_id: JobId) -> int:
        """Delete a job as `drop`, but so that a put that is repeated with its idempotency key creates it again."""
        self._puts.drop(self.jobs[job_id].job.number)
        return self.drop(job_id)

    def drop(self, job_id: JobId) -> int:
        """Delete a job with everything in it; how many entries it had. What runs is stopped.

        Its idempotency keys stay known: a put that is repeated after its caller deleted the job does not create it.

        Raises:
            NotFound
        """
        each = self.jobs.get(job_id)
        if each is None:
            raise NotFound("job", f"you have no job {job_id[1]!r}; GET /darts/v1/queue lists yours")
        for entry in each.running.values():
            self._stop(entry)
        for entry in each.names.values():
            if entry.lease is not None:
                self.leases.forget(entry)
        self.entries.remove_all(each)
        self._acknowledgements.drop(job_id)
        self._shares.forget(job_id)
        self.jobs.remove(job_id)
        self.counts.dropped += len(each.names)
        return len(each.names)

    # --- helpers ------------------------------------------------------------

    def _is_able(self, each: JobEntries) -> bool:
        """Return whether a prompt of a job may start."""
        return len(each.order) > 0 and self.waits_for(each) is None

    def _remove_known(self, job_id: JobId, new: NewEntries) -> None:
        """Remove the entries whose name the job has, or had.

        Raises:
            Conflict: one is that of another prompt.
        """
        each = self.jobs.get(job_id)
        for known in ({} if each is None else each.names, self._acknowledgements.of_job(job_id)):
            names = known.keys() & new.entries.keys()
            for name in names:
                if known[name].digest != new.entries[name].digest:
                    raise conflict(new.names.index(name), name)
            new.remove(names)

    def _reset_taken(self, each: JobEntries, taken: int) -> None:
        """Set how many groups count as taken; those that were, and come back, do not count any more."""
        each.job.takes += 1
        self.jobs.set_taken(each, taken)

    def _stop(self, entry: Entry) -> None:
        """Stop an entry's group, if it runs."""
        if entry.state is EntryState.RUNNING:
            self.stopped.append(entry.number)
            self._shares.end(entry, 0, self.jobs[entry.job].job.options.weight)

    def _restart_stale(self, each: JobEntries, version: int) -> None:
        if each.has_stale(version):
            for entry in list(each.running.values()):
                self._restart_if_stale(each, entry, version)

    def _restart_if_stale(self, each: JobEntries, entry: Entry, version: int) -> None:
        if not entry.is_failed and each.must_restart(entry.version, version):
            self.counts.stale += 1
            self._queue_again(entry)

    def _queue_again(self, entry: Entry) -> None:
        each = self.jobs[entry.job]
        self._stop(entry)
        each.remove(entry)
        self.entries.set_group(entry, None)
        entry.was_restarted, entry.is_failed = True, False
        each.place(entry, EntryState.QUEUED)
        self.entries.save(entry)
