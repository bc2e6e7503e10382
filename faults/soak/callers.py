"""Callers that request groups in every way; some cancel, some abort groups or trajectories, most get rewards."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

from darts_server.exceptions import DartsError
from darts_server.policies import OFF
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.registry import IdempotencyKey
from darts_server.rollout.batches.request import BatchRequest
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.rollout.join_requests import JoinRequest
from darts_server.rollout.observers.reward_matching import Reward
from darts_server.rollout.plan import Plan
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.rollout.voting.runner import VoteRequest
from darts_server.types import PromptSpec, RequestOptions
from faults.soak.engine import DOOMED, INVALID
from faults.soak.stack import Stack

TIMEOUT_SECONDS = 600.0
"""Every request is answered within this time on the loop's clock."""
SIZES = (2, 3, 4, 6)
REPEATED_PROMPTS, UNIQUE = 512, 0.3
"""Number of prompts that are used again and again, and the share of requests with a prompt of their own."""
CANCELLED, ABORTED, FAILING = 0.06, 0.01, 0.005
"""Shares of requests that are cancelled, of groups that are aborted or lose one trajectory so, and of prompts that are
doomed or invalid."""
CARRYING = (OFF, "uniform", "darts", "darts_cut", "cap")
"""Policies whose batches with enough groups carry the others over: those that prune cannot go on with a group."""
MAX_REWARD_DELAY = 4.0
MAX_CANCEL_DELAY = 0.8


class Callers:
    """``requests``, ``rewards``: how many ended how. ``longest_wait``: of a request, in seconds."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.requests: Counter[str] = Counter()
        self.rewards: Counter[str] = Counter()
        self.longest_wait = 0.0
        self._stack = stack
        self._rng = Random(seed)
        self._policies = [name for name in stack.control.planner.names() if name != OFF]
        self._background: set[asyncio.Task[None]] = set()

    async def work(self, numbers: Iterator[int]) -> None:
        """Send one request after the other, until the numbers are used up."""
        ways = [self._group] * 12 + [self._batch] * 3 + [self._singles] * 3 + [self._vote]
        for number in numbers:
            began = asyncio.get_running_loop().time()
            outcome = await self._run(self._rng.choice(ways)(number, numbers))
            self.requests[outcome] += 1
            self.longest_wait = max(self.longest_wait, asyncio.get_running_loop().time() - began)

    async def wait_for_background(self) -> None:
        """Wait until all rewards are reported and all trajectories that were to be aborted have ended."""
        while self._background:
            await asyncio.wait(self._background)

    async def _run(self, request: Coroutine[Any, Any, str]) -> str:
        """Run a request and return how it ended; cancel some of them."""
        task = asyncio.create_task(request)
        if self._rng.random() < CANCELLED:
            asyncio.get_running_loop().call_later(self._rng.uniform(0, MAX_CANCEL_DELAY), task.cancel)
        done, _ = await asyncio.wait([task], timeout=TIMEOUT_SECONDS)
        if not done:
            task.cancel()
            return "lost"
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"
        except DartsError as error:
            return f"failed: {type(error).__name__}"

    # --- requests -----------------------------------------------------------

    async def _group(self, number: int, _: Iterator[int]) -> str:
        """Request a group as a request with n > 1 does."""
        rollouts, request = self._stack.rollouts, f"{self._prompt(number)}#{number}"
        plan = rollouts.plan(self._rng.choice(SIZES), RequestOptions(self._rng.choice(self._policies)))
        assert plan is not None
        key, group_id, early = request.partition("#")[0], f"g{number}", self._rng.random() < 0.3
        ticket = rollouts.admission.admit(rollouts.usual_candidates(plan))
        if self._rng.random() < ABORTED:
            asyncio.get_running_loop().call_later(self._rng.uniform(0, MAX_CANCEL_DELAY), rollouts.abort, group_id)
        with ticket:
            async with rollouts.gate.enter():
                allocation = await rollouts.allocator.allocate(plan, key)
                allocation = replace(allocation, candidates=ticket.fit(allocation.candidates))
                spec = GroupSpec.of_plan(plan, request, group_id, key, early=early)
                run = rollouts.start(spec, plan, allocation, ticket.split(allocation.candidates))
                if self._rng.random() < 2 * ABORTED:  # many of them have ended by then
                    self._keep(self._abort_trajectory(run, self._rng.randrange(allocation.candidates)))
                try:
                    indices = [trajectory.index async for trajectory in run.trajectories()]
                finally:
                    run.cancel()
        self._reward(group_id, indices)
        return _outcome(len(set(indices)) == plan.size)

    async def _singles(self, number: int, numbers: Iterator[int]) -> str:
        """Request a group by single requests; sometimes one is missing or cancelled."""
        size, rollouts, prompt = self._rng.choice(SIZES), self._stack.rollouts, self._prompt(number)
        name = f"singles-{number}"
        plan = rollouts.plan(1, RequestOptions(self._rng.choice(self._policies), group_id=name, group_size=size))
        assert plan is not None
        missing = 1 if self._rng.random() < 0.1 else 0
        requests = [self._single(plan, prompt, name, f"{name}-{place}") for place in range(size - missing)]
        tasks = [asyncio.create_task(each) for each in requests]
        if self._rng.random() < CANCELLED:
            asyncio.get_running_loop().call_later(self._rng.uniform(0, MAX_CANCEL_DELAY), tasks[0].cancel)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        errors = [result for result in results if isinstance(result, DartsError)]
        unexpected = [each for each in results if isinstance(each, Exception) and not isinstance(each, DartsError)]
        if unexpected:
            raise unexpected[0]
        return f"failed: {type(errors[0]).__name__}" if errors else "answered"

    async def _single(self, plan: Plan, prompt: str, name: str, request_id: str) -> list[int]:
        rollouts = self._stack.rollouts
        key = f"{plan.policy}/{name}"
        with rollouts.admission.admit(1) as ticket:
            joining = JoinRequest(f"{prompt}#{request_id}", request_id, plan, prompt, key, ticket, name)
            async with rollouts.gate.enter(skip_wait=rollouts.joiner.expects(joining.join_key)):
                return await rollouts.joiner.join(joining, lambda _: None)

    async def _vote(self, number: int, _: Iterator[int]) -> str:
        question = VoteRequest(PromptSpec(text=f"{self._prompt(number)}#{number}"), self._rng.choice(SIZES), "#(.)")
        result = await self._stack.votes.run(question)
        self._reward(result.record.group_id, [ballot.index for ballot in result.ballots])
        return "answered"

    async def _batch(self, number: int, numbers: Iterator[int]) -> str:
        """Request a batch through our own API, with or without an idempotency key, streamed or in one answer."""
        prompts = [number, *islice(numbers, self._rng.randint(0, 7))]
        policy = self._rng.choice([OFF, *self._policies])
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
        batch = await self._stack.batches.open(request, answer_format, key)
        if self._rng.random() < ABORTED:
            asyncio.get_running_loop().call_later(0.2, batch.cancel, "at random")
        if key is not None and self._rng.random() < 0.3:
            with batch.listen() as listener, suppress(TimeoutError):  # disconnects, then comes back
                async with asyncio.timeout(0.2):
                    await listener.next()
            if self._rng.random() < 0.2:
                return "cancelled"
            batch = self._stack.batches.find(batch.batch_id)
        return await self._listen(batch, request.group_size)

    async def _listen(self, batch: BatchRun, size: int) -> str:
        with batch.listen() as listener:
            if batch.answer_format.stream is not StreamMode.OFF:
                while await listener.next() is not None:
                    pass
            done = await batch.wait()
        for result in done.results:
            self._reward(result.group_id, list(result.samples))
        sizes = [len(result.samples) for result in done.results if not result.error]
        return _outcome(all(sizes) if batch.survivors else set(sizes) <= {size})

    # --- prompts and rewards ------------------------------------------------

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
        self._keep(self._report(rewards, self._rng.uniform(0, MAX_REWARD_DELAY)))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_trajectory(self, run: GroupRun[str, list[int]], index: int) -> None:
        await asyncio.sleep(self._rng.uniform(0, MAX_CANCEL_DELAY))
        with suppress(DartsError):
            await asyncio.shield(run.runner.abort(index))

    async def _report(self, rewards: Sequence[Reward], delay: float) -> None:
        await asyncio.sleep(delay)
        report = await self._stack.reward_matcher.report(rewards)
        self.rewards.update(matched=report.matched, repeated=report.repeated, unknown=report.unknown)


def _outcome(is_complete: bool) -> str:
    return "answered" if is_complete else "wrong"
