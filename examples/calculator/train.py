"""Train the agent by multi-turn GRPO, with all sessions of a prompt or with session groups; some minutes on two cores.

    python -m examples.calculator.train --method groups
    python -m examples.calculator.train --method plain

In each step `plain` runs eight sessions of each prompt and waits for all of them. `groups` starts twelve sessions of
each prompt, and the server stops the sessions that can no longer be among the eight that are returned. Both train on
eight trajectories of each prompt.

Each step pushes the weights, runs the sessions, and updates the policy with the rows that the server has recorded:
token ids, log-probs, and a mask that is 0 for the calculator's tokens. Evaluation is unshaped, on other prompts, with a
calculator that answers at once. Every step is a line in log.jsonl. Run it from the root of the repository, with vLLM,
the extra "dev" and clients/ installed.
"""

import argparse
import asyncio
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Self

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from darts_client import AsyncClient, DartsError, RunningSession, SessionTrajectory
from darts_server.offline.demo.server import DARTS, serving
from examples.calculator.agent import Episode, fast_tool, openai_complete, play, slow_tool
from examples.calculator.task import Problem, sample_problem
from examples.tiny_rl.grpo import Learner, Trained, advantages
from examples.tiny_rl.remote import TIMEOUT_SECONDS, decode_steps_of
from examples.tiny_rl.tokenizer import build_tokenizer
from examples.tiny_rl.train_log import Seconds

MODEL = Path(__file__).parent / "model"
HELD_OUT_SEED = 20_240
# Reading the root certificates takes tens of milliseconds. So the clients of all sessions share them.
CERTIFICATES = ssl.create_default_context()


@dataclass(frozen=True)
class Method:
    """The way sessions of a prompt are chosen for training."""

    name: str
    extra: int
    """Number of sessions of a prompt that run in addition."""
    policy: str


METHODS = {method.name: method for method in (Method("plain", 0, "off"), Method("groups", 4, "uniform"))}


@dataclass(frozen=True)
class Recipe:
    """Numbers of a training run."""

    steps: int = 30
    prompts: int = 8
    """Prompts in a step."""
    group_size: int = 8
    pool: int = 128
    """Training prompts, which repeat in another order in each epoch."""
    held_out_prompts: int = 64
    held_out_samples: int = 4
    """Sessions of each held-out prompt."""
    held_out_every: int = 10
    """Steps between two evaluations."""
    finish_stopped: bool = True
    """Whether stopped sessions are finished after a step, outside its time, to count the calls that they did not make.
    The trainer does not get these trajectories."""


@dataclass(frozen=True)
class Figures:
    """Figures of a step."""

    right: float
    """Share of correct answers of the trajectories that are trained on."""
    sessions: int
    """Number of sessions that were started."""
    stopped: int
    """Number of sessions that the server stopped."""
    turns: int
    """Number of requests of all sessions."""
    calls: int
    """Number of calls of the calculator that all sessions made."""
    saved_calls: int | None
    """Number of calls that stopped sessions did not make, or None without `Recipe.finish_stopped`."""
    late_requests: int
    """Number of requests that stopped sessions sent after they had been stopped."""
    trained: int
    """Number of trained tokens."""
    decode_steps: int
    """Engine steps until all groups were complete. Unlike seconds, they do not depend much on a busy machine."""
    logprob_gap: float
    """Largest difference between server and trainer, in nats."""
    seconds: Seconds


@dataclass(frozen=True)
class HeldOut:
    """Figures of an evaluation."""

    right: float
    calls: float
    """Mean number of calls of a session."""
    length: float
    """Mean number of tokens of a session without its prompt."""


@dataclass(frozen=True)
class Entry:
    """One line of the log. Step 0 is the policy before training. ``held_out`` is the evaluation after the step."""

    step: int
    figures: Figures | None = None
    held_out: HeldOut | None = None

    def line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, line: str) -> Self:
        """Parse an entry from its line."""
        fields: dict[str, Any] = json.loads(line)
        figures = fields["figures"]
        if figures is not None:
            figures = Figures(**figures | {"seconds": Seconds(**figures["seconds"])})
        held_out = fields["held_out"]
        if held_out is not None:
            held_out = HeldOut(**held_out)
        return cls(fields["step"], figures, held_out)


@dataclass(frozen=True)
class Group:
    """The sessions of one prompt."""

    episodes: Sequence[Episode]
    """All sessions, also stopped sessions."""
    trajectories: Sequence[SessionTrajectory]
    """The client's trajectories of the sessions that were selected."""

    @property
    def stopped(self) -> list[Episode]:
        """Sessions without an end of their own."""
        return [episode for episode in self.episodes if episode.end in (None, "stopped")]


class Trainer:
    """One training run.

    Several runs may take turns on a server, because each step pushes the run's weights first.

    Args:
        plain: client for requests without a session, for evaluation.
    """

    def __init__(
        self,
        client: AsyncClient,
        plain: AsyncOpenAI,
        method: Method,
        learner: Learner,
        recipe: Recipe,
        seed: int,
    ) -> None:
        self._client = client
        self._complete = openai_complete(plain)
        self._method = method
        self._learner = learner
        self._recipe = recipe
        self._seed = seed
        self._tokenizer: PreTrainedTokenizerFast = build_tokenizer()
        self._held_out = problems(HELD_OUT_SEED, recipe.held_out_prompts)
        self._pool = problems(seed, recipe.pool, avoid=self._held_out)

    async def train(self) -> AsyncIterator[Entry]:
        """Train step by step, and yield an entry after each step.

        Prompts, their order and the times of the calculator depend only on the seed.

        Raises:
            StaleWeights: the server samples with other weights than the learner's.
        """
        recipe = self._recipe
        numbers = endless(len(self._pool), Random(self._seed))
        yield Entry(0, held_out=await self.evaluate())
        for step in range(1, recipe.steps + 1):
            start = time.perf_counter()
            await self._push()
            pushed = time.perf_counter()
            steps_before = decode_steps_of(await self._client.metrics())

            # Run the sessions of all prompts, and wait for the groups.
            begin = time.perf_counter()
            runs = [self._run_group(step, number) for number in islice(numbers, recipe.prompts)]
            groups = await asyncio.gather(*runs)
            end = time.perf_counter()
            decode_steps = decode_steps_of(await self._client.metrics()) - steps_before
            turns, calls = totals(groups)
            late_requests = sum(episode.refused for group in groups for episode in group.episodes)
            stopped = sum(len(group.stopped) for group in groups)

            # The server still has the weights that sampled the stopped sessions.
            saved_calls = None
            if recipe.finish_stopped:
                await self._finish_stopped(groups)
                saved_calls = totals(groups)[1] - calls

            # Train on the selected trajectories.
            batch = [trained for group in groups for trained in graded(group.trajectories)]
            before = time.perf_counter()
            update = self._learner.update(batch)
            after = time.perf_counter()
            figures = Figures(
                right=fmean(trajectory.reward or 0.0 for group in groups for trajectory in group.trajectories),
                sessions=sum(len(group.episodes) for group in groups),
                stopped=stopped,
                turns=turns,
                calls=calls,
                saved_calls=saved_calls,
                late_requests=late_requests,
                trained=sum(trained.num_targets for trained in batch),
                decode_steps=decode_steps,
                logprob_gap=update.gap,
                seconds=Seconds(rollout=end - begin, train=after - before, push=pushed - start),
            )
            evaluation = None
            if step % recipe.held_out_every == 0 or step == recipe.steps:
                evaluation = await self.evaluate()
            yield Entry(step, figures, evaluation)

    async def _run_group(self, step: int, number: int) -> Group:
        """Run the sessions of one prompt until the group is over."""
        problem = self._pool[number]
        episodes: list[Episode] = []
        size = self._recipe.group_size
        key = f"{self._method.name} {self._seed}: {problem.prompt}"

        async def agent(session: RunningSession, episode: Episode) -> None:
            wait = slow_tool(f"{self._seed}/{step}/{number}/{session.index}")
            bound = session.openai(http_client=DefaultAsyncHttpxClient(verify=CERTIFICATES))
            await play(episode, openai_complete(bound), wait)
            if episode.end != "stopped":
                reason = "length" if episode.end == "truncated" else "stop"
                await session.end(reward=episode.reward, finish_reason=reason)

        method = self._method
        async with self._client.sessions(key, size=size, extra=method.extra, policy=method.policy) as group:
            async for session in group:
                episode = Episode(problem, self._tokenizer)
                episodes.append(episode)
                group.run(session, agent(session, episode))
        return Group(episodes, group.trajectories)

    async def _finish_stopped(self, groups: Sequence[Group]) -> None:
        """Finish stopped sessions from their last whole turns, unshaped."""
        stopped = [episode for group in groups for episode in group.stopped]
        for episode in stopped:
            episode.end = None
        await asyncio.gather(*(play(episode, self._complete, fast_tool) for episode in stopped))

    async def evaluate(self) -> HeldOut:
        """Evaluate the policy on unshaped sessions of the held-out prompts."""
        await self._push()
        count = self._recipe.held_out_samples
        episodes = [Episode(problem, self._tokenizer) for problem in self._held_out for _ in range(count)]
        await asyncio.gather(*(play(episode, self._complete, fast_tool) for episode in episodes))
        return HeldOut(
            right=fmean(episode.reward for episode in episodes),
            calls=fmean(episode.calls for episode in episodes),
            length=fmean(len(episode.tokens) - episode.prompt_length for episode in episodes),
        )

    async def _push(self) -> None:
        await self._client.weights.push(self._learner.weights())


def totals(groups: Sequence[Group]) -> tuple[int, int]:
    """Return the numbers of turns and of calls of all sessions."""
    episodes = [episode for group in groups for episode in group.episodes]
    return sum(episode.turns for episode in episodes), sum(episode.calls for episode in episodes)


def graded(trajectories: Sequence[SessionTrajectory]) -> list[Trained]:
    """Return the rows of a group's trajectories with GRPO's advantages."""
    values = advantages([trajectory.reward or 0.0 for trajectory in trajectories])
    return [
        to_trained(row, advantage)
        for trajectory, advantage in zip(trajectories, values, strict=True)
        for row in trajectory.rows
    ]


def to_trained(row: Any, advantage: float) -> Trained:
    """Return a row of a session with its advantage. The prompt is everything before the first sampled token."""
    start = list(row.mask).index(1)
    given = frozenset(place for place in range(start, len(row.mask)) if not row.mask[place])
    return Trained(list(row.token_ids), start, row.logprobs[start:], advantage, given=given)


def problems(seed: int, count: int, avoid: Sequence[Problem] = ()) -> list[Problem]:
    """Sample ``count`` different problems, without the problems in ``avoid``."""
    rng = Random(seed)
    taken = set(avoid)
    found: dict[Problem, None] = {}
    while len(found) < count:
        problem = sample_problem(rng)
        if problem not in taken:
            found[problem] = None
    return list(found)


def endless(count: int, rng: Random) -> Iterator[int]:
    """Yield the numbers below ``count`` in epochs, each in another order."""
    while True:
        yield from rng.sample(range(count), count)


def plain_client(url: str) -> AsyncOpenAI:
    """Return a client for requests without a session."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_SECONDS)


def main(argv: Sequence[str] | None = None) -> None:
    """Train once. Exits with a message if it fails."""
    options = arguments(argv)
    # The server needs the other core.
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(run(options))
    except (DartsError, RuntimeError, OSError) as error:
        sys.exit(f"train: {error}")
    except KeyboardInterrupt:
        sys.exit("train: interrupted; the server it started has been stopped")
    print(f"Log: {options.out / 'log.jsonl'}")


async def run(options: argparse.Namespace) -> None:
    """Train on the given server, or on a server of its own, and write the log."""
    recipe = Recipe(options.steps)
    async with AsyncExitStack() as stack:
        url = options.url or stack.enter_context(serving(DARTS, options.out / "server.log")).url
        client = await stack.enter_async_context(AsyncClient(url, timeout=TIMEOUT_SECONDS))
        plain = await stack.enter_async_context(plain_client(url))
        log = stack.enter_context((options.out / "log.jsonl").open("w"))
        bar = stack.enter_context(tqdm(total=options.steps, desc="training", unit="step"))
        trainer = Trainer(client, plain, METHODS[options.method], Learner(options.model), recipe, options.seed)
        async for entry in trainer.train():
            print(entry.line(), file=log, flush=True)
            if entry.held_out is not None:
                bar.write(f"step {entry.step}: {entry.held_out.right:.3f} right on other prompts")
            if entry.figures is not None:
                bar.set_postfix(right=f"{entry.figures.right:.2f}")
                bar.update()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.calculator.train", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--method", choices=sorted(METHODS), default="groups", help="default: %(default)s")
    add("--steps", type=int, default=Recipe.steps, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the prompts and of the calculator's times (default: %(default)s)")
    add("--model", type=Path, default=MODEL, metavar="FOLDER", help="initial policy (default: the model beside)")
    add("--url", help="a running server with a model of the same architecture (default: start one)")
    add("--out", type=Path, default=Path("out/calculator"), metavar="FOLDER", help="default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
