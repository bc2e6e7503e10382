"""A batch of prompts that one caller submits: checked, allocated, then run group by group."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import DartsError, GroupAborted, InvalidRequest
from darts_server.rollout.allocation.allocator import CohortChoice
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.batches.carried import (
    CarriedGroup,
    CarriedPrompt,
    CarriedPrompts,
    Carry,
    CarryLimits,
    Identity,
    match,
)
from darts_server.rollout.batches.request import BatchRequest, NewPlanner, check_numbers, check_resumable, check_terms
from darts_server.rollout.batches.results import BatchObserver, GroupResult, Unfinished
from darts_server.rollout.plan import Plan
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Ticket, caller
from darts_server.types import PromptSpec, Sample

logger = logging.getLogger(__name__)

FIELD = "prompts"
"""Named where a batch has more candidates than are admitted."""


@dataclass(frozen=True, slots=True)
class _PreparedGroup(Generic[RequestT]):
    """A checked prompt with its allocation.

    ``carried``: what was kept of it since an earlier batch. ``resumed``: what its candidates go on from.
    """

    number: int
    prompt: PromptSpec
    request: RequestT
    identity: Identity
    carried: CarriedPrompt | None
    allocation: Allocation
    resumed: CarriedGroup[Any] | None

    @property
    def prompt_key(self) -> str:
        return self.identity[0]


class Submission(Generic[RequestT, OutputT]):
    """A batch that was checked and allocated, and of which nothing has started. `results` runs it.

    Prompts that were carried over are taken from ``kept`` by `prepare`. After `results`, exactly one of
    `keep_undecided` and `give_back` is to be called.
    """

    def __init__(
        self,
        batch_id: str,
        plan: Plan,
        sampling: Mapping[str, object],
        groups: Sequence[_PreparedGroup[RequestT]],
        batch: BatchRequest,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        ticket: Ticket,
        kept: CarriedPrompts,
    ) -> None:
        self.batch_id = batch_id
        self.plan = plan
        self.sampling = sampling
        """The sampling parameters in force."""
        self.generated_tokens = 0
        """By the groups that have ended, also by those that failed or were stopped."""
        self._groups = groups
        self._wanted = len(groups) if batch.num_groups is None else batch.num_groups
        self._started: set[int] = set()
        self._runs: dict[int, GroupRun[RequestT, OutputT]] = {}
        self._stopped: dict[int, CarriedGroup[OutputT] | None] = {}
        self._decided: set[int] = set()
        self._rollouts = rollouts
        self._renderer = renderer
        self._ticket = ticket
        self._partial = batch.partial
        self._carry = batch.carry
        self._kept = kept
        self._owner = caller.get().name
        self._dropped: set[int] = set()

    @classmethod
    async def prepare(
        cls,
        batch: BatchRequest,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        new_planner: NewPlanner,
        kept: CarriedPrompts | None = None,
    ) -> "Submission[RequestT, OutputT]":
        """Check and allocate a batch. ``kept``: where prompts are carried over; ``None`` for nothing before and after.

        Raises:
            InvalidRequest: names the field; for a prompt, its number too.
            Overloaded, QuotaReached
        """
        batch_id = f"batch-{uuid.uuid4().hex}"
        kept = kept or CarriedPrompts()
        plan, sampling = check_terms(batch, rollouts, renderer, new_planner)
        usual = len(batch.prompts) * rollouts.usual_candidates(plan)
        ticket = rollouts.admission.admit(batch.budget or usual, FIELD)
        taken: list[CarriedPrompt] = []
        try:
            prompts = list(batch.prompts)
            requests = [
                await _request(renderer, batch, f"prompts[{number}]", prompt, f"{batch_id}-{number}")
                for number, prompt in enumerate(prompts)
            ]
            identities = [_identity(renderer, *parts) for parts in zip(prompts, requests, strict=True)]
            if batch.takes_carried:
                taken = kept.take(caller.get().name, identities, others=batch.carried)
            carried = list(match(identities, taken))
            for other in _without(taken, carried):
                name = f"{batch_id}-{len(requests)}"
                requests.append(await _request(renderer, batch, f"carried[{len(requests)}]", other.prompt, name))
                prompts.append(other.prompt)
                identities.append(other.identity)
                carried.append(other)
            check_numbers(batch, plan, len(prompts))
            if batch.carry is Carry.RESUME:
                check_resumable(rollouts, plan, requests)
            terms, keys = _terms(plan, sampling), [key for key, _ in identities]
            resumed = [_resumed(batch, terms, each, kept.limits, rollouts.weight_version) for each in carried]
            chosen = await rollouts.allocator.choose(plan, keys, batch.num_groups)
            allocations = _allocate(rollouts, ticket, plan, keys, batch.budget, resumed, chosen)
        except BaseException:
            ticket.release()
            kept.put(caller.get().name, (), taken)
            raise
        parts = zip(prompts, requests, identities, carried, allocations, resumed, strict=True)
        groups = [_PreparedGroup(number, *each) for number, each in enumerate(parts)]
        return cls(batch_id, plan, sampling, groups, batch, rollouts, renderer, ticket, kept)

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self._groups)

    def group_id(self, number: int) -> str:
        """Return the id of the group of a prompt."""
        return f"{self.batch_id}-{number}"

    def drop(self, number: int) -> None:
        """Stop the group of a prompt, or do not start it; its result has a `GroupAborted`. The others go on."""
        self._dropped.add(number)
        self._rollouts.abort(self.group_id(number))

    @property
    def unfinished(self) -> list[Unfinished]:
        """The prompts whose groups were not decided."""
        return [
            Unfinished(group.number, group.prompt_key, group.prompt.metadata, self._carry)
            for group in self._undecided()
        ]

    def keep_undecided(self) -> int:
        """Keep the prompts whose groups were not decided, as their caller wants it; the number that it has now."""
        if self._carry is not Carry.DROP:
            new: list[CarriedPrompt] = []
            older: list[CarriedPrompt] = []
            for group in self._undecided():
                generated = self._stopped.get(group.number, group.resumed)
                prompt = CarriedPrompt(group.prompt, group.identity, generated)
                (new if group.carried is None else older).append(prompt)
            self._kept.put(self._owner, new, older)
        return self._kept.count(self._owner)

    def give_back(self, *, delivered: bool) -> None:
        """Keep the prompts that it took, as they were. ``delivered``: except those of decided groups."""
        groups = self._undecided() if delivered else self._groups
        self._kept.put(self._owner, (), [group.carried for group in groups if group.carried is not None])

    def _undecided(self) -> list[_PreparedGroup[RequestT]]:
        return [group for group in self._groups if group.number not in self._decided]

    async def results(self, observer: BatchObserver | None = None) -> AsyncGenerator[GroupResult, None]:
        """Yield each group as it is decided, until enough are complete. Leaving early stops the other groups.

        If others can go on later, those that have ended by then are yielded too: they were counted, and must not be
        complete a second time.

        With an observer, each trajectory is reported as soon as it is known to belong to its group.

        Groups that were carried over start first, and then those that are expected to take longest, so that no long one
        starts when the others are done.
        """
        tasks: dict[int, asyncio.Task[GroupResult]] = {}
        missing = self._wanted
        try:
            async with self._rollouts.gate.enter():
                for group in self._in_order():
                    tasks[group.number] = asyncio.create_task(self._run(group, observer))
                for next_result in asyncio.as_completed(tasks.values()):
                    result = await next_result
                    self._decided.add(result.number)
                    self._runs.pop(result.number, None)
                    yield result
                    missing -= result.error is None
                    if not missing:
                        break
                if self._carry is Carry.RESUME:
                    for number in await self._stop_undecided():
                        self._decided.add(number)
                        yield await tasks[number]
        finally:
            self._ticket.release()
            await self._cancel(tasks)
            for group in self._groups:
                if group.number not in self._started:
                    group.allocation.drop()

    async def _stop_undecided(self) -> list[int]:
        """Stop all groups that are not decided, keep what their candidates have generated; the ones that had ended."""
        stopping = []
        for group in self._undecided():
            if (run := self._runs.get(group.number)) is not None:
                stopping.append(asyncio.create_task(self._stop(group, run)))
                await asyncio.sleep(0)  # each stops its candidates, so they take turns
        return [number for number in await asyncio.gather(*stopping) if number is not None]

    async def _stop(self, group: _PreparedGroup[RequestT], run: GroupRun[RequestT, OutputT]) -> int | None:
        if run.has_ended:
            return group.number
        candidates = await run.carry()
        # With a seed a candidate's number gives its random numbers, so no other one may get it.
        is_renumbered = len(candidates) < len(run.candidates) and self._renderer.tail_seed(group.request) is not None
        if is_renumbered or len(candidates) < self.plan.size:  # it was paused for new weights, or its candidates failed
            self._stopped[group.number] = None
            self.generated_tokens += sum(candidate.tokens for candidate in candidates)
            return None
        assert run.spec.tail_seed is not None
        terms, saturated = _terms(self.plan, self.sampling), group.allocation.saturated
        self._stopped[group.number] = CarriedGroup(terms, saturated, run.spec.tail_seed, candidates)
        return None

    async def _cancel(self, tasks: Mapping[int, asyncio.Task[GroupResult]]) -> None:
        """Cancel the tasks of all groups, and wait for their ends. Each stops its candidates, so they take turns."""
        for number, task in tasks.items():
            if number not in self._started:
                task.cancel()
        try:
            for task in tasks.values():
                if not task.done():
                    task.cancel()
                    await asyncio.sleep(0)
        finally:  # also if this is cancelled
            for task in tasks.values():
                task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _in_order(self) -> list[_PreparedGroup[RequestT]]:
        """Sort: carried over, then by expected length, then as the caller has them.

        New prompts are expected to be as long as the data set's mean; in the first step, before there is one, as the
        mean of those of this batch that are known.
        """
        statistics = self._rollouts.statistics
        means = {group.number: statistics.prompts.mean(group.prompt_key) for group in self._groups}
        known = [mean for mean in means.values() if mean is not None]
        usual = statistics.dataset.stats.mean or (sum(known) / len(known) if known else 0.0)
        return sorted(self._groups, key=lambda group: (group.carried is None, -(means[group.number] or usual)))

    async def _run(self, group: _PreparedGroup[RequestT], observer: BatchObserver | None) -> GroupResult:
        await self._rollouts.starts.group(group.allocation.candidates)
        self._started.add(group.number)
        group_id = self.group_id(group.number)
        result = GroupResult(group.number, group_id, group.prompt_key, {}, None, metadata=group.prompt.metadata)
        samples: dict[int, Sample] = {}
        run: GroupRun[RequestT, OutputT] | None = None
        if group.number in self._dropped:
            return replace(result, error=GroupAborted("the group was stopped before it started"))
        try:
            can_carry = self._carry is Carry.RESUME
            tail_seed = self._renderer.tail_seed(group.request)
            resumed = group.resumed
            if resumed is not None and resumed.staleness(self._rollouts.weight_version) > self._kept.limits.staleness:
                resumed = None  # the weights changed while it waited
            if resumed is not None:
                tail_seed = resumed.tail_seed
            elif can_carry and tail_seed is None:
                tail_seed = (secrets.randbits(64),)
            spec = GroupSpec.of_plan(
                self.plan,
                group.request,
                group_id,
                group.prompt_key,
                tail_seed,
                early=observer is not None and not can_carry,  # what is delivered cannot go on in another group
                keep_prefixes=self._partial,
                can_carry=can_carry,
            )
            held = self._ticket.split(group.allocation.candidates)
            candidates = () if resumed is None else resumed.candidates
            run = self._rollouts.start(spec, self.plan, group.allocation, held, candidates)
            if can_carry:
                self._runs[group.number] = run
            if observer is not None:
                observer.group_started(group.number, run)
            async with aclosing(run.trajectories()) as trajectories:
                async for trajectory in trajectories:
                    sample = samples[trajectory.index] = await self._renderer.to_sample(trajectory.output)
                    if observer is not None:
                        observer.trajectory_selected(group.number, trajectory.index, sample)
        except DartsError as error:
            return replace(result, error=error)
        except Exception as error:  # a bug of ours: it ends this group and no other
            logger.exception("group %s failed", group_id)
            return replace(result, error=error)
        finally:  # also of a group that failed, or is stopped because enough others are complete
            if run is not None:  # without a record, a shadow's other candidates still run
                self.generated_tokens += run.generated_tokens
        prefixes = dict(sorted(run.tokens.prefixes.items())) if self._partial else None
        return replace(result, samples=dict(sorted(samples.items())), record=run.record, prefixes=prefixes)


def _allocate(
    rollouts: Rollouts[RequestT, OutputT],
    ticket: Ticket,
    plan: Plan,
    keys: Sequence[str],
    budget: int | None,
    resumed: Sequence[CarriedGroup[OutputT] | None],
    chosen: CohortChoice | None,
) -> list[Allocation]:
    """Allocate candidates to all groups of a batch, and hold them. Those that go on keep theirs.

    Raises:
        Overloaded, QuotaReached, InvalidRequest: there are more than usual, and these are not admitted.
    """
    usual, room = ticket.candidates, ticket.room
    ticket.resize(0)  # a batch must not reduce its own redundancy by waiting
    cohort = rollouts.allocator.allocate_cohort(plan, keys, budget, chosen, room)
    allocations = [
        fresh if group is None else replace(fresh, candidates=len(group.candidates), saturated=group.saturated)
        for fresh, group in zip(cohort, resumed, strict=True)
    ]
    ticket.resize(usual)  # in the same turn of the loop, so there is still room
    try:
        ticket.resize(sum(allocation.candidates for allocation in allocations), FIELD)
    except DartsError:
        for allocation in allocations:
            allocation.drop()
        raise
    return allocations


def _terms(plan: Plan, sampling: Mapping[str, object]) -> object:
    """What must be the same for a group to go on in another batch."""
    return plan.policy, plan.shaping, plan.size, dict(sampling)


def _resumed(
    batch: BatchRequest, terms: object, carried: CarriedPrompt | None, limits: CarryLimits, version: int
) -> CarriedGroup[Any] | None:
    """Return what a prompt's candidates go on from; ``None`` if it starts again."""
    group = None if carried is None or batch.carry is not Carry.RESUME else carried.group
    usable = group is not None and group.terms == terms and group.staleness(version) <= limits.staleness
    return group if usable else None


async def _request(
    renderer: PromptRenderer[RequestT, OutputT], batch: BatchRequest, field: str, prompt: PromptSpec, request_id: str
) -> RequestT:
    """``field``: names the prompt in errors."""
    try:
        return await renderer.make_request(prompt, batch.sampling, batch.group_size, request_id)
    except InvalidRequest as error:
        if error.field.startswith("sampling"):
            raise
        raise InvalidRequest(f"{field}.{error.field}", error.message) from error


def _identity(renderer: PromptRenderer[RequestT, OutputT], prompt: PromptSpec, request: RequestT) -> Identity:
    content = renderer.prompt_key(request)
    return prompt.key or content, content


def _without(prompts: Sequence[CarriedPrompt], others: Sequence[CarriedPrompt | None]) -> list[CarriedPrompt]:
    known = {id(other) for other in others}
    return [prompt for prompt in prompts if id(prompt) not in known]
