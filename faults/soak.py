"""Run groups by the hundred thousand on the scripted engine, and check whether anything grows or is lost.

python -m faults.soak --groups 1000000
"""

import argparse
import asyncio
import gc
import logging
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from random import Random

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from darts_server.control import Control
from darts_server.engine.port import RequestTokens
from darts_server.engine.scripted import Script, ScriptedEngine, slice_from
from darts_server.estimates.calibration import BUFFER, Calibration
from darts_server.estimates.score_metrics import WINDOW
from darts_server.exceptions import CandidateFailed, DartsError, EngineRefused, InvalidRequest
from darts_server.group.informative import Select
from darts_server.metrics.collectors import Reads
from darts_server.metrics.quality import QualityMetrics
from darts_server.metrics.rollouts import RolloutMetrics
from darts_server.policy.allocation import Brownout
from darts_server.quality.head import Head
from darts_server.quality.remote import RemoteHead
from darts_server.quality.types import HeadSettings
from darts_server.records import GroupRecord
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention, IdempotencyKey
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.rollout.learned.statistics import LengthBias, Statistics
from darts_server.rollout.observers.monitor import Monitor
from darts_server.rollout.observers.provenance import DEFAULT_KEPT, Provenance
from darts_server.rollout.observers.reward_matching import Reward, RewardMatcher
from darts_server.rollout.plan import Plan
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.pruning.scoring import ScoringSettings
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.spec import GroupSpec, JoinRequest
from darts_server.rollout.voting import Confidence, VoteRequest, VoteRunner
from darts_server.serving.admission import AdmissionLimits
from darts_server.serving.gate import Gate
from darts_server.settings import Settings
from darts_server.store import Store
from darts_server.store.store import MAX_IN_MEMORY
from darts_server.types import AUTO, OFF, FinishReason, PromptSpec, RequestOptions, Sample
from tests.rollout.helpers import AtOnce

MODEL, CAPACITY, MAX_WAITING, WIDTH = "scripted", 256, 1024, 16
NO_READS: Reads = defaultdict(lambda: lambda *_: None)
"""No metric has a value at a scrape."""
STEP_SECONDS = 0.02
"""Duration of a decode step on the loop's own clock."""
LIMIT = 40
"""Tokens at which a candidate is truncated."""
BROKEN, REFUSED, LOST = 0.03, 0.004, 0.01
"""Shares of candidates that fail, that the engine refuses (which fails their group), and that it aborts."""
DOOMED, INVALID = "doomed", "invalid"
"""All candidates of a prompt with the first text fail; one with the second is refused before anything starts."""
CANCELLED, ABORTED, FAILING = 0.06, 0.01, 0.005
"""Shares of requests that are cancelled, of groups that are aborted, and of prompts that are doomed or invalid."""
REPEATED_PROMPTS, UNIQUE = 512, 0.3
"""Number of prompts that are used again and again, and the share of requests with a prompt of their own."""
SIZES = (2, 3, 4, 6)
CARRYING = (OFF, "uniform", "darts", "darts_cut", "cap", AUTO)
"""Policies whose batches with enough groups carry the others over: those that prune cannot go on with a group."""
CALLERS, ROUNDS, MIN_ROUNDS = 96, 50, 6
"""``MIN_ROUNDS``: needed to fit a line through the second half of them."""
TIMEOUT_SECONDS, DRAIN_SECONDS, CLEANUP_SECONDS = 600.0, 600.0, 1.0
"""For an answer, for what still runs after a round, and for what the server does after the last group; on the loop's
clock, as all times here."""
UPDATE_SECONDS, MAX_REWARD_DELAY, MAX_CANCEL_DELAY = 0.3, 4.0, 0.3
TRAIN_EVERY, TRAIN_STEPS = 256, 4
QUICK = HeadSettings(hidden=16, batch_size=32, capacity=512, half_life=256.0, min_labels=64, learning_rate=1e-2)
GROWTH_LIMITS = {"blocks": 0.01, "objects": 0.1, "own objects": 0.1, "rss": 0.02, "files": 0.0, "tasks": 0.0}
"""Of the process: the share of its mean that each may grow by over all samples, even if the growth is no chance."""
NOISE = 4.0
"""Standard errors. A smaller slope may be chance."""
RETAINED = {
    "groups": (DEFAULT_KEPT, 10),
    "votes": (DEFAULT_KEPT, 1000),  # one group in seventy is a vote
    "documents": (MAX_IN_MEMORY, 50),  # one in four has a prompt of its own
    "flight_bytes": (4 * 1024 * 1024, 0.02),  # of hidden states that wait for rewards; the server's limit fills slowly
    "labels": (BUFFER, 40),
    "vote_labels": (BUFFER, 500),
    "window": (WINDOW, 100),
    "batches": (64, 500),
}
"""How much the server retains, or less where so few groups would not fill it: one for so many groups. All of it must be
full after a tenth of the groups, since growth is measured over the second half."""


# --- the server: everything above the engine --------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock advances with the engine's steps, so that a day passes in minutes."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Engine(ScriptedEngine):
    """The scripted engine, without the memory of finished candidates that tests use."""

    async def step(self) -> None:
        await super().step()
        self.started = self.running
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now += STEP_SECONDS


def random_scripts(seed: int) -> Callable[[str, int], Script]:
    """Script each candidate at random, seeded by its request and index."""

    def script(request: str, index: int) -> Script:
        rng = Random(f"{seed} {request} {index}")
        length = 1 + min(int(rng.lognormvariate(1.8, 0.8)), LIMIT - 1)
        fate = rng.random()
        if DOOMED in request or fate < BROKEN:
            return Script(length, error=CandidateFailed("scripted failure"))
        if fate < BROKEN + REFUSED:
            return Script(length, error=EngineRefused("scripted refusal"))
        if fate < BROKEN + REFUSED + LOST:
            return Script(length, aborted=True)
        reason = FinishReason.LENGTH if length == LIMIT else FinishReason.STOP
        mean, hidden_seed = rng.choice((1.0, -1.0)), rng.randrange(2**32)  # slightly different for right ones

        def hidden(_: int) -> list[float]:
            return list(map(float, np.random.default_rng(hidden_seed).normal(mean, 2.0, WIDTH)))

        return Script(length, rng.choice((0, 0, 0, 2)), finish_reason=reason, hidden=hidden)

    return script


class Texts:
    """A renderer whose requests are the prompts' texts."""

    def effective_sampling(self, sampling: Mapping[str, object]) -> Mapping[str, object]:
        return sampling

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if INVALID in (prompt.text or INVALID):
            raise InvalidRequest("text", "is scripted to be invalid")
        return prompt.text or ""

    def prompt_key(self, request: str) -> str:
        return request.partition("#")[0]

    def known_token_counts(self, request: str) -> RequestTokens:
        return RequestTokens(max(1, len(request.split())))

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return None

    def reuse_streams(self, request: str) -> AbstractContextManager[None]:
        return nullcontext()

    def has_numbered_streams(self, request: str) -> bool:
        return False

    async def to_sample(self, output: list[int]) -> Sample:
        return Sample(output, slice_from(output, 0).logprobs, f"#{len(output) % 3}", FinishReason.STOP)


class LocalHead(RemoteHead):
    """The quality head, trained in the event loop instead of a process of its own."""

    def __init__(self, width: int, trained: Callable[[bytes], None], settings: HeadSettings = QUICK) -> None:
        super().__init__(width, settings, on_report=lambda _, state: trained(state))
        self._trainer = Head(width, settings)
        self._learned = 0

    def start(self) -> None:
        """Do nothing: there is no process."""

    def close(self) -> None:
        """Do nothing: there is no process."""

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> None:
        self._trainer.learn(hidden, position, target, survival)
        self._learned += 1
        if self._learned % TRAIN_EVERY == 0 and self._trainer.train(TRAIN_STEPS):
            self._apply(self._trainer.report, self._trainer.state(), self._num_restores)


class Stack:
    """The whole server but its engine and its routes, on one loop. ``groups``: that will run, see `RETAINED`."""

    def __init__(self, loop: VirtualLoop, groups: int, seed: int) -> None:
        keep = {name: max(1, min(limit, int(groups / each))) for name, (limit, each) in RETAINED.items()}
        self.engine = Engine(random_scripts(seed))
        self.engine.capacity, self.engine.probe_width = CAPACITY, WIDTH
        self.store = Store(limit=keep["documents"])
        self.registry = CollectorRegistry()
        self.metrics = RolloutMetrics(MODEL, NO_READS, self.registry)
        self.gate = Gate()
        self.control = Control(Settings.model_validate({}))
        confidence = Confidence(self.store, keep["votes"], _calibration(keep["vote_labels"], cold_steps=0))
        labels = _calibration(keep["labels"], cold_steps=1)
        self.pruner = Pruner(
            ScoringSettings((4, 8), calibration=labels, max_bytes=keep["flight_bytes"], window=keep["window"]),
            lambda: WIDTH,
            partial(LocalHead, settings=replace(QUICK, window=keep["window"])),
            self.store,
            lambda: self.engine.weight_version,
            QualityMetrics(MODEL, NO_READS, self.registry),
            loop.time,
        )
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            self.control.planner,
            Statistics(self.store, CAPACITY),
            Intervals(join=0.5, join_named=6.0),
            gate=self.gate,
            admission_limits=AdmissionLimits(MAX_WAITING),
            brownout=Brownout.for_queue(MAX_WAITING, CAPACITY),
            scorer=self.pruner,
            clock=loop.time,
        )
        self.control.connect(self.rollouts)
        self.monitor = Monitor(self.rollouts, SessionRegistry(self.rollouts, clock=loop.time), loop.time)
        self.reward_matcher = RewardMatcher(
            self.rollouts.statistics.rewards,
            self._rewarded,
            self.metrics.rewards_reported,
            keep["groups"],
            [confidence.learn_reward, self.pruner.learn_reward],
        )
        provenance = Provenance(keep["groups"])
        events = self.rollouts.observers
        events.single_request_classified.add(self.metrics.single_request_classified)
        events.group_closed.add(self.metrics.group_closed)
        events.candidates_started.add(self.metrics.candidates_started)
        events.trajectory_returned.add(self.reward_matcher.trajectory_returned)
        for observer in (self.metrics, provenance, LengthBias(), self.reward_matcher, self.monitor):
            events.group_ended.add(observer.group_ended)
        events.scored_group_ended.add(self.pruner.group_ended)
        events.cohort_ended.add(self.metrics.cohort_ended)
        retention = BatchRetention(kept_batches=keep["batches"])
        self.batches = BatchRegistry(self.rollouts, Texts(), self.control.new_planner, retention, clock=loop.time)
        self.votes = VoteRunner(self.rollouts, Texts(), confidence, self.metrics.vote_ended, AtOnce(), loop.time)

    def count_by(self, name: str, label: str) -> dict[str, float]:
        """Return a counter's values by one of its labels."""
        samples = (sample for metric in self.registry.collect() for sample in metric.samples)
        return {sample.labels[label]: sample.value for sample in samples if sample.name == name}

    def violations(self) -> Iterator[str]:
        """Check that an idle server holds nothing, and that its counters agree."""
        gauges = {
            "candidates on the engine": self.engine.unfinished_requests,
            "groups running": len(self.rollouts.runs),
            "candidates waiting": self.rollouts.admission.waiting,
            "candidates admitted": self.rollouts.admission.not_in_engine,
            "requests inside the gate": self.gate.work_inside,
            "faults of the store": int(self.store.fault is not None),
        }
        yield from (f"{what}: {count}, not 0" for what, count in gauges.items() if count)
        started = sum(self.count_by("darts_candidates_started_total", "model_name").values())
        ended = sum(self.count_by("darts_candidates_ended_total", "reason").values())
        if started != ended:
            yield f"{started:.0f} candidates were started, {ended:.0f} were selected or discarded"
        groups = sum(self.count_by("darts_groups_total", "outcome").values())
        if groups != self.monitor.num_ended:
            yield f"{groups:.0f} groups were counted, {self.monitor.num_ended} ended"

    def close(self) -> None:
        self.pruner.close()
        self.rollouts.statistics.flush()
        self.store.close()

    def _rewarded(self, record: GroupRecord, right: Mapping[int, bool], zero_variance: bool) -> None:
        self.metrics.group_rewarded(zero_variance)
        self.rollouts.allocator.deadlines.learn_rewards(record, right)
        self.pruner.record_rewarded_group()


def _calibration(labels: int, cold_steps: int) -> Calibration:
    return Calibration(buffer=labels, cold_steps=cold_steps, cold_labels=min(64, labels))


# --- callers ----------------------------------------------------------------


class Callers:
    """Request groups in every way; some cancel, some groups are aborted, most get rewards.

    ``requests``, ``rewards``: how many ended how. ``longest_wait``: of a request, in seconds.
    """

    def __init__(self, stack: Stack, seed: int) -> None:
        self.requests: Counter[str] = Counter()
        self.rewards: Counter[str] = Counter()
        self.longest_wait = 0.0
        self._stack = stack
        self._rng = Random(seed)
        # The server of the soak has no verifier, which `informative` needs.
        others = (OFF, AUTO, Select.INFORMATIVE)
        self._policies = [name for name in stack.control.planner.policy_names() if name not in others]
        self._background: set[asyncio.Task[None]] = set()

    async def work(self, numbers: Iterator[int]) -> None:
        """Send one request after the other, until the numbers are used up."""
        ways = [self._group] * 12 + [self._batch] * 3 + [self._singles] * 3 + [self._vote]
        loop = asyncio.get_running_loop()
        for number in numbers:
            began = loop.time()
            task = asyncio.create_task(self._rng.choice(ways)(number, numbers))
            if self._rng.random() < CANCELLED:
                self._later(task.cancel)
            done, _ = await asyncio.wait([task], timeout=TIMEOUT_SECONDS)
            try:
                outcome = await task if done else "lost"
            except asyncio.CancelledError:
                outcome = "cancelled"
            except DartsError as error:
                outcome = f"failed: {type(error).__name__}"
            if not done:
                task.cancel()
            self.requests[outcome] += 1
            self.longest_wait = max(self.longest_wait, loop.time() - began)

    async def wait_for_rewards(self) -> None:
        """Wait until all rewards are reported."""
        while self._background:
            await asyncio.wait(self._background)

    def _later(self, action: Callable[..., object], *args: object) -> None:
        asyncio.get_running_loop().call_later(self._rng.uniform(0, MAX_CANCEL_DELAY), action, *args)

    async def _group(self, number: int, _: Iterator[int]) -> str:
        """Request a group as a request with n > 1 does."""
        rollouts, request = self._stack.rollouts, f"{self._prompt(number)}#{number}"
        plan = rollouts.plan(self._rng.choice(SIZES), RequestOptions(self._rng.choice(self._policies)))
        assert plan is not None
        key, group_id, early = request.partition("#")[0], f"g{number}", self._rng.random() < 0.3
        ticket = rollouts.admission.admit(rollouts.estimate_candidates(plan))
        if self._rng.random() < ABORTED:
            self._later(rollouts.abort, group_id)
        with ticket:
            async with rollouts.gate.enter():
                allocation = await rollouts.allocator.allocate(plan, key)
                allocation = replace(allocation, candidates=ticket.resize_within_limits(allocation.candidates))
                spec = GroupSpec(plan, request, group_id, key, delivers_early=early)
                run = rollouts.start(spec, allocation, ticket.split(allocation.candidates))
                try:
                    indices = [trajectory.index async for trajectory in run.trajectories()]
                finally:
                    run.cancel()
        self._reward(group_id, indices)
        return _outcome(len(set(indices)) == plan.size)

    async def _singles(self, number: int, _: Iterator[int]) -> str:
        """Request a group by single requests; sometimes one is missing, cancelled or aborted."""
        size, rollouts, prompt = self._rng.choice(SIZES), self._stack.rollouts, self._prompt(number)
        name = f"singles-{number}"
        plan = rollouts.plan(1, RequestOptions(self._rng.choice(self._policies), group_id=name, group_size=size))
        assert plan is not None
        missing = 1 if self._rng.random() < 0.1 else 0
        requests = [self._single(plan, prompt, name, f"{name}-{place}") for place in range(size - missing)]
        tasks = [asyncio.create_task(each) for each in requests]
        if self._rng.random() < CANCELLED:
            self._later(tasks[0].cancel)
        if self._rng.random() < CANCELLED:
            self._later(rollouts.abort, f"{name}-1")
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        errors = [result for result in results if isinstance(result, Exception)]
        errors.sort(key=lambda error: isinstance(error, DartsError))
        if errors:
            raise errors[0]
        return "answered"

    async def _single(self, plan: Plan, prompt: str, name: str, request_id: str) -> list[int]:
        rollouts = self._stack.rollouts
        key = f"{plan.policy}/{name}"
        with rollouts.admission.admit(1) as ticket:
            joining = JoinRequest(f"{prompt}#{request_id}", request_id, plan, prompt, key, ticket, name)
            async with rollouts.gate.enter(skip_wait=rollouts.joiner.has_open_group(joining.join_key)):
                return await rollouts.joiner.join(joining, lambda _: None)

    async def _vote(self, number: int, _: Iterator[int]) -> str:
        question = VoteRequest(PromptSpec(text=f"{self._prompt(number)}#{number}"), self._rng.choice(SIZES), "#(.)")
        result = await self._stack.votes.run(question)
        self._reward(result.record.group_id, [ballot.index for ballot in result.ballots])
        return "answered"

    async def _batch(self, number: int, numbers: Iterator[int]) -> str:
        """Request a batch through our own API, with or without an idempotency key, streamed or in one answer."""
        prompts = [number, *islice(numbers, self._rng.randint(0, 7))]
        policy = self._rng.choice([OFF, AUTO, *self._policies])
        num_groups = max(1, len(prompts) - 2) if self._rng.random() < 0.2 else None
        carries = num_groups is not None and policy in CARRYING
        request = BatchRequest(
            [PromptSpec(text=f"{self._prompt(n)}#{n}") for n in prompts],
            self._rng.choice(SIZES),
            policy={"name": policy},
            num_groups=num_groups,
            carry=Carry.RESUME if carries else Carry.DROP,
            carried=carries,
        )
        key = IdempotencyKey(None, f"key-{number}", b"digest") if self._rng.random() < 0.3 else None
        answer_format = AnswerFormat(self._rng.choice(list(StreamMode)), chunk_tokens=4)
        batch = await self._stack.batches.start_or_find(request, answer_format, key)
        if self._rng.random() < ABORTED:
            asyncio.get_running_loop().call_later(0.2, batch.cancel, "at random")
        if key is not None and self._rng.random() < 0.3:
            with batch.listen(), suppress(TimeoutError):  # disconnects, then comes back
                async with asyncio.timeout(0.2):
                    await (asyncio.sleep(1) if batch.feed is None else batch.feed.next(0))
            if self._rng.random() < 0.2:
                return "cancelled"
            batch = self._stack.batches.find(batch.batch_id)
        return await self._listen(batch, request.group_size)

    async def _listen(self, batch: BatchRun, size: int) -> str:
        with batch.listen():
            number = 0
            while batch.feed is not None and (found := await batch.feed.next(number)) is not None:
                number, _ = found
            done = await batch.wait()
        for result in done.results:
            self._reward(result.group_id, list(result.samples))
        sizes = [len(result.samples) for result in done.results if not result.error]
        return _outcome(all(sizes) if batch.plan.shaping.return_survivors else set(sizes) <= {size})

    def _prompt(self, number: int) -> str:
        draw = self._rng.random()
        if draw < FAILING:
            return self._rng.choice((DOOMED, INVALID)) + str(number % REPEATED_PROMPTS)
        return f"p{number if draw < UNIQUE else self._rng.randrange(REPEATED_PROMPTS)}"

    def _reward(self, group_id: str, indices: Sequence[int]) -> None:
        if self._rng.random() < 0.3:
            return
        ids = [f"{group_id}:{index}" for index in indices]
        if self._rng.random() < 0.1:
            ids += ids[:1]
        if self._rng.random() < 0.05:
            ids += [f"unknown-{group_id}:0"]
        rewards = [Reward(float(i % 2), bool(i % 2), trajectory_id=name) for i, name in enumerate(ids)]
        task = asyncio.create_task(self._report(rewards, self._rng.uniform(0, MAX_REWARD_DELAY)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _report(self, rewards: Sequence[Reward], delay: float) -> None:
        await asyncio.sleep(delay)
        report = await self._stack.reward_matcher.report(rewards)
        self.rewards.update(matched=report.matched, repeated=report.repeated, unknown=report.unknown)


def _outcome(is_complete: bool) -> str:
    return "answered" if is_complete else "wrong"


# --- the soak ---------------------------------------------------------------


@dataclass
class Soaked:
    """The result of a soak.

    Attributes:
        groups: how many were requested.
        requests, outcomes, reasons, rewards: of requests, groups, candidates and rewards, how many ended how.
        updates: weight updates.
        longest_wait: of a request. ``loop_seconds``: the whole soak.
        samples: of the process, idle after each round, with the number of groups.
        growths: by quantity, per 1,000 groups.
        growing: those that are no chance.
        violations: checks that failed after a round, and logged errors.
    """

    groups: int = 0
    requests: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, int] = field(default_factory=dict)
    updates: int = 0
    longest_wait: float = 0.0
    loop_seconds: float = 0.0
    samples: list[dict[str, float]] = field(default_factory=list)
    growths: dict[str, float] = field(default_factory=dict)
    growing: set[str] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return not (self.violations or self.growing or self.requests.get("lost") or self.requests.get("wrong"))


def soak(
    groups: int,
    rounds: int,
    seed: int = 0,
    has_time: Callable[[int], bool] = lambda _: True,
    spoil: Callable[[Stack], None] = lambda _: None,
) -> Soaked:
    """Run this many groups.

    Args:
        has_time: called after each round with the number of finished groups; the soak stops when it returns false.
        spoil: called with the stack before the first round; may break it, to test the checks.
    """
    logger, soaked = logging.getLogger("darts_server"), Soaked()
    logger.addHandler(listener := _ErrorLogs(soaked.violations))
    gc.freeze()  # objects from before the soak do not count, and take long to walk through
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_soak(soaked, groups, rounds, seed, has_time, spoil))
    finally:
        gc.unfreeze()
        logger.removeHandler(listener)
    return soaked


class _ErrorLogs(logging.Handler):
    """Record every logged error as a violation: the server does not log callers' own mistakes as errors."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        self._violations.append(f"logged: {self.format(record)}")


async def _soak(
    soaked: Soaked,
    groups: int,
    rounds: int,
    seed: int,
    has_time: Callable[[int], bool],
    spoil: Callable[[Stack], None],
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    stack = Stack(loop, groups, seed)
    loop.set_exception_handler(
        lambda _, context: soaked.violations.append(f"uncaught: {context.get('exception') or context['message']!r}")
    )
    spoil(stack)
    callers = Callers(stack, seed)
    engine = asyncio.create_task(_drive(stack))
    try:
        for number in range(rounds):
            first, last = groups * number // rounds, groups * (number + 1) // rounds
            await _round(stack, callers, iter(range(first, last)))
            soaked.violations += [f"after {last} groups: {what}" for what in stack.violations()]
            soaked.samples.append(_sample(last))
            soaked.groups = last
            if not has_time(last):
                break
    finally:
        engine.cancel()
        stack.close()
    soaked.requests, soaked.rewards = callers.requests, callers.rewards
    soaked.longest_wait, soaked.loop_seconds = callers.longest_wait, loop.time()
    soaked.updates = stack.engine.weight_version
    soaked.outcomes = stack.count_by("darts_groups_total", "outcome")
    soaked.reasons = stack.count_by("darts_candidates_ended_total", "reason")
    if len(soaked.samples) >= MIN_ROUNDS:
        _measure_growth(soaked)


async def _drive(stack: Stack) -> None:
    while True:
        await stack.engine.step()


async def _round(stack: Stack, callers: Callers, numbers: Iterator[int]) -> None:
    """Run these groups until nothing is running."""
    trainer = asyncio.create_task(_train(stack))
    await asyncio.gather(*(callers.work(numbers) for _ in range(CALLERS)))
    await callers.wait_for_rewards()
    trainer.cancel()
    with suppress(asyncio.CancelledError):
        await trainer
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while stack.rollouts.runs or stack.engine.unfinished_requests:
                await asyncio.sleep(STEP_SECONDS)
    await asyncio.sleep(CLEANUP_SECONDS)


async def _train(stack: Stack) -> None:
    """Update the weights again and again, under each rule in turn."""
    for rule in cycle(("restart", "finish", "keep")):
        await asyncio.sleep(UPDATE_SECONDS)
        if rule != "keep":
            stack.gate.close("weights")
        try:
            if rule == "finish":
                await stack.gate.wait_until_empty()
            elif rule == "restart":
                await stack.rollouts.suspend()
            stack.engine.weight_version += 1
        finally:
            stack.rollouts.resume()
            stack.gate.open("weights")


def _sample(groups: int) -> dict[str, float]:
    """Measure this process, without the objects from before the soak."""
    gc.collect()
    process, objects = psutil.Process(), gc.get_objects()
    return {
        "groups": groups,
        "blocks": sys.getallocatedblocks(),
        "objects": len(objects),
        "own objects": sum(type(x).__module__.startswith("darts_server.") for x in objects),
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "tasks": len(asyncio.all_tasks()),
    }


def _measure_growth(soaked: Soaked) -> None:
    """Fit a line to each quantity over the second half of the samples."""
    samples = soaked.samples[len(soaked.samples) // 2 :]
    groups = np.array([each["groups"] for each in samples])
    x = groups - groups.mean()
    for name, limit in GROWTH_LIMITS.items():
        values = np.array([each[name] for each in samples])
        slope = float(x @ values / (x @ x))
        residuals = values - values.mean() - slope * x
        error = float(np.sqrt(residuals @ residuals / (len(x) - 2) / (x @ x)))
        soaked.growths[name] = 1000 * slope
        if slope > NOISE * error and slope * float(groups[-1] - groups[0]) > limit * float(values.mean()):
            soaked.growing.add(name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop earlier, after the round in which this time is over"
    )
    options = parser.parse_args(argv)
    if options.groups < ROUNDS:
        parser.error(f"--groups must be at least {ROUNDS}, got {options.groups}")
    logging.disable(logging.WARNING)  # candidates fail on purpose
    deadline = time.monotonic() + 60 * options.minutes
    with tqdm(total=options.groups, unit="group") as bar:

        def has_time(done: int) -> bool:
            bar.update(done - bar.n)
            return bool(time.monotonic() < deadline)

        soaked = soak(options.groups, ROUNDS, options.seed, has_time)
    table = Table("", "", show_header=False, title=f"{soaked.groups} groups")
    for kind in ("requests", "outcomes", "reasons", "rewards"):
        for name, count in sorted(getattr(soaked, kind).items()):
            table.add_row(f"{kind}: {name}", f"{count:.0f}")
    for name, growth in soaked.growths.items():
        last, grows = soaked.samples[-1][name], ", GROWS" if name in soaked.growing else ""
        table.add_row(f"{name} at the end", f"{last:.0f}, {growth:+.3g} per 1,000 groups of the second half{grows}")
    table.add_row("weight updates", str(soaked.updates))
    table.add_row("hours on the engine's clock", f"{soaked.loop_seconds / 3600:.1f}")
    table.add_row("longest wait, seconds on that clock", f"{soaked.longest_wait:.1f}")
    console = Console()
    console.print(table)
    for violation in soaked.violations:
        console.print(f"VIOLATED {violation}", markup=False)
    console.print("survived" if soaked.survived else "NOT survived")
    return 0 if soaked.survived else 1


if __name__ == "__main__":
    sys.exit(main())
