"""Which prompts of the queue start, and when."""

import time
from collections import Counter
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import InvalidRequest, Overloaded
from darts_server.rollout.batches.preparation import FIELD
from darts_server.rollout.batches.request import BatchRequest, NewPlanner, check_terms
from darts_server.rollout.queue.entries import Entry
from darts_server.rollout.queue.ledger import Ledger
from darts_server.rollout.queue.runner import QueueRunner, by_terms
from darts_server.rollout.rollouts import Rollouts
from darts_server.types import PromptSpec

RETRY_SECONDS = 0.5
"""After the engine or the disk refused a prompt for a reason that is not the prompt's."""


class Starter(Generic[RequestT, OutputT]):
    """Start as many prompts as fill the engine: what starts later is chosen later."""

    def __init__(
        self,
        ledger: Ledger,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        new_planner: NewPlanner,
        runner: QueueRunner[RequestT, OutputT],
    ) -> None:
        self._ledger = ledger
        self._rollouts = rollouts
        self._renderer = renderer
        self._new_planner = new_planner
        self._runner = runner
        self._paused_until: dict[str | None, float] = {}

    def pause(self, owner: str | None) -> None:
        """Start nothing of an owner for a while; ``None``: nothing at all."""
        self._paused_until[owner] = time.monotonic() + RETRY_SECONDS

    def start(self) -> None:
        """Start prompts for which there is room, of owners that may have more in flight."""
        now = time.monotonic()
        self._paused_until = {owner: until for owner, until in self._paused_until.items() if until > now}
        gate, admission = self._rollouts.gate, self._rollouts.admission
        if gate.closed or gate.has_failed or None in self._paused_until:
            return
        candidates: dict[int, int] = {}  # of each group, by its terms
        starting = Counter(self._runner.preparing)

        def may_start(entry: Entry) -> bool:
            job = self._ledger.jobs[entry.job].job
            if entry.owner in self._paused_until:
                return False
            if entry.terms not in candidates:
                candidates[entry.terms] = self._usual_candidates(entry)
            more = candidates[entry.terms]
            try:
                admission.check(starting[entry.owner] + more, None if job.is_admin else entry.owner or None, 0, FIELD)
            except Overloaded:
                return False
            except InvalidRequest:
                if starting[entry.owner]:
                    return False
                # It never has room, and ends with that error.
            starting[entry.owner] += more
            return True

        room = admission.free - self._runner.preparing.total()
        started = self._ledger.start(room, self._expected_tokens, self._group_size, may_start)
        for terms, entries in by_terms(started).items():
            self._runner.start(self._ledger.jobs[entries[0].job].job, entries, len(entries) * candidates[terms])

    def _group_size(self, entry: Entry) -> int:
        return self._ledger.entries.terms_of(entry).group_size

    def _usual_candidates(self, entry: Entry) -> int:
        """Return how many candidates an entry's group is admitted with."""
        terms = self._ledger.entries.terms_of(entry)
        batch = BatchRequest([PromptSpec()], terms.group_size, terms.sampling, terms.policy)
        try:
            plan, _ = check_terms(batch, self._rollouts, self._renderer, self._new_planner)
        except Exception:  # settings have changed since the put: it fails alone, when it is prepared
            return terms.group_size
        return self._rollouts.usual_candidates(plan)

    def _expected_tokens(self, entry: Entry) -> float:
        statistics = self._rollouts.statistics
        mean = None if entry.prompt_key is None else statistics.prompts.mean(entry.prompt_key)
        return (mean or statistics.dataset.stats.mean or 1.0) * self._group_size(entry)
