"""Run a batch group by group, in a task of its own, for any number of listeners."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from darts_server.caller import caller
from darts_server.engine.port import PromptRenderer
from darts_server.exceptions import DartsError, GroupAborted
from darts_server.rollout.batches.batch import BatchGroup, PreparedBatch
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt, CarriedPrompts, Carry
from darts_server.rollout.batches.events import (
    AbortedSample,
    BatchDone,
    BatchEnd,
    BatchFailed,
    BatchStarted,
    EventFeed,
    GroupResult,
    Unfinished,
)
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec, OnAbort, Quota
from darts_server.types import Sample

logger = logging.getLogger(__name__)


class StreamMode(Enum):
    """Which events of its batch a caller gets while it runs."""

    OFF = False
    GROUPS = "groups"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a caller wants its answer. ``chunk_tokens``: least number of tokens in a delta of a running candidate."""

    stream: StreamMode = StreamMode.OFF
    chunk_tokens: int = 100


class BatchRun:
    """Run a batch to its end, or until it is cancelled. It starts in a later turn of the event loop.

    Groups that were carried over start first, and then those that are expected to take longest, so that no long one
    starts when the others are done. Prompts that were carried over and are not decided go back to ``kept``.

    Args:
        answer_format: how its listeners are answered.
        replayable: whether there may be several listeners, each from the first event on; otherwise there is one.
        on_idle: called when the last listener has left before its end.
        on_end: called when it has ended, with any outcome; ``None`` for nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        prepared: PreparedBatch[Any, Any],
        rollouts: Rollouts[Any, Any],
        renderer: PromptRenderer[Any, Any],
        kept: CarriedPrompts,
        answer_format: AnswerFormat,
        *,
        replayable: bool = False,
        on_idle: Callable[["BatchRun"], object] = lambda _: None,
        on_end: Callable[["BatchRun"], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_id = prepared.batch_id
        self.plan = prepared.plan
        self.sampling = prepared.sampling
        self.size = len(prepared.groups)
        self.owner = caller.get().name
        """Name of the caller that started it; ``None`` for callers without a key."""
        self.answer_format = answer_format
        self.feed: EventFeed | None = None
        """Its events; ``None`` if they are not streamed."""
        if answer_format.stream is not StreamMode.OFF:
            survivors = self.plan.shaping.return_survivors
            first = BatchStarted(self.batch_id, self.plan.policy, self.size, survivors, self.sampling)
            chunk = answer_format.chunk_tokens if answer_format.stream is StreamMode.TOKENS else None
            self.feed = EventFeed(first, chunk, rollouts.poll_seconds, replayable, clock)
        self.listeners = 0
        self.end: BatchEnd | None = None
        """How it ended; ``None`` while it runs."""
        self._ended = asyncio.Event()
        self._on_idle = on_idle
        self._on_end = on_end
        self._clock = clock
        self._started_at = clock()
        self._rollouts = rollouts
        self._renderer = renderer
        self._kept = kept
        self._prepared = prepared
        self._places = asyncio.Semaphore(prepared.places)
        self._carry = prepared.carry
        by_carry = {Carry.DROP: OnAbort.RETURN, Carry.RESTART: OnAbort.FAIL, Carry.RESUME: OnAbort.CARRY}
        self._on_abort = by_carry[self._carry]
        self._quota = Quota(prepared.needed) if self._carry is Carry.RESUME else None
        self._generated = 0  # tokens of the groups that have ended, also of those that failed or were stopped
        self._is_running = False
        self._interrupted_by: DartsError | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"darts-{self.batch_id}")
        """Runs it, and ends a little after it, when prompts that it has taken are given back."""

    # --- called by listeners and the registry -------------------------------

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Count a listener while the block runs: one that waits for the end, or reads the events of `feed`."""
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1
            if not self.listeners and self.end is None:
                self._on_idle(self)

    async def wait(self) -> BatchDone:
        """Wait for the end of the batch.

        Raises:
            GroupAborted: it was cancelled.
        """
        await self._ended.wait()
        if isinstance(self.end, BatchFailed):
            raise self.end.error
        assert self.end is not None
        return self.end

    def cancel(self, why: str) -> bool:
        """End the batch with `GroupAborted`; whether it was running."""
        return self.fail(GroupAborted(why))

    def fail(self, error: DartsError) -> bool:
        """End the batch with an error, which its listeners get; whether it was running."""
        if self.end is not None:
            return False
        self._finish(BatchFailed(error))
        # In a later turn of the loop: a task that is cancelled before its first turn never runs its cleanup.
        asyncio.get_running_loop().call_soon(self.task.cancel)
        return True

    def interrupt(self, error: DartsError, *, keep: bool, keep_tokens: bool) -> None:
        """End all groups with what they have generated. A batch that still waits for the engine has nothing, and fails.

        ``keep``: whether prompts may be carried over. Otherwise all groups have the error, and what was generated.
        ``keep_tokens``: whether what was generated may be, too. Otherwise it is handed back, see `Unfinished`.
        """
        if self._carry is not Carry.DROP and not (keep and keep_tokens and self._carry is Carry.RESUME):
            self._on_abort = OnAbort.RETURN
        if not keep:
            self._carry = Carry.DROP
        self._interrupted_by = error
        for group in self._prepared.groups:
            if group.run is not None:
                group.run.interrupt(error, self._on_abort)
        if not self._is_running:
            self.fail(error)

    # --- the batch ----------------------------------------------------------

    async def _run(self) -> None:
        try:
            results = await self._run_groups()
        except Exception as error:  # a bug of ours: listeners get it
            logger.exception("batch %s failed", self.batch_id)
            self._finish(BatchFailed(error))
        else:
            if self.end is None:
                # Prompts whose groups were not decided are kept as their caller wants it.
                unfinished: list[Unfinished] = []
                new: list[CarriedPrompt] = []
                older: list[CarriedPrompt] = []
                for group in self._prepared.groups:
                    if group.is_decided:
                        continue
                    key, metadata, why = group.prompt_key, group.prompt.metadata, group.interrupted
                    unfinished.append(Unfinished(group.number, key, metadata, self._carry, why, group.handed_back))
                    prompt = CarriedPrompt(group.prompt, group.identity, group.resumed)
                    (new if group.carried is None else older).append(prompt)
                if self._carry is not Carry.DROP:
                    self._kept.put(self.owner, new, older)
                carried, seconds = self._kept.count(self.owner), self._clock() - self._started_at
                self._finish(BatchDone(self.batch_id, results, unfinished, seconds, self._generated, carried))
        finally:
            if isinstance(self.end, BatchFailed):  # its caller has no more than the groups that it was streamed
                streams = self.feed is not None
                lost = [group.carried for group in self._prepared.groups if not (streams and group.is_decided)]
                self._kept.put(self.owner, (), filter(None, lost))
            # A batch that is kept must not keep its prompts, nor what was generated for those that are carried over.
            self._prepared = replace(self._prepared, groups=(), terms="")

    async def _run_groups(self) -> list[GroupResult]:
        """Run all groups until enough are complete; return the results in the order in which they were decided.

        A group that is aborted is decided, by an error, unless its prompt is carried over: then it is undecided. If
        groups can go on later, no more than enough are complete, see `Quota`.
        """
        results: list[GroupResult] = []
        missing = self._prepared.needed

        def decide(group: BatchGroup[Any, Any], result: GroupResult) -> None:
            group.is_decided, group.run = True, None
            results.append(result)
            if self.feed is not None:
                self.feed.group_ended(result)

        tasks: dict[int, asyncio.Task[GroupResult | None]] = {}
        try:
            async with self._rollouts.gate.enter():
                self._is_running = True
                # Carried over, then by expected length, then as the caller has them. New prompts are expected to be as
                # long as the data set's mean; before there is one, as the mean of those of this batch that are known.
                statistics = self._rollouts.statistics
                means: dict[int, float] = {}
                for group in self._prepared.groups:
                    if (stats := statistics.prompts.load(group.prompt_key)) is not None:
                        means[group.number] = stats.mean_ema
                usual = statistics.dataset.stats.mean or (sum(means.values()) / len(means) if means else 0.0)
                order = sorted(
                    self._prepared.groups, key=lambda group: (group.carried is None, -means.get(group.number, usual))
                )
                for group in order:
                    tasks[group.number] = asyncio.create_task(self._run_group(group))
                for next_result in asyncio.as_completed(tasks.values()):
                    if (result := await next_result) is None or result.error is not None:
                        self._places.release()
                    if result is None:
                        continue
                    group = self._prepared.groups[result.number]
                    run = group.run
                    if result.error is not None and self._quota is not None and run is not None and run.is_complete:
                        # What it had generated could not be read: one that is not stopped yet may be complete instead.
                        self._quota.left += 1
                    decide(group, result)
                    missing -= result.error is None
                    if not missing:
                        break
                if self._carry is Carry.RESUME:
                    ended, stopping = [], []
                    for group in self._prepared.groups:
                        if (run := group.run) is not None:
                            await asyncio.sleep(0)  # each stops its candidates, so they take turns
                            if run.has_ended:
                                ended.append(group)
                            else:
                                run.stop_to_carry()
                                stopping.append(asyncio.create_task(self._keep_generated(group, run)))
                    await asyncio.gather(*stopping)
                    for group in ended:
                        if (result := await tasks[group.number]) is not None:
                            decide(group, result)
        finally:
            self._prepared.ticket.release()
            for group in self._prepared.groups:
                if not group.has_started and group.number in tasks:
                    tasks[group.number].cancel()
            try:
                for task in tasks.values():
                    if not task.done():
                        task.cancel()
                        await asyncio.sleep(0)  # each stops its candidates, so they take turns
            finally:  # also if this is cancelled
                for task in tasks.values():
                    task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            for group in self._prepared.groups:
                if not group.has_started:
                    group.allocation.drop()
        return results

    def _finish(self, end: BatchEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        if self.feed is not None:
            self.feed.batch_ended(end)
        self._ended.set()
        decided = len(end.results) if isinstance(end, BatchDone) else 0
        seconds = round(self._clock() - self._started_at, 3)
        fields = {"batch_id": self.batch_id, "decided": decided, "prompts": self.size, "seconds": seconds}
        extra = {**fields, "policy": self.plan.policy}
        logger.info("rollouts %s: %d of %d prompts decided in %.3f s", *fields.values(), extra=extra)
        if self._on_end is not None:
            self._on_end(self)

    # --- one group ----------------------------------------------------------

    async def _run_group(self, group: BatchGroup[Any, Any]) -> GroupResult | None:
        """Run one group; ``None`` if it was aborted and its prompt is carried over."""
        await self._places.acquire()
        await self._rollouts.starts.wait(group=group.allocation.candidates)
        if self._quota is not None and not self._quota.left:
            return None
        group.has_started = True
        feed = self.feed if self.answer_format.stream is StreamMode.TOKENS else None
        group_id = f"{self.batch_id}-{group.number}"
        result = GroupResult(group.number, group_id, group.prompt_key, {}, None, metadata=group.prompt.metadata)
        samples: dict[int, Sample] = {}
        run: GroupRun[Any, Any] | None = None
        try:
            can_carry, resumed = self._carry is Carry.RESUME, group.resumed
            if (
                resumed is not None
                and resumed.staleness(self._rollouts.engine.weight_version) > self._kept.limits.staleness
            ):
                resumed = None  # the weights changed while it waited
            tail_seed = self._renderer.tail_seed(group.request) if resumed is None else resumed.tail_seed
            if can_carry and tail_seed is None:
                tail_seed = (secrets.randbits(64),)
            # With a feed, each trajectory is reported as soon as it is known to belong to its group, unless that may go
            # on in another group.
            early, key = feed is not None and not can_carry, group.prompt_key
            spec = GroupSpec(
                self.plan,
                group.request,
                group_id,
                key,
                tail_seed,
                early=early,
                on_abort=self._on_abort,
                quota=self._quota,
                tokens=self._renderer.tokens(group.request),
            )
            held = self._prepared.ticket.split(group.allocation.candidates)
            carried = () if resumed is None else resumed.candidates
            run = group.run = self._rollouts.start(spec, group.allocation, held, carried)
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
                if run.is_surplus:
                    await self._keep_generated(group, run)
                    group.run = None
                    return None
                if run.interrupted is None:
                    raise
                return await self._interrupted(group, replace(result, error=error), samples)
        except DartsError as error:
            return replace(result, error=error)
        except Exception as error:  # a bug of ours: it ends this group and no other
            logger.exception("group %s failed", result.group_id)
            return replace(result, error=error)
        finally:  # also of a group that failed, or is stopped because enough others are complete
            if run is not None and run.record is not None:
                self._generated += run.record.generated_tokens
        return replace(result, samples=dict(sorted(samples.items())), record=run.record)

    async def _keep_generated(self, group: BatchGroup[Any, Any], run: GroupRun[Any, Any]) -> None:
        """Keep what the candidates of a stopped group have generated, if another one can go on with it."""
        candidates = await run.runner.collect_carried()
        # With a seed a candidate's number gives its random numbers, so no other one may get it.
        is_renumbered = len(candidates) < len(run.candidates) and self._renderer.tail_seed(group.request) is not None
        if is_renumbered or len(candidates) < self.plan.size:  # it was paused for new weights, or its candidates failed
            group.resumed = None
            self._generated += sum(candidate.tokens for candidate in candidates)
            return
        assert run.spec.tail_seed is not None
        saturated = group.allocation.saturated
        group.resumed = CarriedGroup(self._prepared.terms, saturated, run.spec.tail_seed, candidates)

    async def _interrupted(
        self, group: BatchGroup[Any, Any], result: GroupResult, samples: Mapping[int, Sample]
    ) -> GroupResult | None:
        """Return what a group that was ended from outside has generated; ``None`` if its prompt is carried over."""
        run = group.run
        assert run is not None
        # First: if enough others are complete before it has ended, it stays undecided.
        group.interrupted = run.interrupted
        result, on_abort = replace(result, record=run.record), self._on_abort
        if on_abort is OnAbort.CARRY:
            await self._keep_generated(group, run)
        elif on_abort is OnAbort.RETURN:
            aborted: dict[int, AbortedSample] = {}
            for index, output in (await run.aborted_outputs()).items():
                sample = samples.get(index) or await self._renderer.to_sample(output)
                spans = run.runner.candidates[index].version_spans(len(sample.token_ids))
                aborted[index] = AbortedSample(sample, spans)
            result = replace(result, aborted=aborted)
        if self._carry is Carry.DROP:
            return result
        if on_abort is OnAbort.RETURN:
            group.handed_back, group.resumed = result, None
        group.run = None
        return None
