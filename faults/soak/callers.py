"""What callers do, by lot: groups in every way there is, some given up, some aborted, most rewarded."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any

from darts_server.exceptions import DartsError
from darts_server.rollout.batches.registry import Claim
from darts_server.rollout.batches.run import BatchRun, Form, Stream
from darts_server.rollout.batches.submission import BatchRequest
from darts_server.rollout.joining import Joining
from darts_server.rollout.observers.feedback import Reward
from darts_server.rollout.plan import OFF, Plan
from darts_server.rollout.voting.runner import VoteRequest
from darts_server.types import PromptSpec, RequestOptions
from faults.soak.house import House
from faults.soak.world import DOOMED, INVALID

PATIENCE = 600.0
"""Seconds of the loop's clock, within which whatever was asked for is answered."""
SIZES = (2, 3, 4, 6)
KNOWN_PROMPTS, FRESH = 512, 0.3
"""Prompts that come again, and the share of those that never do."""
IMPATIENT, ABORTED, UNLUCKY = 0.06, 0.01, 0.005
"""Shares of callers that leave, of groups that are aborted, and of prompts that are doomed or invalid."""
LATEST_REWARD = 4.0
LONGEST_STAY = 0.8


class Callers:
    """``ends`` counts how requests ended, ``told`` what became of rewards, ``slowest`` is the longest wait (s)."""

    def __init__(self, house: House, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.slowest = 0.0
        self._house = house
        self._lots = Random(seed)
        self._policies = [name for name in house.control.configuration().policies if name != OFF]
        self._rewarding: set[asyncio.Task[None]] = set()

    async def work(self, numbers: Iterator[int]) -> None:
        """One caller after the other, until the numbers are used up."""
        ways = [self._whole] * 12 + [self._batch] * 3 + [self._singles] * 3 + [self._vote]
        for number in numbers:
            began = asyncio.get_running_loop().time()
            end = await self._patiently(self._lots.choice(ways)(number, numbers))
            self.ends[end] += 1
            self.slowest = max(self.slowest, asyncio.get_running_loop().time() - began)

    async def rewarded(self) -> None:
        """Wait until all rewards are reported."""
        while self._rewarding:
            await asyncio.wait(self._rewarding)

    async def _patiently(self, asking: Coroutine[Any, Any, str]) -> str:
        """How it ended. Some leave before that."""
        task = asyncio.create_task(asking)
        if self._lots.random() < IMPATIENT:
            asyncio.get_running_loop().call_later(self._lots.uniform(0, LONGEST_STAY), task.cancel)
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if not done:
            task.cancel()
            return "lost"
        try:
            return await task
        except asyncio.CancelledError:
            return "left"
        except DartsError as error:
            return f"told: {type(error).__name__}"

    # --- ways to ask --------------------------------------------------------

    async def _whole(self, number: int, _: Iterator[int]) -> str:
        """A group as a request with n > 1 asks for it."""
        rollouts, request = self._house.rollouts, f"{self._prompt(number)}#{number}"
        plan = rollouts.plan(self._lots.choice(SIZES), RequestOptions(self._lots.choice(self._policies)))
        assert plan is not None
        key, group_id, early = request.partition("#")[0], f"g{number}", self._lots.random() < 0.3
        rollouts.admission.check(plan.size)
        if self._lots.random() < ABORTED:
            asyncio.get_running_loop().call_later(self._lots.uniform(0, LONGEST_STAY), rollouts.abort, group_id)
        with rollouts.admission.held(plan.size) as ticket:
            async with rollouts.gate.held():
                grant = await rollouts.allocate(plan, key)
                ticket.grow(grant.candidates)
                run = rollouts.run(request, plan, grant, group_id=group_id, prompt_key=key, early=early)
                ticket.begun()
                try:
                    indices = [trajectory.index async for trajectory in run.trajectories()]
                finally:
                    run.leave()
        self._reward(group_id, indices)
        return _right(len(set(indices)) == plan.size)

    async def _singles(self, number: int, numbers: Iterator[int]) -> str:
        """A group of requests for one trajectory each, of which some never come and some leave."""
        size, rollouts, prompt = self._lots.choice(SIZES), self._house.rollouts, self._prompt(number)
        name = f"singles-{number}"
        plan = rollouts.plan(1, RequestOptions(self._lots.choice(self._policies), group_id=name, group_size=size))
        assert plan is not None
        missing = 1 if self._lots.random() < 0.1 else 0
        asking = [self._single(plan, prompt, name, f"{name}-{place}") for place in range(size - missing)]
        tasks = [asyncio.create_task(each) for each in asking]
        if self._lots.random() < IMPATIENT:
            asyncio.get_running_loop().call_later(self._lots.uniform(0, LONGEST_STAY), tasks[0].cancel)
        try:
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        errors = [end for end in ends if isinstance(end, DartsError)]
        unexpected = [end for end in ends if isinstance(end, Exception) and not isinstance(end, DartsError)]
        if unexpected:
            raise unexpected[0]
        return f"told: {type(errors[0]).__name__}" if errors else "answered"

    async def _single(self, plan: Plan, prompt: str, name: str, request_id: str) -> list[int]:
        rollouts = self._house.rollouts
        joining = Joining(f"{prompt}#{request_id}", request_id, plan, prompt, f"{plan.policy}/{name}", name)
        with rollouts.admission.held(1) as ticket:
            async with rollouts.gate.held(at_once=rollouts.awaits(joining)):
                ticket.begun()
                return await rollouts.join(joining, lambda _: None)

    async def _vote(self, number: int, _: Iterator[int]) -> str:
        question = VoteRequest(PromptSpec(text=f"{self._prompt(number)}#{number}"), self._lots.choice(SIZES), "#(.)")
        result = await self._house.votes.run(question)
        self._reward(result.record.group_id, [ballot.index for ballot in result.ballots])
        return "answered"

    async def _batch(self, number: int, numbers: Iterator[int]) -> str:
        """Groups by our own API, with or without a claim, told as they run or at the end."""
        prompts = [number, *islice(numbers, self._lots.randint(0, 7))]
        asked = BatchRequest(
            [PromptSpec(text=f"{self._prompt(n)}#{n}") for n in prompts],
            self._lots.choice(SIZES),
            policy={"name": self._lots.choice([OFF, *self._policies])},
            num_groups=max(1, len(prompts) - 2) if self._lots.random() < 0.2 else None,
        )
        claim = Claim(b"owner", f"key-{number}", b"digest") if self._lots.random() < 0.3 else None
        form = Form(self._lots.choice(list(Stream)), chunk_tokens=4)
        batch = await self._house.batches.open(asked, form, claim)
        if self._lots.random() < ABORTED:
            asyncio.get_running_loop().call_later(0.2, batch.cancel, "by lot")
        if claim is not None and self._lots.random() < 0.3:
            with batch.listen() as listener, suppress(TimeoutError):  # leaves, and comes back
                async with asyncio.timeout(0.2):
                    await listener.next()
            if self._lots.random() < 0.2:
                return "left"
            batch = self._house.batches.find(batch.batch_id)
        return await self._listen(batch, asked.group_size)

    async def _listen(self, batch: BatchRun, size: int) -> str:
        with batch.listen() as listener:
            if batch.form.stream is not Stream.NOTHING:
                while await listener.next() is not None:
                    pass
            done = await batch.answer()
        for result in done.results:
            self._reward(result.group_id, list(result.samples))
        return _right(all(len(r.samples) == (0 if r.error else size) for r in done.results))

    # --- what comes after ---------------------------------------------------

    def _prompt(self, number: int) -> str:
        lot = self._lots.random()
        if lot < UNLUCKY:
            return self._lots.choice((DOOMED, INVALID)) + str(number % KNOWN_PROMPTS)
        return f"p{number if lot < FRESH else self._lots.randrange(KNOWN_PROMPTS)}"

    def _reward(self, group_id: str, indices: Sequence[int]) -> None:
        if self._lots.random() < 0.3:
            return
        ids = [f"{group_id}:{index}" for index in indices]
        if self._lots.random() < 0.1:
            ids += ids[:1]
        if self._lots.random() < 0.05:
            ids += [f"nobody-{group_id}:0"]
        rewards = [Reward(float(i % 2), bool(i % 2), trajectory_id=name) for i, name in enumerate(ids)]
        task = asyncio.create_task(self._report(rewards, self._lots.uniform(0, LATEST_REWARD)))
        self._rewarding.add(task)
        task.add_done_callback(self._rewarding.discard)

    async def _report(self, rewards: Sequence[Reward], delay: float) -> None:
        await asyncio.sleep(delay)
        report = await self._house.feedback.report(rewards)
        self.told.update(matched=report.matched, repeated=report.repeated, unknown=report.unknown)


def _right(whole: bool) -> str:
    return "answered" if whole else "wrong"
