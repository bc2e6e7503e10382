"""A batch of prompts that one caller submits: checked, allocated, then run group by group."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol

from darts_server.engine.port import OutputT, PromptRenderer, RequestT, TokenSlice
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
from darts_server.rollout.plan import OFF, UNSHAPED, Plan, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Ticket, caller
from darts_server.types import GroupRecord, PromptSpec, RequestOptions, Sample

logger = logging.getLogger(__name__)

FIELD = "prompts"
"""Named where a batch has more candidates than are admitted."""

NewPlanner = Callable[[Mapping[str, object]], Planner]
"""Creates the planner under a caller's policy overrides; raises ``InvalidRequest`` for an impossible one."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch as its caller submits it: a group of ``group_size`` for each prompt.

    Args:
        prompts: at least one, or ``carried``.
        group_size: M, trajectories per group.
        sampling: the engine's sampling parameters by name.
        policy: overrides of the server's policy settings by name, and under ``name`` which policy.
        budget: candidates in all; ``None`` leaves it to the policy.
        num_groups: complete groups that are enough, the first to be decided; ``None`` for all.
        survivors: return all trajectories that are not pruned, more or fewer than ``group_size``; ``None`` leaves it to
            the policy.
        partial: with survivors, return the prefixes of pruned candidates too.
        carry: what happens to prompts that are not decided. Unless they are dropped, prompts of this batch that were
            carried over from earlier ones start first.
        carried: all other prompts of the caller that were carried over are part of this batch, after ``prompts``.
    """

    prompts: Sequence[PromptSpec]
    group_size: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    policy: Mapping[str, object] = field(default_factory=dict)
    budget: int | None = None
    num_groups: int | None = None
    survivors: bool | None = None
    partial: bool = False
    carry: Carry = Carry.DROP
    carried: bool = False

    @property
    def takes_carried(self) -> bool:
        """Whether it takes prompts that were carried over."""
        return self.carried or self.carry is not Carry.DROP


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The outcome of the group of prompt ``number``.

    ``samples``: returned trajectories by candidate index; empty with an ``error``, which ends this group alone.
    ``prefixes``: tokens of pruned candidates by index, up to where they were pruned; ``None`` if not requested.
    """

    number: int
    group_id: str
    prompt_key: str
    samples: Mapping[int, Sample]
    record: GroupRecord | None
    error: Exception | None = None
    metadata: bytes | None = None
    prefixes: Mapping[int, TokenSlice] | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A prompt whose group was stopped because enough others were decided. ``carry``: how it is kept."""

    number: int
    prompt_key: str
    metadata: bytes | None
    carry: Carry = Carry.DROP


class BatchObserver(Protocol):
    """Follow the groups of a batch while they run. Called synchronously: return fast and never raise."""

    def group_started(self, number: int, run: GroupRun[Any, Any]) -> None:
        """Called when the group of prompt ``number`` has started."""
        ...

    def trajectory_selected(self, number: int, index: int, sample: Sample) -> None:
        """Called when candidate ``index`` is known to belong to its group."""
        ...


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
            _check_numbers(batch, plan, len(prompts))
            if batch.carry is Carry.RESUME:
                _check_resumable(rollouts, plan, requests)
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
        prefixes = dict(sorted(run.prefixes.items())) if self._partial else None
        return replace(result, samples=dict(sorted(samples.items())), record=run.record, prefixes=prefixes)


def check_terms(
    batch: BatchRequest,
    rollouts: Rollouts[RequestT, OutputT],
    renderer: PromptRenderer[RequestT, OutputT],
    new_planner: NewPlanner,
) -> tuple[Plan, Mapping[str, object]]:
    """Check all of a batch but its prompts; return its plan and the sampling parameters in force.

    Raises:
        InvalidRequest: names the field.
    """
    plan = _plan(batch, new_planner(batch.policy))
    rollouts.check_scorable(plan)
    return plan, renderer.effective_sampling(batch.sampling)


def _plan(batch: BatchRequest, planner: Planner) -> Plan:
    if not batch.prompts and not batch.carried:
        raise InvalidRequest("prompts", "must have at least one prompt, got none")
    plan = planner.plan(batch.group_size, RequestOptions()) or Plan(OFF, UNSHAPED, batch.group_size)
    if batch.survivors or (batch.survivors is None and plan.shaping.may_return_survivors):
        plan = _with_survivors(plan)
    if batch.partial and not plan.shaping.return_survivors:
        raise InvalidRequest(
            "partial",
            f"policy {plan.policy!r} does not return all survivors here; leave it out, or use a policy that prunes, "
            "such as 'roulette', and not \"survivors\": false",
        )
    if batch.budget is not None and plan.auto is not None:
        raise InvalidRequest("budget", f"policy {plan.policy!r} chooses the number of candidates itself; leave it out")
    return plan


def _check_numbers(batch: BatchRequest, plan: Plan, prompts: int) -> None:
    """Check what depends on the number of prompts, those that were carried over included.

    Raises:
        InvalidRequest
    """
    if not prompts:
        raise InvalidRequest("prompts", "must have at least one prompt, got none, and none was carried over")
    low, high = (prompts * bound for bound in plan.shaping.bounds(plan.size))
    if batch.budget is not None and not low <= batch.budget <= high:
        raise InvalidRequest(
            "budget",
            f"must be {low} to {high} for {prompts} groups of {plan.size} under policy {plan.policy!r}, "
            f"got {batch.budget}; change it, or leave it out",
        )
    if batch.num_groups is not None and not 1 <= batch.num_groups <= prompts:
        raise InvalidRequest("num_groups", f"must be 1 to {prompts}, the number of prompts, got {batch.num_groups}")


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


def _check_resumable(rollouts: Rollouts[RequestT, OutputT], plan: Plan, requests: Sequence[RequestT]) -> None:
    """
    Raises:
        InvalidRequest: candidates cannot go on as if they had not been stopped.
    """
    if plan.auto is not None:
        raise InvalidRequest(
            "carry",
            f"'resume' does not work under policy {plan.policy!r}, which may do something else next; use 'restart'",
        )
    if plan.shaping.prunes or plan.shaping.shadow:
        raise InvalidRequest(
            "carry",
            f"'resume' does not work under policy {plan.policy!r}, whose decisions depend on more than lengths; use "
            "'restart'",
        )
    rollouts.check_resumable(requests[0])  # all have the same sampling parameters


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


def _with_survivors(plan: Plan) -> Plan:
    if not plan.shaping.prunes:
        raise InvalidRequest(
            "survivors",
            f"policy {plan.policy!r} does not prune; leave it out, or use a policy that prunes, such as 'arrol'",
        )
    return replace(plan, shaping=replace(plan.shaping, return_survivors=True))
