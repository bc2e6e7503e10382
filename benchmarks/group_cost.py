"""Measure what a group costs by its size: time per event in the state machine, and a large request on a server.

    python -m benchmarks.group_cost
    python -m benchmarks.group_cost --server

The first part replays groups of all sizes under every policy, with lengths like those of a reasoning model, and fits
cost per event to a power of n: near 0 the whole group costs n log n, at 1 it costs n². Progress is polled every ten
steps. The second part sends one request for n trajectories to a server with the tiny model, unshaped and shaped in
turns, and asks ``/health`` all the while. ``uniform`` runs with as many candidates as ``off``, and with its default.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np

from benchmarks.tables import markdown
from darts_server.group.events import DeadlineSet, Event, Finished, Progress, Started
from darts_server.group.group import Group
from darts_server.offline.demo.server import DARTS, Server, serving
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.types import FinishReason

SIZES = (64, 256, 1024)
POLL_STEPS = 10
MEDIAN_LENGTH, LENGTH_SPREAD = 400, 0.8
"""Of a log-normal distribution, in tokens and as a standard deviation of logarithms."""
QUANTILE = 0.9
"""Of all lengths: where the deadline is."""

POLICIES: Mapping[str, Shaping] = {
    "uniform": Shaping(),
    "uniform, half of it the tail": Shaping(),
    "uniform, longest tail": Shaping(tail=Tail.LONGEST),
    "no tail (saturated)": Shaping(num_longest=0),
    "darts_cut": Shaping(deadline=Deadline()),
    "arrol": Shaping(sample_survivors=True),
}

PROMPT = "11+1="
MODELS = {"off": "tiny:raw", "uniform": "tiny"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.group_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts (default: %(default)s)")
    parser.add_argument("--server", action="store_true", help="measure requests to a server instead")
    options = parser.parse_args(argv)
    print((measure_server if options.server else measure_groups)(options.rounds))
    return 0


# --- the state machine ------------------------------------------------------


def measure_groups(rounds: int) -> str:
    rows = []
    for policy in POLICIES:
        fits = []
        for early in (False, True):
            costs = [min(cost_per_event(policy, size, early, seed) for seed in range(rounds)) * 1e6 for size in SIZES]
            slope, _ = np.polyfit(np.log(SIZES), np.log(costs), 1)
            fits.append((costs, slope))
            print(f"{policy}, early {early}: {costs}", file=sys.stderr)
        (costs, exponent), (_, early_exponent) = fits
        rows.append([policy, *(f"{cost:.1f}" for cost in costs), f"{exponent:+.2f}", f"{early_exponent:+.2f}"])
    head = ["policy", *(f"n = {size:,}" for size in SIZES), "exponent", "streamed"]
    return f"Microseconds per event:\n\n{markdown(head, rows)}"


def cost_per_event(policy: str, size: int, early: bool, seed: int) -> float:
    """Run one group to its end; return seconds per event, all decisions and polls included."""
    shaping = POLICIES[policy]
    rule = shaping.selection_rule(size, shaping.is_saturated(size, shaping.candidates(size)))
    if policy == "uniform, half of it the tail":
        rule = Shaping(num_longest=size // 2).selection_rule(size)
    rng = np.random.default_rng(seed)
    lengths = np.ceil(rng.lognormal(np.log(MEDIAN_LENGTH), LENGTH_SPREAD, shaping.candidates(size))).astype(int)
    by_length = deque(sorted((int(tokens), index) for index, tokens in enumerate(lengths)))
    deadline = DeadlineSet(int(np.quantile(lengths, QUANTILE)))
    group = Group(rng=rng, deliver_early=early)
    start, count, step = time.process_time(), len(lengths), 0
    group.open(rule, len(lengths))
    for index in range(len(lengths)):
        group.handle(Started(index))
    while group.outcome is None:
        step += POLL_STEPS
        if step == size // POLL_STEPS * POLL_STEPS:
            group.handle(deadline)
        while by_length and by_length[0][0] <= step:
            tokens, index = by_length.popleft()
            if group.candidates[index].is_running:
                group.handle(Finished(index, tokens, FinishReason.STOP))
                count += 1
        due: list[Event] = [Progress(index, step) for index, tokens in group.check_at.items() if tokens <= step]
        count += len(due)
        group.handle(*due)
    return (time.process_time() - start) / count


# --- a server ---------------------------------------------------------------

REDUNDANCIES = (1.0, 1.5)
"""1 is what shaping itself costs: as many candidates as `off` has. 1.5 is the default."""
REQUESTS: Sequence[Mapping[str, int]] = (
    {"n": 512, "max_tokens": 40, "seed": 0},
    {"n": 1024, "max_tokens": 1, "seed": 0},
)


def measure_server(rounds: int) -> str:
    rows = []
    for redundancy in REDUNDANCIES:
        with serving(DARTS, Path("out/group_cost/server.log"), "--redundancy", str(redundancy)) as server:
            for request in REQUESTS:
                seconds: dict[str, list[float]] = {name: [] for name in MODELS}
                stalls: dict[str, list[float]] = {name: [] for name in MODELS}
                for number in range(rounds + 1):
                    for name, model in MODELS.items():
                        request_seconds, slowest_health = asyncio.run(send(server, model, request))
                        if number:  # the first round is a warm-up
                            seconds[name].append(request_seconds)
                            stalls[name].append(slowest_health * 1e3)
                ratios = [shaped / off for off, shaped in zip(*seconds.values(), strict=True)]
                rows.append(
                    [
                        f"n = {request['n']:,}, {request['max_tokens']} token{'s' * (request['max_tokens'] > 1)}",
                        f"{request['n'] * redundancy:,.0f}",
                        *(f"{statistics.median(values):.2f}" for values in seconds.values()),
                        f"{statistics.median(ratios):.2f}",
                        ", ".join(f"{statistics.median(values):.0f}" for values in stalls.values()),
                    ]
                )
    head = ["request", "candidates", "off (s)", "uniform (s)", "uniform / off"]
    return markdown([*head, "slowest /health, off and uniform (ms)"], rows)


async def send(server: Server, model: str, request: Mapping[str, int]) -> tuple[float, float]:
    """Send one request; return its seconds, and those of the slowest ``/health`` meanwhile."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        slowest_health = 0.0

        async def poll_health() -> None:
            nonlocal slowest_health
            while True:
                start = time.perf_counter()
                await client.get("/health")
                slowest_health = max(slowest_health, time.perf_counter() - start)
                await asyncio.sleep(0.005)

        polling = asyncio.create_task(poll_health())
        start = time.perf_counter()
        answer = await client.post("/v1/completions", json={"model": model, "prompt": PROMPT, **request})
        seconds = time.perf_counter() - start
        polling.cancel()
    answer.raise_for_status()
    return seconds, slowest_health


if __name__ == "__main__":
    sys.exit(main())
