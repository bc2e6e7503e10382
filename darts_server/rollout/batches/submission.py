"""Whole batches of prompts, submitted at once, as our own API takes them."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol

from darts_server.engine.port import OutputT, Prompter, RequestT
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import OFF, UNSHAPED, Plan, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.types import GroupRecord, PromptSpec, RequestOptions, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What a caller submits: groups of ``group_size`` for each of ``prompts``.

    ``sampling``: the engine's sampling parameters by their names. ``policy``: changes to the server's policy, by the
    names of its settings, and under ``name`` which one. ``budget``: candidates in all, ``None`` to leave it to the
    policy. ``num_groups``: how many groups are enough, the first to be decided; ``None`` for all of them.
    ``survivors``: all that are not pruned are returned, ``group_size`` at least.
    """

    prompts: Sequence[PromptSpec]
    group_size: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    policy: Mapping[str, object] = field(default_factory=dict)
    budget: int | None = None
    num_groups: int | None = None
    survivors: bool = False


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What became of the group of prompt ``number``.

    ``samples``: by candidate index, of those that are returned; empty with an ``error``, which ends this group alone.
    """

    number: int
    group_id: str
    prompt_key: str
    samples: Mapping[int, Sample]
    record: GroupRecord | None
    error: Exception | None = None
    metadata: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A prompt whose group was stopped because enough others were decided."""

    number: int
    prompt_key: str
    metadata: Mapping[str, object] | None


class Follower(Protocol):
    """Hears of groups while they run. Told synchronously: return fast and never raise."""

    def began(self, number: int, run: GroupRun[Any, Any]) -> None:
        """The group of prompt ``number`` runs."""
        ...

    def belongs(self, number: int, index: int, sample: Sample) -> None:
        """Candidate ``index`` is known to belong to its group."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready(Generic[RequestT]):
    number: int
    request: RequestT
    key: str
    metadata: Mapping[str, object] | None
    grant: Allocation


class Submissions(Generic[RequestT, OutputT]):
    """Takes batches.

    Args:
        planner: what policies do under a caller's changes; raises ``InvalidRequest`` for one that cannot be.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        prompter: Prompter[RequestT, OutputT],
        planner: Callable[[Mapping[str, object]], Planner],
    ) -> None:
        self._rollouts = rollouts
        self._prompter = prompter
        self._planner = planner

    async def submit(self, asked: BatchRequest) -> "Submission[RequestT, OutputT]":
        """A batch that is checked and allocated; nothing has been started.

        Raises:
            InvalidRequest: names the field; for a prompt, its number too.
            Overloaded
        """
        batch_id = f"batch-{uuid.uuid4().hex}"
        plan = self._plan(asked)
        self._rollouts.admission.check(len(asked.prompts) * plan.size, "prompts")
        requests = [
            await self._request(asked, number, prompt, f"{batch_id}-{number}")
            for number, prompt in enumerate(asked.prompts)
        ]
        keys = [
            prompt.key or self._prompter.key(request) for prompt, request in zip(asked.prompts, requests, strict=True)
        ]
        grants = self._rollouts.allocate_together(plan, keys, asked.budget)
        metadata = [prompt.metadata for prompt in asked.prompts]
        ready = [_Ready(i, *each) for i, each in enumerate(zip(requests, keys, metadata, grants, strict=True))]
        return Submission(batch_id, plan, ready, asked.num_groups, self._rollouts, self._prompter)

    def _plan(self, asked: BatchRequest) -> Plan:
        if not asked.prompts:
            raise InvalidRequest("prompts", "must have at least one prompt, got none")
        plan = self._planner(asked.policy).plan(asked.group_size, RequestOptions()) or Plan(
            OFF, UNSHAPED, asked.group_size
        )
        self._rollouts.check_scorable(plan)
        if asked.survivors:
            plan = _with_survivors(plan)
        low, high = (len(asked.prompts) * bound for bound in plan.shaping.bounds(plan.size))
        if asked.budget is not None and not low <= asked.budget <= high:
            raise InvalidRequest(
                "budget",
                f"must be {low} to {high} for {len(asked.prompts)} groups of {plan.size} under policy {plan.policy!r}, "
                f"got {asked.budget}; change it, or leave it out",
            )
        if asked.num_groups is not None and not 1 <= asked.num_groups <= len(asked.prompts):
            raise InvalidRequest(
                "num_groups", f"must be 1 to {len(asked.prompts)}, the number of prompts, got {asked.num_groups}"
            )
        return plan

    async def _request(self, asked: BatchRequest, number: int, prompt: PromptSpec, request_id: str) -> RequestT:
        try:
            return await self._prompter.request(prompt, asked.sampling, asked.group_size, request_id)
        except InvalidRequest as error:
            if error.field.startswith("sampling"):
                raise
            raise InvalidRequest(f"prompts[{number}].{error.field}", error.message) from error


class Submission(Generic[RequestT, OutputT]):
    """One batch. `results` runs it."""

    def __init__(
        self,
        batch_id: str,
        plan: Plan,
        ready: Sequence[_Ready[RequestT]],
        num_groups: int | None,
        rollouts: Rollouts[RequestT, OutputT],
        prompter: Prompter[RequestT, OutputT],
    ) -> None:
        self.batch_id = batch_id
        self.plan = plan
        self._ready = ready
        self._enough = len(ready) if num_groups is None else num_groups
        self._began: set[int] = set()
        self._decided: set[int] = set()
        self._rollouts = rollouts
        self._prompter = prompter

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self._ready)

    @property
    def unfinished(self) -> list[Unfinished]:
        """The prompts whose groups were not given."""
        return [Unfinished(r.number, r.key, r.metadata) for r in self._ready if r.number not in self._decided]

    async def results(self, follower: Follower | None = None) -> AsyncGenerator[GroupResult, None]:
        """Each group as it is decided, until enough have trajectories. Leaving early stops those that are not decided.

        A follower hears of each trajectory as soon as it is known to belong.

        Groups that are expected to take longest start first, so that no long one begins when the others are done.
        """
        tasks: list[asyncio.Task[GroupResult]] = []
        missing = self._enough
        try:
            candidates = sum(ready.grant.candidates for ready in self._ready)
            with self._rollouts.admission.held(candidates) as ticket:
                async with self._rollouts.gate.held():
                    tasks += [asyncio.create_task(self._group(ready, follower)) for ready in self._longest_first()]
                    ticket.begun()
                    for next_one in asyncio.as_completed(tasks):
                        result = await next_one
                        self._decided.add(result.number)
                        yield result
                        missing -= result.error is None
                        if not missing:
                            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for ready in self._ready:
                if ready.number not in self._began and ready.grant.batch is not None:
                    ready.grant.batch.dropped()

    def _longest_first(self) -> list[_Ready[RequestT]]:
        lengths = {ready.number: self._rollouts.expected_length(ready.key) for ready in self._ready}
        known = [length for length in lengths.values() if length is not None]
        typical = sum(known) / len(known) if known else 0.0
        return sorted(self._ready, key=lambda ready: -(lengths[ready.number] or typical))

    async def _group(self, ready: _Ready[RequestT], follower: Follower | None) -> GroupResult:
        self._began.add(ready.number)
        group_id = f"{self.batch_id}-{ready.number}"
        nothing = GroupResult(ready.number, group_id, ready.key, {}, None, metadata=ready.metadata)
        samples: dict[int, Sample] = {}
        try:
            run = self._rollouts.run(
                ready.request,
                self.plan,
                ready.grant,
                group_id=group_id,
                prompt_key=ready.key,
                tail_seed=self._prompter.tail_seed(ready.request),
                early=follower is not None,
            )
            if follower is not None:
                follower.began(ready.number, run)
            async with aclosing(run.trajectories()) as trajectories:
                async for trajectory in trajectories:
                    sample = samples[trajectory.index] = self._prompter.sample(trajectory.output)
                    if follower is not None:
                        follower.belongs(ready.number, trajectory.index, sample)
        except DartsError as error:
            return replace(nothing, error=error)
        except Exception as error:  # a fault of ours; it ends this group and no other
            logger.exception("group %s failed", group_id)
            return replace(nothing, error=error)
        return replace(nothing, samples=dict(sorted(samples.items())), record=run.record)


def _with_survivors(plan: Plan) -> Plan:
    if not plan.shaping.prunes:
        raise InvalidRequest(
            "survivors", f"policy {plan.policy!r} prunes nobody; leave it out, or name one that prunes, such as 'arrol'"
        )
    return replace(plan, shaping=replace(plan.shaping, survivors=True))
