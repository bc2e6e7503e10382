"""Measure the cost of our code: throughput with nothing shaped, CPU time of the API process, aborts, and probes."""

import asyncio
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.gpu.bench import Bench, cpu_seconds, gather_within
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.parts.full import FullEngine
from benchmarks.gpu.policies import SHAPED, SIZE
from benchmarks.gpu.records import Records
from benchmarks.gpu.tables import Table
from darts_server.engine.port import HiddenState, Probe
from darts_server.types import FinishReason
from darts_server.vllm.prompt_request import PromptRequest

TITLE = "Cost of shaping"
MARGIN, EXTRA_SECONDS = 1.5, 0.5
"""Time of a load beyond its decode steps: a factor, and seconds."""
FULL_STEPS = 150
"""Steps for filling the engine and stopping a few sequences."""


def table() -> Table:
    return Table(TITLE, {"measured": "", "value": ".4g", "unit": "", "smallest": ".4g", "largest": ".4g"})


async def measure(bench: Bench, budget: Budget, result: Table) -> None:
    """Run one load after the other; leave out those that do not fit the time."""
    rounds = bench.sizes.rounds
    for name, needs, part in (
        ("throughput", 2 * rounds * load_seconds(bench), throughput),
        ("aborts", full_seconds(bench), full_engine),
        ("CPU time", 4 * load_seconds(bench), cpu_time),
        ("probes", 2 * rounds * load_seconds(bench), probes),
    ):
        if budget.fits(needs):
            await part(bench, result, budget)
        else:
            result.note(f"Left out for lack of time: {name}, which needs about {needs:.0f} s.")


def add_row(result: Table, measured: str, values: Sequence[float], unit: str) -> None:
    """Add a row: the median, and the range if there are several values."""
    several = len(values) > 1
    result.add(
        measured=measured,
        value=median(values),
        unit=unit,
        smallest=min(values) if several else None,
        largest=max(values) if several else None,
    )


# --- loads ------------------------------------------------------------------


async def throughput(bench: Bench, result: Table, budget: Budget) -> None:
    """Send the same requests for n trajectories through vLLM's ``generate()`` and through ours, in turns."""
    sizes = bench.sizes
    params = bench.params(sizes.load_tokens, SIZE)
    tokens = sizes.load_prompts * SIZE * sizes.load_tokens
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * sizes.rounds):
        plain = number % 2 == number // 2 % 2  # which one comes first changes
        await bench.drain()
        bench.shape_nothing(plain=plain)
        start = time.perf_counter()
        requests = (bench.request(i, params, f"load-{number}-{i}", plain=plain) for i in range(sizes.load_prompts))
        await gather_within(requests, budget.remaining)
        rates[plain].append(tokens / (time.perf_counter() - start))
    add_row(result, "throughput, plain AsyncLLM", rates[True], "tokens/s")
    add_row(result, "throughput, nothing shaped", rates[False], "tokens/s")
    ratios = [ours / plain for ours, plain in zip(rates[False], rates[True], strict=True)]
    add_row(result, "nothing shaped / plain", ratios, "ratio")


async def cpu_time(bench: Bench, result: Table, budget: Budget) -> None:
    """Measure the CPU time of this process per generated token, with and without the sampled token's log-prob."""
    configured = bench.logprobs
    for bench.logprobs in (False, True):
        suffix = ", with log-probs" if bench.logprobs else ""
        for name, load in (("raw", raw), ("shaped", shaped)):
            await bench.drain()
            start = cpu_seconds()
            tokens = await load(bench, f"{name}-{bench.logprobs}", budget.remaining)
            used = 1e6 * (cpu_seconds() - start) / tokens
            add_row(result, f"API process, CPU time a token, {name}{suffix}", [used], "us")
    bench.logprobs = configured


async def raw(bench: Bench, name: str, limit: float) -> int:
    """Run the load unshaped; return the generated tokens."""
    bench.shape_nothing()
    sizes = bench.sizes
    params = bench.params(sizes.load_tokens, SIZE)
    await gather_within((bench.request(i, params, f"{name}-{i}") for i in range(sizes.load_prompts)), limit)
    return sizes.load_prompts * SIZE * sizes.load_tokens


async def shaped(bench: Bench, name: str, limit: float) -> int:
    """Run the load shaped, with lengths from 0.5 to 1.5 times the load's; return the generated tokens."""
    sizes, policy, records = bench.sizes, SHAPED["uniform"], Records()
    count = policy.candidates(SIZE)

    def length(_: PromptRequest, index: int, resumed: bool) -> tuple[int, FinishReason]:
        return max(1, sizes.load_tokens * (count + 2 * index) // (2 * count)), FinishReason.STOP

    bench.shape_with({"uniform": policy}, bench.empty_store(), length, records.groups)
    params = bench.params(2 * sizes.load_tokens, SIZE, darts_policy="uniform")
    await gather_within((bench.request(i, params, f"{name}-{i}") for i in range(sizes.load_prompts)), limit)
    return records.generated


async def full_engine(bench: Bench, result: Table, budget: Budget) -> None:
    """Measure aborts while the engine runs as many sequences as it can."""
    await bench.drain()
    engine, sequences = FullEngine(bench), f"{bench.sizes.capacity:,} sequences"
    try:
        async with asyncio.timeout(budget.remaining):
            await engine.fill()
            seconds, steps = await engine.time_aborts(bench.sizes.aborts)
            add_row(result, f"abort to a waiting request's first token, {sequences}", [1e3 * s for s in seconds], "ms")
            add_row(result, "the same", steps, "steps")
    finally:
        engine.empty()
        bench.shape_nothing()


async def probes(bench: Bench, result: Table, budget: Budget) -> None:
    """Run candidates with and without a probe that takes a hidden state and log-probs, in turns."""
    if bench.port.probe_width is None:
        result.note("Left out: probes, which do not work with this engine.")
        return
    sizes, states, times = bench.sizes, list[HiddenState](), dict[bool, list[float]]({True: [], False: []})
    bench.shape_nothing()

    async def run(number: int, name: str, probe: Probe | None) -> None:
        request = PromptRequest(bench.prompt(number % sizes.load_prompts), bench.params(sizes.load_tokens), name)
        await (await bench.port.start(request, 0, probe)).result()

    for number in range(2 * sizes.rounds):
        probed = number % 2 == number // 2 % 2
        await bench.drain()
        probe = Probe((sizes.load_tokens // 2,), states.append, logprobs=True) if probed else None
        start = time.perf_counter()
        async with asyncio.timeout(budget.remaining):
            count = sizes.load_prompts * SIZE
            await asyncio.gather(*(run(i, f"probes-{number}-{i}", probe) for i in range(count)))
        times[probed].append(time.perf_counter() - start)
    add_row(result, "time of probed candidates / of others", [a / b for a, b in zip(*times.values(), strict=True)], "")
    add_row(result, "hidden states received of each probed candidate", [len(states) / (count * sizes.rounds)], "")


# --- estimates --------------------------------------------------------------


def load_seconds(bench: Bench) -> float:
    """Estimate the time of one load."""
    sizes = bench.sizes
    if bench.curve is None:
        return EXTRA_SECONDS
    return EXTRA_SECONDS + MARGIN * sizes.load_tokens * bench.curve.step_seconds(sizes.load_prompts * SIZE)


def full_seconds(bench: Bench) -> float:
    step = 0.0 if bench.curve is None else bench.curve.step_seconds(bench.sizes.capacity)
    return EXTRA_SECONDS + MARGIN * FULL_STEPS * step
