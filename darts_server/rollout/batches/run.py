import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from darts_server.rollout.start_queue import FirstRound
from darts_server.rollout.verification import Verify
from darts_server.types import Sample
from darts_server.verify.types import NO_VERDICT, Answer, Verdict

logger = logging.getLogger(__name__)

GroupTasks = dict[int, asyncio.Task[GroupResult | None]]
"""Tasks by the group's number."""
ON_ABORT = {Carry.DROP: OnAbort.RETURN, Carry.RESTART: OnAbort.FAIL, Carry.RESUME: OnAbort.CARRY}


class StreamMode(Enum):
    """Events that a caller gets while its batch runs."""

    OFF = False
    GROUPS = "groups"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """``chunk_tokens``: least number of tokens in a delta of a running candidate."""

    stream: StreamMode = StreamMode.OFF
    chunk_tokens: int = 100


class BatchRun:
    """Runs a batch in a task of its own, which starts in a later turn of the event loop.

    ``replayable``: whether there may be several listeners, each from the first event on.
    ``on_idle``: called when the last listener has left before the end.
    """

    def __init__(
        self,
        prepared: PreparedBatch,
        rollouts: Rollouts[Any, Any],
        renderer: PromptRenderer[Any, Any],
        carried_prompts: CarriedPrompts,
        answer_format: AnswerFormat,
        *,
        replayable: bool = False,
        on_idle: Callable[["BatchRun"], object] = lambda _: None,
        on_end: Callable[["BatchRun"], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_id = prepared.batch_id
        self.plan = prepared.plan
        self.sampling = prepared.sampling
        self.size = len(prepared.groups)
        self.owner = caller.get().name
        self.answer_format = answer_format
        self.feed: EventFeed | None = None
        """None if no events are streamed."""
        if answer_format.stream is not StreamMode.OFF:
            survivors = self.plan.shaping.return_survivors
            first = BatchStarted(self.batch_id, self.plan.policy, self.size, survivors, self.sampling)
            chunk = answer_format.chunk_tokens if answer_format.stream is StreamMode.TOKENS else None
            self.feed = EventFeed(first, chunk, rollouts.poll_seconds, replayable, clock)
        self.listeners = 0
        self.end: BatchEnd | None = None

        self._prepared = prepared
        self._rollouts = rollouts
        self._renderer = renderer
        self._carried_prompts = carried_prompts
        self._on_idle = on_idle
        self._on_end = on_end
        self._clock = clock
        self._started_at = clock()
        self._ended = asyncio.Event()
        # `interrupt` may change these two.
        self._carry = prepared.request.carry
        self._on_abort = ON_ABORT[prepared.request.carry]
        self._running_slots = asyncio.Semaphore(prepared.num_running)
        self._quota = Quota(prepared.num_needed) if self._carry is Carry.RESUME else None
        self._first_round: FirstRound | None = None
        group_ids = [group.group_id for group in prepared.groups if not group.is_skipped]
        # A batch that needs only some of its groups finishes them one after the other instead of in rounds.
        if rollouts.starts_in_rounds and prepared.num_needed == prepared.num_running == len(group_ids):
            self._first_round = FirstRound(group_ids)
        self._results: list[GroupResult] = []
        # Numbers of complete groups that do not count.
        self._uninformative_numbers: list[int] = []
        self._missing_groups = prepared.num_needed
        self._generated_tokens = 0
        self._has_entered_gate = False
        self._interrupted_by: DartsError | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"darts-{self.batch_id}")
        """Ends a little after the batch, when carried prompts are given back."""

    # --- called by listeners and the registry -------------------------------

    @contextmanager
    def listen(self) -> Iterator[None]:
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1
            if not self.listeners and self.end is None:
                self._on_idle(self)

    async def wait(self) -> BatchDone:
        """Wait for the end; raise the error of a batch that failed."""
        await self._ended.wait()
        if isinstance(self.end, BatchFailed):
            raise self.end.error
        assert self.end is not None
        return self.end

    def cancel(self, why: str) -> bool:
        """End the batch with `GroupAborted`; return whether it was running."""
        return self.fail(GroupAborted(why))

    def fail(self, error: DartsError) -> bool:
        """End the batch with an error for listeners; return whether it was running."""
        if self.end is not None:
            return False
        self._finish(BatchFailed(error))
        # Later, because a task that is cancelled before its first turn never runs its cleanup.
        asyncio.get_running_loop().call_soon(self.task.cancel)
        return True

    def interrupt(self, error: DartsError, *, may_carry_prompts: bool, may_carry_tokens: bool) -> None:
        """End all groups with the tokens so far.

        ``may_carry_prompts``: otherwise all groups end with the error.
        """
        can_resume_tokens = may_carry_prompts and may_carry_tokens and self._carry is Carry.RESUME
        # The caller gets the tokens that no later batch can resume.
        if self._carry is not Carry.DROP and not can_resume_tokens:
            self._on_abort = OnAbort.RETURN
        if not may_carry_prompts:
            self._carry = Carry.DROP
        self._interrupted_by = error
        for group in self._prepared.groups:
            if group.run is not None:
                group.run.interrupt(error, self._on_abort)
                # Complete groups are returned without missing verdicts.
                group.run.verification.cancel()
        if not self._has_entered_gate:
            # The gate may stay closed.
            self.fail(error)

    # --- the batch ----------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._run_groups()
        except Exception as error:
            # A bug of ours must not keep listeners waiting.
            logger.exception("batch %s failed", self.batch_id)
            self._finish(BatchFailed(error))
        else:
            if self.end is None:
                unfinished = self._carry_undecided()
                seconds = self._clock() - self._started_at
                carried = self._carried_prompts.count(self.owner)
                self._finish(
                    BatchDone(
                        self.batch_id,
                        self._results,
                        unfinished,
                        seconds,
                        self._generated_tokens,
                        carried,
                        self._missing_groups,
                        sorted(self._uninformative_numbers),
                    )
                )
        finally:
            if isinstance(self.end, BatchFailed):
                # The caller has only the groups that were streamed. Carry all other carried prompts over again.
                streams = self.feed is not None
                unanswered = [group.carried for group in self._prepared.groups if not (streams and group.is_decided)]
                self._carried_prompts.put(self.owner, (), filter(None, unanswered))
            # The registry may keep this batch, but must not keep its prompts and tokens.
            self._prepared = replace(self._prepared, groups=(), terms="")
            self._results = []

    def _carry_undecided(self) -> list[Unfinished]:
        """Return the undecided prompts' part of the answer."""
        unfinished: list[Unfinished] = []
        new_prompts: list[CarriedPrompt] = []
        # Prompts of earlier batches go back to the front.
        older_prompts: list[CarriedPrompt] = []
        for group in self._prepared.groups:
            if group.is_decided:
                continue
            metadata = group.prompt.metadata
            entry = Unfinished(
                group.number,
                group.prompt_key,
                metadata,
                self._carry,
                group.interrupted,
                group.handed_back,
                group.is_skipped,
            )
            unfinished.append(entry)
            prompt = CarriedPrompt(group.prompt, group.identity, group.resumed)
            if group.carried is None:
                new_prompts.append(prompt)
            else:
                older_prompts.append(prompt)
        if self._carry is not Carry.DROP:
            self._carried_prompts.put(self.owner, new_prompts, older_prompts)
        return unfinished

    async def _run_groups(self) -> None:
        """Run groups until enough are complete.

        An aborted group is decided, by an error, unless its prompt is carried over.
        """
        tasks: GroupTasks = {}
        try:
            async with self._rollouts.gate.enter():
                self._has_entered_gate = True
                for group in self._groups_in_starting_order()[: self._prepared.request.max_prompts]:
                    task = asyncio.create_task(self._run_with_reused_random_numbers(group))
                    tasks[group.number] = task
                await self._collect_results(tasks)
                if self._carry is Carry.RESUME:
                    await self._stop_running_groups_to_carry(tasks)
        finally:
            await self._stop_all_groups(tasks)

    def _groups_in_starting_order(self) -> list[BatchGroup]:
        """Return carried groups first, then long groups, so that no long group runs alone at the end."""
        statistics = self._rollouts.statistics
        mean_lengths: dict[int, float] = {}
        for group in self._prepared.groups:
            stats = statistics.prompts.load(group.prompt_key)
            if stats is not None:
                mean_lengths[group.number] = stats.mean_ema
        # New prompts get the mean length of the data set, or of the batch's known prompts.
        default_length = statistics.dataset.stats.mean
        if not default_length:
            default_length = sum(mean_lengths.values()) / max(len(mean_lengths), 1)

        def sort_key(group: BatchGroup) -> tuple[bool, float]:
            return group.carried is None, -mean_lengths.get(group.number, default_length)

        return sorted((group for group in self._prepared.groups if not group.is_skipped), key=sort_key)

    async def _collect_results(self, tasks: GroupTasks) -> None:
        for next_result in asyncio.as_completed(tasks.values()):
            result = await next_result
            counts = False
            if result is not None and result.error is None:
                counts = self._prepared.request.counts_group(result.zero_variance)
            if not counts:
                # Another group starts instead.
                self._running_slots.release()
            if result is None:
                continue
            group = self._prepared.groups[result.number]
            if counts:
                self._missing_groups -= 1
            elif self._quota is not None and group.run is not None and group.run.has_used_quota:
                # The group's tokens could not be read. A group that is not stopped yet may complete instead.
                self._quota.missing_groups += 1
            self._add_result(group, result)
            if not self._missing_groups:
                break

    def _add_result(self, group: BatchGroup, result: GroupResult) -> None:
        group.is_decided = True
        group.run = None
        if result.error is None and not self._prepared.request.counts_group(result.zero_variance):
            self._uninformative_numbers.append(result.number)
            if not self._prepared.request.return_zero_variance:
                if self.feed is not None:
                    self.feed.group_dropped(result.number)
                return
        self._results.append(result)
        if self.feed is not None:
            self.feed.group_ended(result)

    async def _stop_running_groups_to_carry(self, tasks: GroupTasks) -> None:
        """Keep the tokens of running groups. Decide groups that have just ended."""
        ended_groups: list[BatchGroup] = []
        stopping: list[asyncio.Task[None]] = []
        for group in self._prepared.groups:
            run = group.run
            if run is None:
                continue
            # One group per turn of the event loop, as a group stops many candidates.
            await asyncio.sleep(0)
            if run.has_ended:
                ended_groups.append(group)
            else:
                run.stop_to_carry()
                stopping.append(asyncio.create_task(self._save_tokens_to_resume(group, run)))
        await asyncio.gather(*stopping)
        for group in ended_groups:
            result = await tasks[group.number]
            if result is not None:
                self._add_result(group, result)

    async def _stop_all_groups(self, tasks: GroupTasks) -> None:
        groups = self._prepared.groups
        self._prepared.ticket.release()
        # All at once, so that no group starts while the other groups are stopped.
        for group in groups:
            if not group.has_started and group.number in tasks:
                tasks[group.number].cancel()
        try:
            for task in tasks.values():
                # One group per turn of the event loop.
                if not task.done():
                    task.cancel()
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        finally:
            # The batch may be cancelled between two turns. No task may start its group then.
            for task in tasks.values():
                task.cancel()
            # A skipped group has an empty allocation.
            for group in groups:
                if not group.has_started:
                    group.allocation.drop()

    def _finish(self, end: BatchEnd) -> None:
        if self.end is not None:
            return
        self.end = end
        if self.feed is not None:
            self.feed.batch_ended(end)
        self._ended.set()
        decided = 0
        if isinstance(end, BatchDone):
            decided = len(end.results)
        seconds = round(self._clock() - self._started_at, 3)
        logger.info(
            "rollouts %s: %d of %d prompts decided in %.3f s",
            self.batch_id,
            decided,
            self.size,
            seconds,
            extra={
                "batch_id": self.batch_id,
                "decided": decided,
                "prompts": self.size,
                "seconds": seconds,
                "policy": self.plan.policy,
            },
        )
        self._on_end(self)

    # --- one group ----------------------------------------------------------

    async def _run_with_reused_random_numbers(self, group: BatchGroup) -> GroupResult | None:
        try:
            # Only groups of a prompt that run at the same time must have different random numbers.
            with self._renderer.reuse_streams(group.request):
                return await self._run_group(group)
        finally:
            # The group may have ended before its first candidate started.
            if self._first_round is not None:
                self._first_round.mark_group_started(group.group_id)

    async def _run_group(self, group: BatchGroup) -> GroupResult | None:
        """Run one group; return None if it stays undecided."""
        await self._running_slots.acquire()
        await self._rollouts.start_queue.wait_for_group(group.allocation.candidates)
        if self._quota is not None and not self._quota.missing_groups:
            return None
        empty_result = GroupResult(
            group.number,
            group.group_id,
            group.prompt_key,
            {},
            None,
            metadata=group.prompt.metadata,
        )
        samples: dict[int, Sample] = {}
        token_feed = self.feed if self.answer_format.stream is StreamMode.TOKENS else None
        run: GroupRun[Any, Any] | None = None
        try:
            run = self._start_group(group, streams=token_feed is not None)
            group.run = run
            if token_feed is not None:
                token_feed.group_started(group.number, run)
            # The batch may have been interrupted before the group's start.
            if self._interrupted_by is not None:
                run.interrupt(self._interrupted_by, self._on_abort)
            try:
                async with aclosing(run.trajectories()) as trajectories:
                    async for trajectory in trajectories:
                        sample = await self._renderer.to_sample(trajectory.output)
                        samples[trajectory.index] = sample
                        # Groups that may not be returned deliver nothing before they are complete.
                        if token_feed is not None and self._prepared.request.returns_group(run.zero_variance):
                            token_feed.trajectory_selected(group.number, trajectory.index, sample)
                await self._finish_verification(run, samples)
            except DartsError as error:
                if run.is_surplus:
                    await self._save_tokens_to_resume(group, run)
                    group.run = None
                    return None
                if run.interrupted is None:
                    raise
                return await self._end_interrupted(group, run, replace(empty_result, error=error), samples)
        except DartsError as error:
            return replace(empty_result, error=error)
        except Exception as error:
            # A bug of ours ends this group alone.
            logger.exception("group %s failed", group.group_id)
            return replace(empty_result, error=error)
        finally:
            if run is not None:
                run.verification.cancel()
                # Failed and stopped groups count too.
                if run.record is not None:
                    self._generated_tokens += run.record.generated_tokens
        return replace(
            empty_result,
            samples=dict(sorted(samples.items())),
            record=run.record,
            verdicts=run.verification.verdicts,
            zero_variance=run.zero_variance,
        )

    async def _finish_verification(self, run: GroupRun[Any, Any], returned_indices: Iterable[int]) -> None:
        await run.verification.finish()
        for index in returned_indices:
            verdict = run.verification.verdicts.get(index, NO_VERDICT)
            if verdict.reward is not None:
                key = (run.owner, run.spec.group_id)
                self._rollouts.observers.trajectory_verified(key, index, verdict.reward, bool(verdict.correct))

    def _make_verify(self, group: BatchGroup) -> Verify | None:
        verifier = self._rollouts.verifier
        names = group.verifiers
        verifies_nothing = names is not None and not names
        prepared = self._prepared
        needs_verdicts = prepared.plan.shaping.needs_rewards or prepared.request.only is not None
        if verifier is None or (verifies_nothing and not needs_verdicts):
            return None

        async def verify(output: Any) -> Verdict:
            # A group that waits for rewards needs a verdict of every candidate.
            if verifies_nothing:
                return NO_VERDICT
            sample = await self._renderer.to_sample(output)
            return await verifier.verify(Answer(group.prompt, sample.text, sample.token_ids), names or ())

        return verify

    def _start_group(self, group: BatchGroup, *, streams: bool) -> GroupRun[Any, Any]:
        can_carry = self._carry is Carry.RESUME
        resumed = group.resumed
        if resumed is not None:
            # The weights may have changed while the group waited.
            version = self._rollouts.engine.weight_version
            if resumed.staleness(version) > self._carried_prompts.limits.staleness:
                resumed = None
        if resumed is not None:
            carried = resumed.candidates
            tail_seed: Sequence[int] | None = resumed.tail_seed
        else:
            carried = ()
            tail_seed = self._renderer.tail_seed(group.request)
        if can_carry and tail_seed is None:
            # A later batch must draw the same tail.
            tail_seed = (secrets.randbits(64),)
        spec = GroupSpec(
            self.plan,
            group.request,
            group.group_id,
            group.prompt_key,
            tail_seed,
            # A group that may continue in a later batch, or may not be returned, delivers nothing early.
            delivers_early=streams and not can_carry and self._prepared.request.only is None,
            on_abort=self._on_abort,
            quota=self._quota,
            first_round=self._first_round,
            request_tokens=self._renderer.known_token_counts(group.request),
            verify=self._make_verify(group),
            only_informative=self._prepared.request.only is not None,
            stops_when_decided=self._prepared.request.stop_when is not None,
            run_probability=group.run_probability,
        )
        ticket = self._prepared.ticket.split(group.allocation.candidates)
        # From here on, the rollouts end the allocation.
        group.has_started = True
        return self._rollouts.start(spec, group.allocation, ticket, carried)

    async def _save_tokens_to_resume(self, group: BatchGroup, run: GroupRun[Any, Any]) -> None:
        """Set ``group.resumed`` to the group's tokens, or None if they cannot be resumed."""
        candidates = await run.runner.collect_carried()
        # If random numbers depend on indices, candidates must keep their indices.
        is_renumbered = len(candidates) < len(run.candidates) and self._renderer.has_numbered_streams(group.request)
        # There are too few candidates if some failed, or if the group was paused for new weights.
        if is_renumbered or len(candidates) < self.plan.size:
            group.resumed = None
            # The record leaves these tokens to a batch that resumes them, but no batch does.
            self._generated_tokens += sum(candidate.tokens for candidate in candidates)
            return
        assert run.spec.tail_seed is not None
        terms = self._prepared.terms
        group.resumed = CarriedGroup(terms, group.allocation.saturated, run.spec.tail_seed, candidates)

    async def _end_interrupted(
        self,
        group: BatchGroup,
        run: GroupRun[Any, Any],
        result: GroupResult,
        samples: Mapping[int, Sample],
    ) -> GroupResult | None:
        """Return None if the prompt is carried over."""
        # Set before the first wait: the group stays undecided if enough other groups complete meanwhile.
        group.interrupted = run.interrupted
        on_abort = self._on_abort
        result = replace(result, record=run.record)
        if on_abort is OnAbort.CARRY:
            await self._save_tokens_to_resume(group, run)
        elif on_abort is OnAbort.RETURN:
            aborted: dict[int, AbortedSample] = {}
            for index, output in (await run.collect_aborted_outputs()).items():
                sample = samples.get(index) or await self._renderer.to_sample(output)
                spans = run.runner.candidates[index].history.version_spans(
                    len(sample.token_ids),
                    run.engine.weight_version,
                )
                aborted[index] = AbortedSample(sample, spans)
            result = replace(result, aborted=aborted)
        if self._carry is Carry.DROP:
            return result
        if on_abort is OnAbort.RETURN:
            group.handed_back = result
            group.resumed = None
        group.run = None
        return None
