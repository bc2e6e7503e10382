"""All entries of the queue, with what they take: of their job's quota, of the terms, and of the disk."""

from collections import Counter
from collections.abc import Callable, Iterable

from darts_server.rollout.queue.entries import ENTRY, GROUP, PROMPT, TERMS, Entry, JobId, Terms
from darts_server.rollout.queue.history import Changes
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.new_entries import NewEntries
from darts_server.rollout.queue.owners import Owners
from darts_server.rollout.queue.terms import TermsTable


class EntryTable:
    """Keep entries by number.

    Args:
        changes: gets what has to be on the disk.
        owners: count what is added and removed.
    """

    def __init__(self, changes: Changes, owners: Owners) -> None:
        self.by_number: dict[int, Entry] = {}
        self.terms = TermsTable(changes)
        self._changes = changes
        self._owners = owners

    def load(self, items: Callable[[str], Iterable[tuple[str, bytes]]]) -> None:
        self.terms.load(items(TERMS))
        for entry in sorted((Entry.decode(value) for _, value in items(ENTRY)), key=lambda entry: entry.number):
            self.by_number[entry.number] = entry
            self.terms.count_loaded(entry.terms)
            self._owners.add(entry.job, prompts=1, prompt_bytes=entry.prompt_bytes, group_bytes=entry.group_bytes)

    def add(self, job_id: JobId, new: NewEntries) -> None:
        """Add new entries, whose terms are counted already."""
        self.by_number.update((entry.number, entry) for entry in new.entries.values())
        self._owners.add(job_id, prompts=len(new.entries), prompt_bytes=new.size)
        self._changes.update(new.changes)

    def save(self, entry: Entry) -> None:
        self._changes[ENTRY, str(entry.number)] = entry.encode()

    def set_group(self, entry: Entry, group: bytes | None) -> None:
        """Set an entry's group, encoded, or delete it."""
        size = 0 if group is None else len(group)
        self._owners.add(entry.job, group_bytes=size - entry.group_bytes)
        entry.group_bytes = size
        self._changes[GROUP, str(entry.number)] = group

    def remove(self, entry: Entry) -> None:
        """Delete an entry."""
        del self.by_number[entry.number]
        self._owners.add(entry.job, prompts=-1, prompt_bytes=-entry.prompt_bytes, group_bytes=-entry.group_bytes)
        for kind in (ENTRY, PROMPT, GROUP):
            self._changes[kind, str(entry.number)] = None
        self.terms.release(entry.terms)

    def remove_all(self, each: JobEntries) -> None:
        """Delete the entries of a job together: 100,000 that are deleted one by one hold the event loop longer."""
        entries = each.names.values()
        for entry in entries:
            del self.by_number[entry.number]
        numbers = [str(entry.number) for entry in entries]
        self._changes.update(dict.fromkeys((kind, number) for kind in (ENTRY, PROMPT) for number in numbers))
        self._changes.update(dict.fromkeys((GROUP, str(number)) for number in (*each.ready, *each.leased)))
        prompt_bytes = sum(entry.prompt_bytes for entry in entries)
        self._owners.add(
            each.job.id,
            prompts=-len(entries),
            prompt_bytes=-prompt_bytes,
            group_bytes=prompt_bytes - each.bytes,
        )
        for terms, count in Counter(entry.terms for entry in entries).items():
            self.terms.release(terms, count)

    def terms_of(self, entry: Entry) -> Terms:
        return self.terms[entry.terms]

    def oldest(self) -> float | None:
        """Return when the oldest prompt came that was not acknowledged, in Unix seconds."""
        first = next(iter(self.by_number.values()), None)  # in the order of arrival
        return None if first is None else first.queued_at
