"""Run a batch on several replicas, as if it ran on one."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NoReturn

from darts_server.exceptions import ReplicaLost
from darts_server.ingress.batches.backlog import Backlog
from darts_server.ingress.batches.budget import Grants, Planner
from darts_server.ingress.batches.deadline import BatchDeadline, sent_to
from darts_server.ingress.batches.division import divide, share_budget
from darts_server.ingress.batches.events import GROUP, NEEDS, Event, read_events
from darts_server.ingress.batches.request import Batch
from darts_server.ingress.everyone.hold import Hold, Start
from darts_server.ingress.forwarding.forward import MAX_LOST, lost_in_turn, no_resources, ran_until_lost
from darts_server.ingress.replicas.fleet import RETRY_AFTER, Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import (
    Answer,
    Disconnected,
    NoResources,
    Outgoing,
    ReplicaFailure,
    Unreachable,
    value_of,
)
from darts_server.ingress.replicas.whole import WholeAnswer, opened
from darts_server.ingress.routing.router import Router, no_replica

MAX_ROUNDS = 6
"""In each, the prompts of replicas that were lost are divided among the others."""
ROOM = 8
"""Events that wait for the caller, before its servers do."""
_PROMPT = re.compile(rb"prompts\[(\d+)\]")


class PartRefused(Exception):
    """A replica that is well refused its part of a batch, or ended it with an error.

    ``answer``: its answer, with the numbers of the whole batch.
    """

    def __init__(self, answer: WholeAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Part:
    """Prompts, by their numbers in the batch, that run on one replica. ``leads``: see `BatchDeadline`."""

    member: Member
    numbers: Sequence[int]
    budget: int | None
    leads: bool


@dataclass(slots=True)
class DividedBatch:
    """One batch on several replicas.

    ``started``: what the first replica says of the batch. ``decided``: prompts whose groups have ended. ``complete``:
    how many of these have no error. ``generated``, ``returned``: tokens, the former of replicas that did not end their
    parts without those of unfinished groups.
    """

    batch: Batch
    outgoing: Outgoing
    scope: str
    fleet: Fleet
    router: Router
    hold: Hold
    planner: Planner = field(default_factory=Planner)
    batch_id: str = field(default_factory=lambda: f"batch-{uuid.uuid4().hex}")
    started: Mapping[str, Any] | None = None
    decided: set[int] = field(default_factory=set)
    complete: int = 0
    generated: int = 0
    returned: int = 0
    carried: int = 0
    began: float = field(default_factory=time.perf_counter)
    _deadline: BatchDeadline = field(init=False)
    _grants: Grants | None = None
    _losses: dict[int, list[str]] = field(default_factory=dict)
    """Replicas that were lost while they ran a prompt, by its number."""
    _open: set[int] = field(default_factory=set)
    """Prompts whose groups have begun to arrive, and not ended."""

    def __post_init__(self) -> None:
        self._deadline = BatchDeadline(len(self.batch.prompts))

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of all replicas, with the numbers of the batch's prompts, until enough groups are complete.

        ``batch`` comes once, ``done`` never.

        Raises:
            PartRefused
            NoReplica, ReplicaLost
        """
        wanted = self.batch.num_groups
        self._grants = await self.planner.plan(self.batch, self.outgoing, self.fleet.serving)
        for _ in range(MAX_ROUNDS):
            async with aclosing(self._round(self._left())) as events:
                async for event in events:
                    if event.name == GROUP:
                        self._count(event)
                    yield event
                    if self.complete >= wanted:
                        return
            if not self._left():
                return
        raise ReplicaLost("servers were lost again and again while the batch ran; send it again")

    def _left(self) -> list[int]:
        return [number for number in range(len(self.batch.prompts)) if number not in self.decided]

    async def _round(self, left: Sequence[int]) -> AsyncGenerator[Event, None]:
        """Run prompts, and yield events until all replicas have ended their parts or were lost.

        All parts start before weights are switched, or after that.
        """
        await self.hold.wait()
        parts = self._divide(left)
        self._deadline.restart_groups()
        backlog = Backlog(ROOM)
        start = self.hold.starting(len(parts))
        tasks = [asyncio.create_task(self._part(part, backlog, start)) for part in parts]
        try:
            running = len(tasks)
            while running:
                item = await backlog.take()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            # Not gathered: if this task is cancelled once more, that would interrupt them while they close connections.
            await asyncio.wait(tasks)
            start.end()

    def _divide(self, left: Sequence[int]) -> list[Part]:
        serving = {member.name: member for member in self.fleet.serving}
        if not serving:
            raise no_replica(self.fleet)
        works = [self._work(number) for number in left]
        known = {at: self.router.home(self.scope, self.batch.identities[n]) for at, n in enumerate(left)}
        homes = {at: name for at, name in known.items() if name in serving}
        fixed = {at: name for at, name in homes.items() if left[at] in self.batch.keys}
        parts = divide(works, fixed, homes, {name: member.load for name, member in serving.items()})
        budget = self.batch.fields.get("budget")
        shares = self._shares(budget, left, parts.values()) if isinstance(budget, int) else [budget] * len(parts)
        divided = []
        for (name, part), share in zip(parts.items(), shares, strict=True):
            numbers = [left[at] for at in part]
            for number in numbers:
                self.router.remember_home(self.scope, self.batch.identities[number], name)
            divided.append(Part(serving[name], numbers, share, self._deadline.choose_leader()))
        return divided

    def _shares(self, budget: int, left: Sequence[int], parts: Collection[Sequence[int]]) -> list[int | None]:
        """Divide the budget of those prompts that are left among parts, whose numbers are places in ``left``."""
        if self._grants is not None:
            return [self._grants.total([left[at] for at in part]) for part in parts]
        return list(share_budget(budget * len(left) // len(self.batch.prompts), [len(part) for part in parts]))

    def _work(self, number: int) -> float:
        sampling, size = self.batch.fields.get("sampling"), self.batch.fields.get("group_size")
        limit = sampling.get("max_tokens") if isinstance(sampling, dict) else None
        limit = limit if isinstance(limit, int) else None
        length = self.router.lengths.of((self.scope, self.batch.identities[number]), limit)
        return length * (size if isinstance(size, int) else 1)

    async def _part(self, part: Part, backlog: Backlog, start: Start) -> None:
        """Run a part on a replica, and queue its events; at last ``None``, or an error that ends the batch."""
        member, numbers = part.member, part.numbers
        try:
            with member.loaded(sum(map(self._work, numbers))):
                async with member.in_use():
                    await self._run(part, backlog, start)
        except NoResources as error:
            backlog.add(no_resources(error))
            return
        except ReplicaFailure as error:
            self._deadline.lose_groups(numbers)
            await self.fleet.check(member)
            if (again := self._count_loss(member, numbers, error)) is not None:
                backlog.add(again)
                return
            if self._open & set(numbers):
                backlog.add(ReplicaLost(f"{error}; parts of its groups were streamed already: send the rest again"))
                return
        except Exception as error:  # the batch ends with it
            backlog.add(error)
            return
        finally:
            start.part_started(member.name)  # or it never will
            if part.leads:
                self._deadline.lose_leader()
        backlog.add(None)

    async def _run(self, part: Part, backlog: Backlog, start: Start) -> None:
        member, numbers = part.member, part.numbers
        grants = None if self._grants is None else self._grants.cohort(numbers)
        body = self.batch.part(numbers, part.budget, leads=part.leads, grants=grants)
        outgoing = replace(self.outgoing, body=body)
        seen, terms = 0, None
        async with AsyncExitStack() as stack:
            answer = await stack.enter_async_context(opened(member.replica, outgoing))
            stack.callback(lambda: self._add_generated(seen))
            if answer.status != HTTPStatus.OK:
                await self._refuse(member, numbers, answer)
            async for event in read_events(answer.chunks()):
                if event.name == "batch":
                    start.part_started(member.name)
                    said = event.json()
                    terms = said.pop("cohort", None)
                    self._deadline.start_part(terms, leads=part.leads)
                    if terms is not None:
                        await stack.enter_async_context(
                            sent_to(member, said["id"], self._deadline, self.outgoing, self.fleet)
                        )
                    if self.started is None:
                        self.started = said
                        backlog.add(event)
                elif event.name == NEEDS:
                    self._report(numbers, event)
                elif event.name == "done":
                    body = event.json()
                    seen = body["usage"]["generated"]
                    self.carried = max(self.carried, body["carried"])
                    return
                elif event.name == "error":
                    await self._fail(member, numbers, event)
                else:
                    if event.name == GROUP and event.was_aborted:
                        await self._check_serves(member)
                    event = event.renumbered(numbers[event.number])
                    if event.name == GROUP:
                        seen += sum(map(sum, event.lengths())) + event.aborted_tokens
                        self._open.discard(event.number)
                        self._deadline.end_group(event.number)
                    else:
                        self._open.add(event.number)
                    backlog.add(event)
                    if terms is None or not self._deadline.is_awaited:  # else what groups need would wait behind it
                        await backlog.wait_for_room()
        raise Disconnected(f"{member.name} ended its answer too early")

    def _report(self, numbers: Sequence[int], event: Event) -> None:
        """Pass on what groups of a part have reported."""
        body = event.json()
        needs = [(numbers[at], tokens) for at, tokens in body["needs"]]
        self._deadline.report(needs, [(numbers[at], tokens) for at, tokens in body["minimums"]])

    def _add_generated(self, tokens: int) -> None:
        self.generated += tokens

    def _count(self, group: Event) -> None:
        self.decided.add(group.number)
        self.complete += not group.failed
        returned, discarded = group.lengths()
        self.returned += sum(returned)
        if lengths := returned + discarded:
            prompt = (self.scope, self.batch.identities[group.number])
            self.router.lengths.learn(prompt, sum(lengths) / len(lengths))

    def _count_loss(self, member: Member, numbers: Sequence[int], error: ReplicaFailure) -> ReplicaLost | None:
        """Count that a replica was lost; return an error if the same prompt ran on as many as may be lost."""
        if not ran_until_lost(member, error):
            return None
        for number in numbers:
            if number not in self.decided:
                names = self._losses.setdefault(number, [])
                if member.name not in names:
                    names.append(member.name)
                if len(names) == MAX_LOST:
                    return lost_in_turn(names, f"prompts[{number}] and others of this batch")
        return None

    async def _fail(self, member: Member, numbers: Sequence[int], event: Event) -> NoReturn:
        """Raise for an error event: the part runs on another replica only if this one no longer serves."""
        await self.fleet.check(member)
        error = event.json()["error"]
        is_well = member.is_well if error["code"] == HTTPStatus.SERVICE_UNAVAILABLE else member.serves
        if not is_well:
            raise Disconnected(f"{member.name}: {error['message']}")
        headers = [(b"content-type", b"application/json")]
        raise PartRefused(WholeAnswer(error["code"], headers, _renumbered(event.data, numbers)))

    async def _check_serves(self, member: Member) -> None:
        """
        Raises:
            Disconnected: the replica is stopping. Its prompts run again on others, which return whole groups.
        """
        await self.fleet.check(member)
        if not member.serves:
            raise Disconnected(f"{member.name} is stopping")

    async def _refuse(self, member: Member, numbers: Sequence[int], answer: Answer) -> None:
        body = b"".join([chunk async for chunk in answer.chunks()])
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            await self.fleet.check(member)
            if not member.is_well:
                failure = Unreachable if value_of(answer.headers, RETRY_AFTER) else Disconnected
                raise failure(f"{member.name} answered {answer.status}")
        raise PartRefused(WholeAnswer(answer.status, answer.headers, _renumbered(body, numbers)))


def _renumbered(body: bytes, numbers: Sequence[int]) -> bytes:
    """Replace the numbers of a part's prompts by those of the batch."""
    return _PROMPT.sub(lambda found: b"prompts[%d]" % numbers[int(found[1])], body)
