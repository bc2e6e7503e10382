"""A batch of prompts that one caller submits, run group by group."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import DartsError
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt, CarriedPrompts, Carry
from darts_server.rollout.batches.events import AbortedSample, GroupResult, Unfinished
from darts_server.rollout.batches.feed import EventFeed
from darts_server.rollout.batches.preparation import PreparedBatch, PreparedGroup, prepare_batch
from darts_server.rollout.batches.request import BatchRequest, NewPlanner
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec, OnAbort
from darts_server.serving.admission import caller
from darts_server.types import Sample

logger = logging.getLogger(__name__)


class Submission(Generic[RequestT, OutputT]):
    """A batch that was checked and allocated, and of which nothing has started. `results` runs it.

    Prompts that were carried over are taken from ``kept`` by `prepare`. After `results`, exactly one of
    `keep_undecided` and `give_back` is to be called.
    """

    def __init__(
        self,
        prepared: PreparedBatch[RequestT],
        batch: BatchRequest,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        kept: CarriedPrompts,
    ) -> None:
        self.batch_id = prepared.batch_id
        self.plan = prepared.plan
        self.sampling = prepared.sampling
        """The sampling parameters in force."""
        self.generated_tokens = 0
        """By the groups that have ended, also by those that failed or were stopped."""
        self._groups = prepared.groups
        self._terms = prepared.terms
        self._wanted = prepared.enough
        self._places = asyncio.Semaphore(prepared.begun)
        self._started: set[int] = set()
        self._runs: dict[int, GroupRun[RequestT, OutputT]] = {}
        self._stopped: dict[int, CarriedGroup[OutputT] | None] = {}
        self._undecided_because: dict[int, DartsError] = {}
        self._handed_back: dict[int, GroupResult] = {}
        self._decided: set[int] = set()
        self._rollouts = rollouts
        self._renderer = renderer
        self._ticket = prepared.ticket
        self._carry = batch.carry
        self._on_abort = batch.on_abort
        self._kept = kept
        self._owner = caller.get().name
        self._is_running = False
        self._interrupted_by: DartsError | None = None

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
        kept = kept or CarriedPrompts()
        return cls(await prepare_batch(batch, rollouts, renderer, new_planner, kept), batch, rollouts, renderer, kept)

    @property
    def size(self) -> int:
        """Number of prompts."""
        return len(self._groups)

    def group_id(self, number: int) -> str:
        """Return the id of the group of a prompt."""
        return f"{self.batch_id}-{number}"

    def interrupt(self, error: DartsError, *, keep: bool, keep_tokens: bool) -> bool:
        """End all groups with what they have generated; whether they run.

        ``keep``: whether prompts may be carried over. Otherwise all groups have the error, and what was generated.
        ``keep_tokens``: whether what was generated may be, too. Otherwise it is handed back, see `unfinished`.
        """
        if self._carry is not Carry.DROP and not (keep and keep_tokens and self._carry is Carry.RESUME):
            self._on_abort = OnAbort.RETURN
        if not keep:
            self._carry = Carry.DROP
        self._interrupted_by = error
        for run in list(self._runs.values()):
            run.interrupt(error, self._on_abort)
        return self._is_running

    @property
    def unfinished(self) -> list[Unfinished]:
        """The prompts whose groups were not decided."""
        return [
            Unfinished(
                group.number,
                group.prompt_key,
                group.prompt.metadata,
                self._carry,
                self._undecided_because.get(group.number),
                self._handed_back.get(group.number),
            )
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

    def _undecided(self) -> list[PreparedGroup[RequestT]]:
        return [group for group in self._groups if group.number not in self._decided]

    async def results(self, feed: EventFeed | None = None) -> AsyncGenerator[GroupResult, None]:
        """Yield each group as it is decided, until enough are complete. Leaving early stops the other groups.

        A group that is aborted is decided, by an error, unless its prompt is carried over: then it is undecided. If
        groups can go on later, those that have ended when enough are complete are yielded too: they were counted, and
        must not be complete a second time.

        With a feed, each trajectory is reported as soon as it is known to belong to its group.

        Groups that were carried over start first, and then those that are expected to take longest, so that no long one
        starts when the others are done.
        """
        tasks: dict[int, asyncio.Task[GroupResult | None]] = {}
        missing = self._wanted
        try:
            async with self._rollouts.gate.enter():
                self._is_running = True
                for group in self._in_order():
                    tasks[group.number] = asyncio.create_task(self._run(group, feed))
                for next_result in asyncio.as_completed(tasks.values()):
                    if (result := await next_result) is None or result.error is not None:
                        self._places.release()
                    if result is None:
                        continue
                    self._decided.add(result.number)
                    self._runs.pop(result.number, None)
                    yield result
                    missing -= result.error is None
                    if not missing:
                        break
                if self._carry is Carry.RESUME:
                    for number in await self._stop_undecided():
                        if (result := await tasks[number]) is not None:
                            self._decided.add(number)
                            yield result
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

    async def _stop(self, group: PreparedGroup[RequestT], run: GroupRun[RequestT, OutputT]) -> int | None:
        if run.has_ended:
            return group.number
        run.stop_to_carry()
        await self._keep_generated(group, run)
        return None

    async def _keep_generated(self, group: PreparedGroup[RequestT], run: GroupRun[RequestT, OutputT]) -> None:
        """Keep what the candidates of a stopped group have generated, if another one can go on with it."""
        candidates = await run.carried()
        # With a seed a candidate's number gives its random numbers, so no other one may get it.
        is_renumbered = len(candidates) < len(run.candidates) and self._renderer.tail_seed(group.request) is not None
        if is_renumbered or len(candidates) < self.plan.size:  # it was paused for new weights, or its candidates failed
            self._stopped[group.number] = None
            self.generated_tokens += sum(candidate.tokens for candidate in candidates)
            return
        assert run.spec.tail_seed is not None
        saturated = group.allocation.saturated
        self._stopped[group.number] = CarriedGroup(self._terms, saturated, run.spec.tail_seed, candidates)

    async def _cancel(self, tasks: Mapping[int, asyncio.Task[GroupResult | None]]) -> None:
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

    def _in_order(self) -> list[PreparedGroup[RequestT]]:
        """Sort: carried over, then by expected length, then as the caller has them.

        New prompts are expected to be as long as the data set's mean; in the first step, before there is one, as the
        mean of those of this batch that are known.
        """
        statistics = self._rollouts.statistics
        means = {group.number: statistics.prompts.mean(group.prompt_key) for group in self._groups}
        known = [mean for mean in means.values() if mean is not None]
        usual = statistics.dataset.stats.mean or (sum(known) / len(known) if known else 0.0)
        return sorted(self._groups, key=lambda group: (group.carried is None, -(means[group.number] or usual)))

    async def _run(self, group: PreparedGroup[RequestT], feed: EventFeed | None) -> GroupResult | None:
        """Run one group; ``None`` if it was aborted and its prompt is carried over."""
        await self._places.acquire()
        await self._rollouts.starts.group(group.allocation.candidates)
        self._started.add(group.number)
        result = GroupResult(
            group.number, self.group_id(group.number), group.prompt_key, {}, None, metadata=group.prompt.metadata
        )
        samples: dict[int, Sample] = {}
        run: GroupRun[RequestT, OutputT] | None = None
        try:
            run = self._runs[group.number] = self._start(group, early=feed is not None)
            if feed is not None:
                feed.group_started(group.number, run)
            if self._interrupted_by is not None:
                run.interrupt(self._interrupted_by, self._on_abort)
            try:
                async with aclosing(run.trajectories()) as trajectories:
                    async for trajectory in trajectories:
                        sample = samples[trajectory.index] = await self._renderer.to_sample(trajectory.output)
                        if feed is not None:
                            feed.trajectory_selected(group.number, trajectory.index, sample)
            except DartsError as error:
                if run.interrupted is None:
                    raise
                return await self._interrupted(group, run, replace(result, error=error), samples)
        except DartsError as error:
            return replace(result, error=error)
        except Exception as error:  # a bug of ours: it ends this group and no other
            logger.exception("group %s failed", result.group_id)
            return replace(result, error=error)
        finally:  # also of a group that failed, or is stopped because enough others are complete
            if run is not None:
                self.generated_tokens += run.generated_tokens
        return replace(result, samples=dict(sorted(samples.items())), record=run.record)

    def _start(self, group: PreparedGroup[RequestT], *, early: bool) -> GroupRun[RequestT, OutputT]:
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
            self.group_id(group.number),
            group.prompt_key,
            tail_seed,
            early=early and not can_carry,  # what is delivered cannot go on in another group
            on_abort=self._on_abort,
        )
        held = self._ticket.split(group.allocation.candidates)
        return self._rollouts.start(
            spec, self.plan, group.allocation, held, () if resumed is None else resumed.candidates
        )

    async def _interrupted(
        self,
        group: PreparedGroup[RequestT],
        run: GroupRun[RequestT, OutputT],
        result: GroupResult,
        samples: Mapping[int, Sample],
    ) -> GroupResult | None:
        """Return what a group that was ended from outside has generated; ``None`` if its prompt is carried over."""
        assert run.interrupted is not None
        # First: if enough others are complete before it has ended, it stays undecided.
        self._undecided_because[group.number] = run.interrupted
        result, on_abort = replace(result, record=run.record), self._on_abort
        if on_abort is OnAbort.CARRY:
            await self._keep_generated(group, run)
        elif on_abort is OnAbort.RETURN:
            result = replace(result, aborted=await self._aborted(run, samples))
        if self._carry is Carry.DROP:
            return result
        if on_abort is OnAbort.RETURN:
            self._handed_back[group.number], self._stopped[group.number] = result, None
        self._runs.pop(group.number)
        return None

    async def _aborted(
        self, run: GroupRun[RequestT, OutputT], samples: Mapping[int, Sample]
    ) -> dict[int, AbortedSample]:
        aborted: dict[int, AbortedSample] = {}
        for index, output in (await run.aborted_outputs()).items():
            sample = samples.get(index) or await self._renderer.to_sample(output)
            aborted[index] = AbortedSample(sample, run.runner.candidates[index].version_spans(len(sample.token_ids)))
        return aborted
