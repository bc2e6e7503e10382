"""Entries of prompts that are put, built and encoded beside the event loop: of 100,000 that takes a second."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from darts_server.exceptions import Conflict
from darts_server.rollout.queue.entries import ENTRY, PROMPT, Entry, JobId
from darts_server.rollout.queue.history import Changes


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt to put. ``name``: the caller's id; ``None`` for one of ours. ``document``: the prompt, encoded.

    ``digest``: of the prompt and its terms.
    """

    document: bytes
    digest: str
    name: str | None = None
    prompt_key: str | None = None


@dataclass(frozen=True, slots=True)
class Numbers:
    """Reserved numbers. ``first``: of the first entry, the others follow. ``terms``: of their terms."""

    first: int
    terms: int


@dataclass(slots=True)
class NewEntries:
    """``names``: in the order of the prompts. ``entries``: by name. ``changes``: of the disk. ``size``: bytes."""

    terms: int
    names: list[str]
    entries: dict[str, Entry]
    changes: Changes
    size: int

    def remove(self, names: Iterable[str]) -> None:
        """Remove the entries of names that are known already."""
        for name in names:
            entry = self.entries.pop(name)
            self.size -= entry.prompt_bytes
            for kind in (ENTRY, PROMPT):
                del self.changes[kind, str(entry.number)]


def conflict(place: int, name: str) -> Conflict:
    """Return the error of the prompt at a place whose name is another prompt's."""
    return Conflict(f"prompts[{place}].id", f"{name!r} is another prompt of this job; choose another id")


def build_entries(
    job_id: JobId,
    prompts: Sequence[NewPrompt],
    numbers: Numbers,
    now: float,
    new_name: Callable[[], str],
    priority: int = 0,
) -> NewEntries:
    """Build entries. ``now``: Unix seconds. ``new_name``: returns a string that cannot be guessed.

    Raises:
        Conflict: one id is that of two different prompts.
    """
    new = NewEntries(numbers.terms, [], {}, {}, 0)
    for number, prompt in enumerate(prompts, numbers.first):
        name = prompt.name or f"{number}-{new_name()}"
        new.names.append(name)
        if (known := new.entries.get(name)) is not None:
            if known.digest != prompt.digest:
                raise conflict(len(new.names) - 1, name)
            continue
        entry = new.entries[name] = Entry(
            number=number,
            job=job_id,
            name=name,
            terms=numbers.terms,
            digest=prompt.digest,
            prompt_key=prompt.prompt_key,
            priority=priority,
            prompt_bytes=len(prompt.document),
            queued_at=now,
        )
        new.size += entry.prompt_bytes
        new.changes[ENTRY, str(number)] = entry.encode()
        new.changes[PROMPT, str(number)] = prompt.document
    return new
