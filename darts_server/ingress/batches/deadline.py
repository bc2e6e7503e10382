"""The one deadline of a batch that runs on several replicas."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import Any

from darts_server.ingress.everyone.broadcast import SUCCESS
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing, ReplicaFailure
from darts_server.ingress.replicas.whole import fetch
from darts_server.policy.deadline import MIN_GROUPS, CohortDeadline, Deadline
from darts_server.rollout.allocation.shared import SharedDeadline
from darts_server.types import MaxLost

logger = logging.getLogger(__name__)

SEND_SECONDS = 10.0
"""Timeout of a request that sets the deadline: a server answers it at once."""
RETRY_SECONDS = 1.0
MAX_FAILURES = 5
"""In a row, after which a replica that is well is left without the deadline."""


class BatchDeadline:
    """Compute the deadline of a batch from what its groups report on all replicas, by the numbers of their prompts.

    Which rule it is computed by, and whether the batch explores, says the part that leads, or if that is lost before it
    has started, the first other one.
    """

    def __init__(self, groups: int) -> None:
        self.known: SharedDeadline | None = None
        """What the replicas have to know; ``None`` while that is nothing."""
        self._cohort = CohortDeadline(None, groups)
        self._rule: Deadline | None = None
        self._explored = False
        self._has_leader = False
        self._other_terms: Mapping[str, Any] | None = None
        self._ended: set[int] = set()
        self._lost: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def is_awaited(self) -> bool:
        """Whether it is not known, and what groups report may determine it."""
        return self._rule is None or self._cohort.is_awaited

    def choose_leader(self) -> bool:
        """Whether the next part is to lead."""
        needed = self._rule is None and not self._has_leader
        self._has_leader |= needed
        return needed

    def start_part(self, terms: Mapping[str, Any] | None, *, leads: bool) -> None:
        """Note how a part was allocated that has started; ``None`` if it has a deadline of its own, or none."""
        if terms is None or self._rule is not None:
            return
        if leads or not self._has_leader:
            self._use(terms)
        else:
            self._other_terms = self._other_terms or terms

    def lose_leader(self) -> None:
        """Note that the part that leads will not start any more, if it has not."""
        self._has_leader = False
        if self._rule is None and self._other_terms is not None:
            self._use(self._other_terms)

    def report(self, needs: Iterable[tuple[int, int]], minimums: Iterable[tuple[int, int | None]]) -> None:
        """Record what groups need, and the least that others can need; see `CohortDeadline`."""
        for number, tokens in needs:
            self._cohort.report_need(number, tokens)
        for number, minimum in minimums:
            self._cohort.report_minimum(number, minimum)
        self._update()

    def end_group(self, number: int) -> None:
        """Record that a group has ended, with any outcome."""
        self._ended.add(number)
        if self._lost and self._cohort.count_without([number]) < MIN_GROUPS:
            self.restart_groups()
        self._cohort.remove(number)
        self._update()

    def lose_groups(self, numbers: Iterable[int]) -> None:
        """Record that a replica was lost which ran these.

        Those that have not ended start again when the others have. So the others do not wait for what they need, if
        they are enough to determine a deadline.
        """
        lost = {number for number in numbers if number not in self._ended}
        if self._cohort.count_without(lost) >= MIN_GROUPS:
            self._lost |= lost
            for number in lost:
                self._cohort.remove(number)
        else:
            self.report((), ((number, 0) for number in lost))
        self._update()

    def restart_groups(self) -> None:
        """Wait again for what all groups need that were lost: they start again, or the others have become too few."""
        for number in self._lost:
            self._cohort.add(number)
        self._lost.clear()
        self._update()

    async def next_after(self, sent: SharedDeadline | None) -> SharedDeadline:
        """Wait until something else is known than what was sent."""
        while self.known is None or self.known == sent:
            await self._changed.wait()
        return self.known

    def _use(self, terms: Mapping[str, Any]) -> None:
        rule = self._rule = Deadline(**terms["rule"] | {"max_lost": MaxLost(**terms["rule"]["max_lost"])})
        self._explored = terms["explored"]
        self._cohort.set_rule(None if terms["few"] else rule, terms["tokens"])
        self._update()

    def _update(self) -> None:
        if self._rule is None:
            return
        tokens, waits_beyond = self._cohort.tokens, self._cohort.waits_beyond
        if self.known is None and tokens is None and waits_beyond is None and not self._explored:
            return
        known = SharedDeadline(tokens, waits_beyond, self._explored, self._rule.stretch, self._rule.bound)
        if known != self.known:
            self.known = known
            self._changed.set()
            self._changed = asyncio.Event()


@asynccontextmanager
async def sent_to(
    member: Member, batch_id: str, deadline: BatchDeadline, outgoing: Outgoing, fleet: Fleet
) -> AsyncIterator[None]:
    """Send a replica what is known of the deadline of the batch with that id, until the block ends.

    ``outgoing``: the caller's request, whose headers say what it may do.
    """
    sending = asyncio.create_task(_send(member, batch_id, deadline, outgoing, fleet), name="darts-deadline")
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait([sending])  # not awaited itself: it would not show whether this task is cancelled meanwhile


async def _send(member: Member, batch_id: str, deadline: BatchDeadline, outgoing: Outgoing, fleet: Fleet) -> None:
    """Send what is known, until the deadline was sent. If the replica is lost, whoever runs the part cancels this."""
    request = replace(outgoing, method="PUT", target=f"/darts/v1/rollouts/{batch_id}/deadline")
    sent: SharedDeadline | None = None
    failures = 0
    while sent is None or sent.tokens is None:
        known = await deadline.next_after(sent)
        if (why := await _put(member, replace(request, body=json.dumps(asdict(known)).encode()))) is None:
            sent, failures = known, 0
            continue
        failures += 1
        if failures == MAX_FAILURES:
            logger.warning("%s gets no deadline, its groups of %s run to their ends: %s", member.name, batch_id, why)
            return
        await fleet.check(member)
        await asyncio.sleep(RETRY_SECONDS)


async def _put(member: Member, request: Outgoing) -> str | None:
    """Return why a replica has not accepted a deadline; ``None`` if it has, or the batch has ended there."""
    try:
        async with asyncio.timeout(SEND_SECONDS):
            answer = await fetch(member.replica, request)
    except ReplicaFailure as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {SEND_SECONDS:.0f} s"
    has_ended = answer.status == HTTPStatus.NOT_FOUND
    return None if has_ended or answer.status in SUCCESS else f"status {answer.status}"
