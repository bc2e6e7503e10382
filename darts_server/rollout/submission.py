"""Whole batches of prompts, submitted at once, as our own API takes them."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

from darts_server.engine.port import OutputT, Prompter, RequestT
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.rollout.batch import Grant
from darts_server.rollout.plan import OFF, UNSHAPED, Plan, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.types import GroupRecord, PromptSpec, RequestOptions, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller submits: groups of ``group_size`` for each of ``prompts``.

    ``sampling``: the engine's sampling parameters by their names. ``policy``: changes to the server's policy, by the
    names of its settings, and under ``name`` which one. ``budget``: candidates in all, ``None`` to leave it to the
    policy.
    """

    prompts: Sequence[PromptSpec]
    group_size: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    policy: Mapping[str, object] = field(default_factory=dict)
    budget: int | None = None


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


@dataclass(frozen=True, slots=True)
class _Ready(Generic[RequestT]):
    number: int
    request: RequestT
    key: str
    grant: Grant


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

    async def submit(self, asked: Asked) -> "Submission[RequestT, OutputT]":
        """A batch that is checked and allocated; nothing has been started.

        Raises:
            InvalidRequest: names the field; for a prompt, its number too.
        """
        batch_id = f"batch-{uuid.uuid4().hex}"
        plan = self._plan(asked)
        requests = [
            await self._request(asked, number, prompt, f"{batch_id}-{number}")
            for number, prompt in enumerate(asked.prompts)
        ]
        keys = [
            prompt.key or self._prompter.key(request) for prompt, request in zip(asked.prompts, requests, strict=True)
        ]
        grants = self._rollouts.allocate_together(plan, keys, asked.budget)
        ready = [_Ready(i, *each) for i, each in enumerate(zip(requests, keys, grants, strict=True))]
        return Submission(batch_id, plan, ready, self._rollouts, self._prompter)

    def _plan(self, asked: Asked) -> Plan:
        if not asked.prompts:
            raise InvalidRequest("prompts", "must have at least one prompt, got none")
        plan = self._planner(asked.policy).plan(asked.group_size, RequestOptions()) or Plan(
            OFF, UNSHAPED, asked.group_size
        )
        low, high = (len(asked.prompts) * bound for bound in plan.shaping.bounds(plan.size))
        if asked.budget is not None and not low <= asked.budget <= high:
            raise InvalidRequest(
                "budget",
                f"must be {low} to {high} for {len(asked.prompts)} groups of {plan.size} under policy {plan.policy!r}, "
                f"got {asked.budget}; change it, or leave it out",
            )
        return plan

    async def _request(self, asked: Asked, number: int, prompt: PromptSpec, request_id: str) -> RequestT:
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
        rollouts: Rollouts[RequestT, OutputT],
        prompter: Prompter[RequestT, OutputT],
    ) -> None:
        self.batch_id = batch_id
        self.plan = plan
        self._ready = ready
        self._began: set[int] = set()
        self._rollouts = rollouts
        self._prompter = prompter

    async def results(self) -> AsyncGenerator[GroupResult, None]:
        """Each group as it is decided. Leaving early stops those that are not.

        Groups that are expected to take longest start first, so that no long one begins when the others are done.
        """
        tasks = [asyncio.create_task(self._group(ready)) for ready in self._longest_first()]
        try:
            for next_one in asyncio.as_completed(tasks):
                yield await next_one
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

    async def _group(self, ready: _Ready[RequestT]) -> GroupResult:
        self._began.add(ready.number)
        group_id = f"{self.batch_id}-{ready.number}"
        nothing = GroupResult(ready.number, group_id, ready.key, {}, None)
        try:
            run = self._rollouts.run(
                ready.request,
                self.plan,
                ready.grant,
                group_id=group_id,
                prompt_key=ready.key,
                lots=self._prompter.lots(ready.request),
            )
            outputs = {t.index: t.output async for t in run.trajectories()}
            samples = {index: self._prompter.sample(output) for index, output in sorted(outputs.items())}
        except DartsError as error:
            return replace(nothing, error=error)
        except Exception as error:  # a fault of ours; it ends this group and no other
            logger.exception("group %s failed", group_id)
            return replace(nothing, error=error)
        return replace(nothing, samples=samples, record=run.record)
