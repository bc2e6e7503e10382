"""Train the tiny task by GRPO with darts-server; about two minutes on two CPU cores.

    python -m examples.tiny_rl.train
    python -m examples.tiny_rl.train --policy off --carry restart
    python -m examples.tiny_rl.train --policy darts_cut --prompts-ahead 0
    python -m examples.tiny_rl.train --policy off --max-staleness 1

The first command starts 24 prompts in each step, trains on the first 16 groups that are complete, and continues the
other 8 in the next step. The loss corrects for their first tokens, which older weights sampled. With the second command
the 8 prompts start again (tail batching). The third waits for all prompts. The fourth samples each batch while the
batch before is trained on.

Each step computes rewards, updates the policy, reports the rewards and pushes the new weights. Evaluation is unshaped,
on other prompts. Every step is a line in log.jsonl, and at the end a picture is drawn. Run it from the root of the
repository, with vLLM, the extra "dev" and clients/ installed.

The loop is `train` below. It is a template for a trainer of your own: `remote.py` has its requests to the server, and
`grpo.py` its model and loss.
"""

import argparse
import sys
import time
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean, pvariance
from typing import TextIO

import numpy as np
import torch
from tqdm import tqdm

from darts_client import Client, DartsError, Group, PromptSpec, Trajectory
from darts_client.advantages import run_weight, unbiased_advantages
from darts_server.offline.demo.problems import Difficulty, Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS, MODEL, serving
from examples.tiny_rl.grpo import LEARNING_RATE, Learner, Trained, Update, advantages, scaled
from examples.tiny_rl.method import Method
from examples.tiny_rl.remote import TIMEOUT_SECONDS, Rollouts, rollouts, samples, truncated
from examples.tiny_rl.tokenizer import build_tokenizer
from examples.tiny_rl.train_log import Entry, HeldOut, Seconds, Training
from examples.tiny_rl.train_picture import picture

HELD_OUT_SEED = 20_240
# More than samples in an evaluation, so that runs share no random numbers.
EVALUATION_SEEDS = 1_000_000


@dataclass(frozen=True)
class Recipe:
    """Numbers of a training run."""

    steps: int = 40
    prompts: int = 16
    """Prompts in a step."""
    group_size: int = 8
    pool: int = 128
    """Training prompts. They repeat, as in any data set, and the server learns their lengths."""
    held_out_prompts: int = 96
    held_out_samples: int = 4
    """Samples of each held-out prompt."""
    held_out_every: int = 5
    """Steps between two evaluations."""
    difficulties: tuple[Difficulty | None, ...] = (None,)
    """Difficulties of the prompts, in turns. None is easy or hard."""
    # Saved runs are recognized by the `repr`, and older saved runs do not have a learning rate.
    learning_rate: float = field(default=LEARNING_RATE, repr=False)


@dataclass
class Progress:
    """Progress of a run. A run continues from it and the learner's state."""

    step: int = 0
    drawn: int = 0
    """Number of prompts that were drawn from the epochs."""
    carried: list[int] = field(default_factory=list)
    """Prompts (numbers in the pool) without a complete group, which start again later."""
    evaluated: bool = False
    """Whether the evaluation before training was made."""


@dataclass(frozen=True)
class Batch:
    """The prompts of a batch, by their numbers in the pool, and its groups."""

    started: Sequence[int]
    new: int
    """Number of prompts at the end of ``started`` that were drawn for this batch."""
    shaped: Rollouts
    waiting: Sequence[int] = ()
    """Prompts of earlier batches that were not started in this batch."""

    @property
    def numbers(self) -> list[int]:
        """Prompt of each group."""
        return [self.started[group.number] for group in self.shaped.groups]

    @property
    def left(self) -> list[int]:
        """Prompts for later batches: the waiting prompts, and the started prompts without a group."""
        complete = {group.number for group in self.shaped.groups}
        return [*self.waiting, *without(self.started, complete)]


def train(
    client: Client,
    method: Method,
    learner: Learner,
    recipe: Recipe,
    seed: int,
    progress: Progress | None = None,
    name: str | None = None,
) -> Iterator[Entry]:
    """Train step by step, and yield an entry after each step. The server may have any weights at the start.

    Prompts, their order and the evaluations' random numbers depend only on the seed.

    Args:
        progress: updated before each entry. To continue a run, pass the progress with which it ended. The first step of
            one-step-off training then has a batch of the current weights, as at the start of a run.
        name: name of the run in the keys of its prompts, if other runs on the same server may carry prompts over.

    Raises:
        StaleWeights: the server samples with other weights than the learner's.
    """
    progress = progress or Progress()
    held_out = problems(HELD_OUT_SEED, recipe.held_out_prompts, recipe.difficulties)
    pool = problems(seed, recipe.pool, recipe.difficulties, avoid=held_out)
    epochs = islice(endless(len(pool), Random(seed)), progress.drawn, None)
    tokenizer = build_tokenizer()
    tokens = [tokenizer.encode(problem.prompt) for problem in pool]
    prompts = [PromptSpec(token_ids) for token_ids in tokens]
    if name and method.carry:
        prompts = [PromptSpec(token_ids, key=f"{name}: {number}") for number, token_ids in enumerate(tokens)]

    def sample() -> Batch:
        num_restarted, num_new = method.prompts(recipe.prompts, len(progress.carried))
        new = list(islice(epochs, num_new))
        started = progress.carried[:num_restarted] + new
        chosen = [prompts[number] for number in started]
        shaped = rollouts(client, method, chosen, recipe.group_size, recipe.prompts)
        return Batch(started, len(new), shaped, progress.carried[num_restarted:])

    served = client.weights.push(learner.weights()).version
    if not (progress.step or progress.evaluated):
        progress.evaluated = True
        yield Entry(0, held_out=evaluate(client, held_out, recipe.held_out_samples, seed))
    ahead: Batch | None = None
    with ThreadPoolExecutor(1) as background:
        while progress.step < recipe.steps:
            # Sample a batch, or use the batch that was sampled while the batch before was trained on.
            start = time.perf_counter()
            if method.is_off_policy:
                # Several runs may take turns on a server, and each pushes its own weights.
                served = client.weights.get().version
            batch = ahead or sample()
            end = time.perf_counter()
            shaped = batch.shaped
            numbers = batch.numbers
            rewards = [
                [score(pool[number], trajectory) for trajectory in group.trajectories]
                for number, group in zip(numbers, shaped.groups, strict=True)
            ]

            # Train, with one-step-off training while the next batch is sampled.
            is_last = progress.step + 1 == recipe.steps
            next_batch = background.submit(sample) if method.staleness and not is_last else None
            stale = stale_tokens(shaped, served) if method.is_off_policy else None
            update = learner.update(graded([tokens[number] for number in numbers], shaped, rewards, method, stale))
            updated = time.perf_counter()
            ahead = next_batch.result() if next_batch is not None else None
            sampled = time.perf_counter()

            # Report the rewards, and push the new weights.
            client.rewards(shaped.groups, rewards)
            client.weights.push(learner.weights())
            pushed = time.perf_counter()
            seconds = Seconds(rollout=end - start + sampled - updated, train=updated - end, push=pushed - sampled)
            progress.step += 1
            progress.drawn += batch.new
            progress.carried = batch.left

            evaluation = None
            if progress.step % recipe.held_out_every == 0 or progress.step == recipe.steps:
                evaluation = evaluate(client, held_out, recipe.held_out_samples, seed)
            yield Entry(progress.step, summary(shaped, rewards, update, seconds, stale), evaluation)


def stale_tokens(shaped: Rollouts, served: int) -> list[list[int]]:
    """Return the number of tokens at the start of each trajectory that other weights than ``served`` sampled."""
    return [[_stale_tokens(trajectory, served) for trajectory in group.trajectories] for group in shaped.groups]


def _stale_tokens(trajectory: Trajectory, served: int) -> int:
    return sum(count for version, count in trajectory.version_spans if version != served)


def score(problem: Problem, trajectory: Trajectory) -> float:
    """Return the verifier's reward, or 0 for a truncated trajectory, even if it was cut after a correct answer.

    A truncated trajectory counts as a wrong answer, and all its tokens are trained on. So the policy learns that long
    answers earn nothing, which it would not if such trajectories were left out of the loss.
    """
    if truncated(trajectory):
        return 0.0
    return reward(problem, trajectory.text)


def graded(
    prompts: Sequence[list[int]],
    shaped: Rollouts,
    rewards: Sequence[Sequence[float]],
    method: Method,
    stale: Sequence[Sequence[int]] | None = None,
) -> list[Trained]:
    """Return all trajectories with their advantages. ``stale`` is the result of `stale_tokens`, by default 0."""
    by_group = step_advantages(shaped.groups, rewards, method)
    stale = stale or [[0] * len(row) for row in by_group]
    return [
        Trained([*prompt, *trajectory.token_ids], len(prompt), trajectory.logprobs or (), advantage, stale_count)
        for prompt, group, row, stale_row in zip(prompts, shaped.groups, by_group, stale, strict=True)
        for trajectory, advantage, stale_count in zip(group.trajectories, row, stale_row, strict=True)
    ]


def step_advantages(groups: Sequence[Group], rewards: Sequence[Sequence[float]], method: Method) -> list[list[float]]:
    """Return the advantages of each group's trajectories, after the method's penalty.

    Unbiased advantages are meant for a mean within each group, but the loss is a sum over all trajectories. So they are
    divided by the group's size, which differs between groups of survivors.
    """
    penalized_rows = [penalized(group, row, method) for group, row in zip(groups, rewards, strict=True)]
    if not method.unbiased:
        pairs = zip(groups, penalized_rows, strict=True)
        return [[run_weight(group) * value for value in advantages(row)] for group, row in pairs]
    rows = [unbiased_advantages(group, row) for group, row in zip(groups, penalized_rows, strict=True)]
    return scaled([[value / len(row) for value in row] for row in rows])


def penalized(group: Group, rewards: Sequence[float], method: Method) -> list[float]:
    """Return the rewards minus the method's penalties. The server and the log get the rewards without penalties."""
    return [reward - method.penalty(length) for reward, length in zip(rewards, group.lengths, strict=True)]


def evaluate(client: Client, held_out: Sequence[Problem], count: int, seed: int) -> HeldOut:
    """Evaluate the policy on ``count`` unshaped samples of each prompt, with random numbers of this seed."""
    answers = samples(client, [problem.prompt for problem in held_out], count, seed * EVALUATION_SEEDS)
    rewards = [
        [score(problem, trajectory) for trajectory in group] for problem, group in zip(held_out, answers, strict=True)
    ]
    lengths = [[len(trajectory.token_ids) for trajectory in group] for group in answers]
    cut = sum(truncated(trajectory) for group in answers for trajectory in group)
    return HeldOut.of([problem.difficulty for problem in held_out], rewards, lengths, cut)


def problems(
    seed: int,
    count: int,
    difficulties: Sequence[Difficulty | None] = (None,),
    avoid: Sequence[Problem] = (),
) -> list[Problem]:
    """Sample ``count`` different problems of these difficulties in turns, without the problems in ``avoid``."""
    rng = Random(seed)
    taken = {problem.prompt for problem in avoid}
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = sample_problem(rng, difficulties[len(found) % len(difficulties)])
        if problem.prompt not in taken:
            found[problem.prompt] = problem
    return list(found.values())


def endless(count: int, rng: Random) -> Iterator[int]:
    """Yield the numbers below ``count`` in epochs, each in another order."""
    while True:
        yield from rng.sample(range(count), count)


def without(numbers: Sequence[int], places: Container[int]) -> list[int]:
    """Return the numbers that are at other places."""
    return [number for place, number in enumerate(numbers) if place not in places]


def summary(
    shaped: Rollouts,
    rewards: Sequence[Sequence[float]],
    update: Update,
    seconds: Seconds,
    stale: Sequence[Sequence[int]] | None = None,
) -> Training:
    """Summarize one step for the log."""
    trajectories = [trajectory for group in shaped.groups for trajectory in group.trajectories]
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    return Training(
        right=fmean(reward for group in rewards for reward in group),
        reward_variance=fmean(pvariance(group) for group in rewards),
        length_mean=fmean(lengths),
        length_p95=float(np.percentile(lengths, 95)),
        truncated=fmean(truncated(trajectory) for trajectory in trajectories),
        generated=shaped.generated,
        trained=sum(lengths),
        decode_steps=shaped.decode_steps,
        loss=update.loss,
        gradient_norm=update.gradient_norm,
        logprob_gap=update.gap,
        weight_version=min(trajectory.weight_version_start or 0 for trajectory in trajectories),
        seconds=seconds,
        off_policy=sum(map(sum, stale)) / sum(lengths) if stale else 0.0,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train and draw. Exits with a message if it fails."""
    options = arguments(argv)
    # The server needs the other core.
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            url = options.url or stack.enter_context(serving(DARTS, options.out / "server.log")).url
            client = stack.enter_context(Client(url, timeout=TIMEOUT_SECONDS))
            log = stack.enter_context((options.out / "log.jsonl").open("w"))
            recipe = Recipe(options.steps)
            learner = Learner(options.model, recipe.learning_rate)
            steps = train(client, options.method, learner, recipe, options.seed)
            entries = run(steps, options.steps, log)
        picture(entries, options.policy, options.out / "training.png")
        print(f"Log: {options.out / 'log.jsonl'}\nPicture: {options.out / 'training.png'}")
    except (DartsError, RuntimeError, OSError) as error:
        sys.exit(f"train: {error}")
    except KeyboardInterrupt:
        sys.exit("train: interrupted; the server it started has been stopped")


def run(entries: Iterator[Entry], steps: int, log: TextIO) -> list[Entry]:
    """Return all entries, and write and show each as it arrives."""
    done = []
    held_out = float("nan")
    with tqdm(total=steps, desc="training", unit="step") as bar:
        for entry in entries:
            done.append(entry)
            print(entry.line(), file=log, flush=True)
            if entry.held_out is not None:
                held_out = entry.held_out.right
            if entry.training is not None:
                bar.set_postfix(right=f"{entry.training.right:.2f}", held_out=f"{held_out:.3f}")
                bar.update()
    return done


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.tiny_rl.train", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--policy", default="auto", help="policy that shapes training groups (default: %(default)s)")
    add("--prompts-ahead", type=float, metavar="SHARE", help="prompts started in addition (default: 0.5)")
    add(
        "--carry",
        choices=["resume", "restart"],
        default="resume",
        help="how unfinished prompts continue in the next step (default: %(default)s)",
    )
    add("--max-staleness", type=int, default=0, choices=[0, 1], help="updates between sampling and training on it")
    add("--steps", type=int, default=Recipe.steps, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the training prompts and their order (default: %(default)s)")
    add("--model", type=Path, default=MODEL, metavar="FOLDER", help="initial policy (default: the shipped model)")
    add("--url", help="a running server with a model of the same architecture (default: start one)")
    add(
        "--out",
        type=Path,
        default=Path("out/train"),
        metavar="FOLDER",
        help="folder for log and picture (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.prompts_ahead is None:
        options.prompts_ahead = 0.0 if options.max_staleness else 0.5
    if not options.prompts_ahead >= 0:
        parser.error("--prompts-ahead must be at least 0")
    if options.prompts_ahead and options.max_staleness:
        parser.error("--max-staleness 1 does not go with --prompts-ahead")
    carry = options.carry if options.prompts_ahead else None
    options.method = Method(
        options.policy, started=1 + options.prompts_ahead, carry=carry, staleness=options.max_staleness
    )
    return options


if __name__ == "__main__":
    main()
