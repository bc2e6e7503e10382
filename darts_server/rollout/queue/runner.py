"""Run prompts of the queue as batches: those of a job that start together are one batch."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import (
    DartsError,
    EngineBusy,
    EngineDead,
    GroupAborted,
    InvalidRequest,
    Overloaded,
    QuotaReached,
    ServerStopping,
    StateDamaged,
    StateError,
)
from darts_server.rollout.batches.preparation import FIELD
from darts_server.rollout.batches.request import BatchRequest, NewPlanner
from darts_server.rollout.batches.results import GroupResult
from darts_server.rollout.batches.submission import Submission
from darts_server.rollout.prompt_documents import decode_prompt
from darts_server.rollout.queue.entries import PROMPT, Entry, Job
from darts_server.rollout.queue.ledger import Ledger
from darts_server.rollout.queue.saving import Saver
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.admission import Caller, caller
from darts_server.types import PromptSpec

logger = logging.getLogger(__name__)

Encode = Callable[[GroupResult], bytes]
"""Encodes a group as its consumers get it."""

_PROMPT_FIELD = re.compile(rf"{FIELD}\[([0-9]+)\]")
NOT_THEIR_FAULT = (GroupAborted, EngineBusy, EngineDead, ServerStopping, Overloaded)
"""Errors after which a prompt is queued again."""
MAX_ABORTS = 10
"""Of one prompt: the group of one that is aborted more often has an error."""


@dataclass(slots=True, eq=False)
class _Attempt(Generic[RequestT, OutputT]):
    """One run of an entry: prompt ``index`` of a ``submission``, which is ``None`` while that is prepared.

    ``prompt``: ``None`` until it was read.
    """

    prompt: PromptSpec | None = None
    submission: Submission[RequestT, OutputT] | None = None
    index: int = 0


class QueueRunner(Generic[RequestT, OutputT]):
    """Run entries of a ledger.

    Args:
        encode: of results, called in a thread.
        on_change: called when a group has ended, or when entries were queued again.
        on_refusal: called when the engine or the disk refuses what may succeed later, with the owner whose quota it is,
            or ``None``.
    """

    def __init__(
        self,
        ledger: Ledger,
        saver: Saver,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        new_planner: NewPlanner,
        encode: Encode,
        on_change: Callable[[], None],
        on_refusal: Callable[[str | None], None],
    ) -> None:
        self._ledger = ledger
        self._saver = saver
        self._rollouts = rollouts
        self._renderer = renderer
        self._new_planner = new_planner
        self._encode = encode
        self._on_change = on_change
        self._on_refusal = on_refusal
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[int, _Attempt[RequestT, OutputT]] = {}
        self.preparing: Counter[str] = Counter()
        """Candidates of entries that were not admitted yet, by owner."""

    def start(self, job: Job, entries: Sequence[Entry], candidates: int) -> None:
        """Start entries of one job with the same terms. ``candidates``: that they are admitted with."""
        attempts: dict[int, _Attempt[RequestT, OutputT]] = {entry.number: _Attempt() for entry in entries}
        self._attempts |= attempts
        task = asyncio.get_running_loop().create_task(self._run(job, list(entries), attempts, candidates))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, number: int) -> None:
        """Stop the group of an entry, if it runs."""
        attempt = self._attempts.pop(number, None)
        if attempt is not None and attempt.submission is not None:
            attempt.submission.drop(attempt.index)

    async def stop_all(self) -> None:
        """Stop everything. The entries are queued again."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def first_version(self, number: int) -> int | None:
        """Return the version of the first token of a running entry; ``None`` if there is no token yet."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.submission is None:
            return None
        return self._rollouts.first_version(attempt.submission.group_id(attempt.index))

    async def _run(
        self, job: Job, entries: list[Entry], attempts: dict[int, _Attempt[RequestT, OutputT]], candidates: int
    ) -> None:
        caller.set(Caller(job.id[0] or None, is_admin=job.is_admin))
        try:
            submission = await self._prepare(entries, attempts, candidates)
            if submission is not None:
                async with aclosing(submission.results()) as results:
                    async for result in results:
                        entry = entries[result.number]
                        await self._end(entry, attempts[entry.number], result)
        except (*NOT_THEIR_FAULT, StateError) as error:
            self._on_refusal(_owner_at_quota(job.id[0], error))
        except Exception as error:  # a bug of ours: it ends these groups and nothing else
            logger.exception("groups of the queue failed")
            for entry in entries:
                self._fail(entry, attempts[entry.number], error)
        finally:
            self._give_back(attempts)

    async def _prepare(
        self, entries: list[Entry], attempts: Mapping[int, _Attempt[RequestT, OutputT]], candidates: int
    ) -> Submission[RequestT, OutputT] | None:
        """Prepare a batch of the entries, without those that fail, which are removed; ``None`` if none is left.

        Raises:
            Overloaded, StateError
        """
        owner, terms = entries[0].owner, self._ledger.entries.terms_of(entries[0])
        self.preparing[owner] += candidates
        try:
            prompts = await self._read_prompts(entries, attempts)
        finally:
            self.preparing -= Counter({owner: candidates})  # without those that are 0
        while entries:
            try:
                request = BatchRequest(
                    [prompts[entry.number] for entry in entries], terms.group_size, terms.sampling, terms.policy
                )
                submission = await Submission.prepare(request, self._rollouts, self._renderer, self._new_planner)
            except NOT_THEIR_FAULT:
                raise
            except Exception as error:
                if not isinstance(error, DartsError):  # a bug of ours, or in the model's chat template
                    logger.exception("prompts of the queue cannot be prepared")
                if isinstance(error, InvalidRequest) and (bad := _PROMPT_FIELD.match(error.field)):
                    entry = entries.pop(int(bad[1]))
                    self._fail(entry, attempts[entry.number], _without_number(error))
                elif len(entries) > 1:
                    # It is one prompt's, or they are too many at a time for this key: the others are queued again.
                    half = (len(entries) + 1) // 2
                    self._give_back({entry.number: attempts[entry.number] for entry in entries[half:]})
                    del entries[half:]
                else:
                    entry = entries.pop()
                    self._fail(entry, attempts[entry.number], error)
            else:
                for index, entry in enumerate(entries):
                    attempt = attempts[entry.number]
                    attempt.submission, attempt.index = submission, index
                    if self._attempts.get(entry.number) is not attempt:  # it was stopped meanwhile
                        submission.drop(index)
                return submission
        return None

    async def _read_prompts(
        self, entries: list[Entry], attempts: Mapping[int, _Attempt[RequestT, OutputT]]
    ) -> dict[int, PromptSpec]:
        """Read the prompts by number. Entries whose prompt is damaged fail, and are removed.

        Raises:
            StateError: the disk cannot be read now.
        """
        prompts: dict[int, PromptSpec] = {}
        for entry in list(entries):
            attempt = attempts[entry.number]
            try:
                document = await self._saver.read(PROMPT, str(entry.number))
                prompt = PromptSpec() if document is None else decode_prompt(document)  # it was deleted meanwhile
            except (StateDamaged, ValueError, TypeError) as error:
                entries.remove(entry)
                self._fail(entry, attempt, error)
            else:
                attempt.prompt = prompts[entry.number] = prompt
        return prompts

    def _give_back(self, attempts: Mapping[int, _Attempt[RequestT, OutputT]]) -> None:
        """Queue the entries again of those attempts that have not ended."""
        for number, attempt in attempts.items():
            if self._attempts.get(number) is attempt:
                del self._attempts[number]
                self._ledger.give_back(number)
        self._on_change()

    async def _end(self, entry: Entry, attempt: _Attempt[RequestT, OutputT], result: GroupResult) -> None:
        if self._attempts.get(entry.number) is not attempt:
            return  # it was stopped, and may run again already
        is_aborted = isinstance(result.error, GroupAborted)
        if isinstance(result.error, NOT_THEIR_FAULT) and not (is_aborted and entry.aborts >= MAX_ABORTS):
            del self._attempts[entry.number]
            self._ledger.give_back(entry.number, aborted=is_aborted)
            if not is_aborted:
                self._on_refusal(_owner_at_quota(entry.owner, result.error))
            self._on_change()
            return
        try:
            # In a thread: a large group takes a while.
            group = await asyncio.to_thread(self._encode, replace(result, number=entry.number))
        except Exception as error:
            logger.exception("group %s of the queue cannot be encoded", result.group_id)
            self._fail(entry, attempt, error)
            return
        tokens = 0 if result.record is None else result.record.generated_tokens
        self._close(entry, attempt, group, _first_version(result), tokens, failed=result.error is not None)

    def _fail(self, entry: Entry, attempt: _Attempt[RequestT, OutputT], error: Exception) -> None:
        """End an entry that has no group."""
        metadata = None if attempt.prompt is None else attempt.prompt.metadata
        result = GroupResult(entry.number, f"queue-{entry.number}", entry.prompt_key or "", {}, None, error, metadata)
        try:
            group = self._encode(result)
        except Exception:  # in what the caller sent with it
            group = self._encode(replace(result, metadata=None))
        self._close(entry, attempt, group, None, 0, failed=True)

    def _close(
        self,
        entry: Entry,
        attempt: _Attempt[RequestT, OutputT],
        group: bytes,
        version: int | None,
        tokens: int,
        *,
        failed: bool,
    ) -> None:
        if self._attempts.get(entry.number) is attempt:
            del self._attempts[entry.number]
            self._ledger.end(entry.number, group, version, tokens, failed=failed)
            self._on_change()


def _owner_at_quota(owner: str, error: Exception | None) -> str | None:
    """Return the owner if it alone has to wait."""
    return owner if isinstance(error, QuotaReached) else None


def _first_version(result: GroupResult) -> int | None:
    """Return the version of the first token of what is returned; ``None`` if that is not known."""
    selected: Sequence[Any] = () if result.record is None else result.record.selected
    versions = [c.weight_version_start for c in selected if c.weight_version_start is not None]
    return min(versions, default=None)


def _without_number(error: InvalidRequest) -> InvalidRequest:
    """Name the field of the prompt alone: its number in an internal batch says nothing."""
    return type(error)(_PROMPT_FIELD.sub("prompt", error.field), error.message)


def by_terms(entries: Sequence[Entry]) -> Mapping[int, list[Entry]]:
    """Return the entries by the number of their terms, which belong to one job."""
    batches: dict[int, list[Entry]] = {}
    for entry in entries:
        batches.setdefault(entry.terms, []).append(entry)
    return batches
