"""What each program runs with a trainer's own code: a step, new weights, another step, an evaluation."""

import argparse
import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

SIZE = 4
"""Trajectories of a prompt."""
STEPS = 2
PROMPTS = [[[7, 8, 9, 5 + step, 6 + number, 5] for number in range(2)] for step in range(STEPS)]
"""Of each step, as token ids."""
TEXTS = [[f"{step + 5}a-{number + 3}b*4>" for number in range(2)] for step in range(STEPS)]
"""The same for trainers that send text."""


class Trainer:
    """The trainer's own client code, as far as it samples and brings weights."""

    brings_weights = True
    """Whether each update came by the trainer's own code."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def rollout(self, step: int) -> None:
        """Sample `SIZE` trajectories of two turns for each prompt of the step."""
        raise NotImplementedError

    async def evaluate(self) -> None:
        """Sample as the trainer's evaluation does."""
        raise NotImplementedError

    async def update(self, folder: str, version: int) -> None:
        """Bring new weights; by the server's own route where the trainer has none for it."""
        self.brings_weights = False
        post(f"{self.url}/darts/v1/weights", {"path": folder})

    async def close(self) -> None:
        pass


def main(create: Callable[[str], Trainer]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", help="new weights")
    args = parser.parse_args()
    asyncio.run(run(create, args.url, args.folder))


async def run(create: Callable[[str], Trainer], url: str, folder: str) -> None:
    trainer = create(url)
    for step in range(STEPS):
        if step:
            await trainer.update(folder, step)
        before = groups(url)
        await trainer.rollout(step)
        print(json.dumps({"step": step, "groups": groups(url) - before}), flush=True)
    before = groups(url)
    await trainer.evaluate()
    evaluation = {"evaluation": True, "groups": groups(url) - before, "brings_weights": trainer.brings_weights}
    print(json.dumps(evaluation), flush=True)
    await trainer.close()


def groups(url: str) -> int:
    """Number of groups that the server has had."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("darts_groups_total{")))


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")
