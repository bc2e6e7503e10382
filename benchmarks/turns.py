"""Compare the later turns of trajectories with shaping on and off: do they wait?

    python -m benchmarks.turns

One server with ``--group-size 8``. Rounds of trajectories over four turns, as SkyRL, TRL's asynchronous trainer and
verifiers send them, alternate with the same rounds unshaped (``X-Darts-Policy: off``), so that other load on the
machine affects both. The groups of the shaped rounds are counted: a later turn that were joined would add some.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import DARTS, Server, serving

GROUP_SIZE, TURNS, TOKENS = 8, 4, 40
FLAGS = ("--group-size", str(GROUP_SIZE), "--enable-scale-out", "--group-pattern", "(.+)_[0-9]+")
ENVIRONMENT_SECONDS = 0.02
"""Of a tool between two turns, at most."""
OBSERVATION = [5, 6]
"""Tokens of its answer."""


@dataclass
class Trajectory:
    """Of the prompt ``uid``, as its trainer keeps it. ``seconds``: of each turn."""

    uid: str
    rep: int
    token_ids: list[int]
    messages: list[dict[str, Any]]
    seconds: list[float] = field(default_factory=list)


Request = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers."""


def skyrl(one: Trajectory) -> Request:
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    body = {"token_ids": one.token_ids, "sampling_params": sampling}
    return "/inference/v1/generate", body, {"X-Session-ID": f"{one.uid}_{one.rep}"}


def trl(one: Trajectory) -> Request:
    body = {"model": "tiny", "prompt": one.token_ids, "max_tokens": TOKENS, "logprobs": 0, "return_token_ids": True}
    return "/v1/completions", body, {}


def verifiers(one: Trajectory) -> Request:
    body = {"model": "tiny", "messages": one.messages, "max_completion_tokens": TOKENS, "return_token_ids": True}
    return "/v1/chat/completions", body, {"X-Session-ID": f"{one.uid}/{one.rep}"}


FORMS: dict[str, Callable[[Trajectory], Request]] = {
    "SkyRL": skyrl,
    "TRL, asynchronous": trl,
    "verifiers": verifiers,
}


@dataclass
class Rounds:
    """All rounds of one form, shaped or not.

    ``first``, ``later``: median seconds of first and of later turns, by round. ``groups``: that the server made.
    """

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    groups: float = 0
    expected: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.turns", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="of each kind (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="with 8 trajectories each (default: %(default)s)")
    options = parser.parse_args(argv)
    load = os.getloadavg()
    with serving(DARTS, Path("out/turns/server.log"), *FLAGS) as server:
        results = asyncio.run(measure(server, options.rounds, options.prompts))
    print(report(results, load, os.getloadavg()))
    return 0


async def measure(server: Server, rounds: int, prompts: int) -> dict[str, tuple[Rounds, Rounds]]:
    """Return the unshaped and the shaped rounds of each form."""
    rng, results = Random(3), {name: (Rounds(), Rounds()) for name in FORMS}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for number in range(-1, rounds):
            for name, pair in results.items():
                kinds = (0, 1) if number % 2 else (1, 0)
                for kind in kinds:
                    warm_up = Rounds()
                    name_of_round = f"{name}-{number}-{kind}".replace(" ", "")
                    into = pair[kind] if number >= 0 else warm_up
                    await run_round(server, client, name, name_of_round, into, rng, prompts, is_shaped=kind == 1)
    return results


async def run_round(
    server: Server,
    client: httpx.AsyncClient,
    form: str,
    name: str,
    into: Rounds,
    rng: Random,
    prompts: int,
    *,
    is_shaped: bool,
) -> None:
    before = server.metric("darts_groups_total")
    trajectories = []
    for number in range(prompts):
        text = sample_problem(rng).prompt
        tokenized = await client.post("/tokenize", json={"model": "tiny", "prompt": text})
        tokens, messages = tokenized.json()["tokens"], [{"role": "user", "content": text}]
        trajectories += [Trajectory(f"{name}-{number}", rep, [*tokens], [*messages]) for rep in range(GROUP_SIZE)]
    waits = [[rng.random() * ENVIRONMENT_SECONDS for _ in range(TURNS)] for _ in trajectories]
    headers = {} if is_shaped else {"X-Darts-Policy": "off"}
    pairs = zip(trajectories, waits, strict=True)
    await asyncio.gather(*(run_trajectory(client, FORMS[form], one, wait, headers) for one, wait in pairs))
    into.first.append(statistics.median(one.seconds[0] for one in trajectories))
    into.later.append(statistics.median(seconds for one in trajectories for seconds in one.seconds[1:]))
    into.groups += server.metric("darts_groups_total") - before
    into.expected += prompts if is_shaped else 0


async def run_trajectory(
    client: httpx.AsyncClient,
    make_request: Callable[[Trajectory], Request],
    one: Trajectory,
    waits: Sequence[float],
    headers: dict[str, str],
) -> None:
    for wait in waits:
        path, body, more = make_request(one)
        start = time.perf_counter()
        response = await client.post(path, json=body, headers=headers | more)
        one.seconds.append(time.perf_counter() - start)
        response.raise_for_status()
        [choice] = response.json()["choices"]
        one.token_ids += [*choice["token_ids"], *OBSERVATION]
        content = choice["message"]["content"] if "message" in choice else ""
        one.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "3b+4a*2>"}]
        await asyncio.sleep(wait)


def report(results: dict[str, tuple[Rounds, Rounds]], before: Sequence[float], after: Sequence[float]) -> str:
    """Format the table. Ratios are those of neighbouring rounds: their median, with the middle half in brackets."""
    lines = [
        "| requests of | turn 1, p50, ms: off, shaped | turns 2 to 4, p50, ms: off, shaped | shaped / off | groups |",
        "|---|---|---|---|---|",
    ]
    for name, (off, shaped) in results.items():
        first, later = (
            ", ".join(f"{1000 * statistics.median(values):.0f}" for values in pair)
            for pair in ((off.first, shaped.first), (off.later, shaped.later))
        )
        ratios = [s / o for o, s in zip(off.later, shaped.later, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        groups = f"{shaped.groups:.0f} of {shaped.expected}"
        lines.append(f"| {name} | {first} | {later} | {middle:.2f} [{low:.2f}, {high:.2f}] | {groups} |")
    return "\n".join([*lines, "", f"Load of the machine: {before[0]:.1f} before, {after[0]:.1f} at the end."])


if __name__ == "__main__":
    sys.exit(main())
