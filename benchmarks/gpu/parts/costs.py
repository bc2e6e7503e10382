"""What our code costs: throughput with nothing shaped, CPU time of the API process, aborting, and peeking."""

import asyncio
import time
from collections.abc import Sequence
from statistics import median

from benchmarks.gpu.bench import Bench, all_of, cpu_seconds
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.parts.full import Full
from benchmarks.gpu.policies import SHAPED, SIZE
from benchmarks.gpu.records import Records
from benchmarks.gpu.tables import Table
from darts_server.types import FinishReason

TITLE = "Cost of shaping"
MARGIN, EXTRA_SECONDS = 1.5, 0.5
"""What a load may take beyond its decode steps."""
FULL_STEPS = 150
"""Steps in which the engine is filled and a few sequences are stopped."""


def table() -> Table:
    return Table(TITLE, {"measured": "", "value": ".4g", "unit": "", "smallest": ".4g", "largest": ".4g"})


async def measure(bench: Bench, budget: Budget, result: Table) -> None:
    """One load after the other; a load that does not fit the time is left out."""
    rounds = bench.sizes.rounds
    for name, needs, part in (
        ("throughput", 2 * rounds * load_seconds(bench), throughput),
        ("aborts and peeks", full_seconds(bench), full),
        ("CPU time", 4 * load_seconds(bench), processor),
    ):
        if budget.fits(needs):
            await part(bench, result, budget)
        else:
            result.note(f"Left out for want of time: {name}, which needs about {needs:.0f} s.")


def put(result: Table, measured: str, values: Sequence[float], unit: str) -> None:
    """A row: the median, and the range if there is more than one."""
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
    """The same requests for n trajectories through vLLM's ``generate()`` and through ours, taking turns."""
    sizes = bench.sizes
    params = bench.params(sizes.load_tokens, SIZE)
    tokens = sizes.load_prompts * SIZE * sizes.load_tokens
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * sizes.rounds):
        plain = number % 2 == number // 2 % 2  # which one comes first changes
        await bench.quiet()
        bench.shape_nothing(plain=plain)
        began = time.perf_counter()
        asked = (bench.ask(i, params, f"load-{number}-{i}", plain=plain) for i in range(sizes.load_prompts))
        await all_of(asked, budget.left)
        rates[plain].append(tokens / (time.perf_counter() - began))
    put(result, "throughput, plain AsyncLLM", rates[True], "tokens/s")
    put(result, "throughput, nothing shaped", rates[False], "tokens/s")
    ratios = [ours / plain for ours, plain in zip(rates[False], rates[True], strict=True)]
    put(result, "nothing shaped / plain", ratios, "ratio")


async def processor(bench: Bench, result: Table, budget: Budget) -> None:
    """CPU time of this process for each generated token: without log-probs and with the sampled token's."""
    asked_for = bench.logprobs
    for bench.logprobs in (False, True):
        what = ", with log-probs" if bench.logprobs else ""
        for name, load in (("raw", raw), ("shaped", shaped)):
            await bench.quiet()
            began = cpu_seconds()
            tokens = await load(bench, f"{name}-{bench.logprobs}", budget.left)
            used = 1e6 * (cpu_seconds() - began) / tokens
            put(result, f"API process, CPU time a token, {name}{what}", [used], "us")
    bench.logprobs = asked_for


async def raw(bench: Bench, name: str, limit: float) -> int:
    """The load, nothing shaped; tokens generated."""
    bench.shape_nothing()
    sizes = bench.sizes
    params = bench.params(sizes.load_tokens, SIZE)
    await all_of((bench.ask(i, params, f"{name}-{i}") for i in range(sizes.load_prompts)), limit)
    return sizes.load_prompts * SIZE * sizes.load_tokens


async def shaped(bench: Bench, name: str, limit: float) -> int:
    """The load as groups that are watched and stopped, its lengths from half to one and a half; tokens generated."""
    sizes, policy, records = bench.sizes, SHAPED["uniform"], Records()
    count = policy.candidates(SIZE)

    def length(_: str, index: int) -> tuple[int, FinishReason]:
        return max(1, sizes.load_tokens * (count + 2 * index) // (2 * count)), FinishReason.STOP

    bench.shape_with({"uniform": policy}, bench.empty_store(), length, [records])
    params = bench.params(2 * sizes.load_tokens, SIZE, darts_policy="uniform")
    await all_of((bench.ask(i, params, f"{name}-{i}") for i in range(sizes.load_prompts)), limit)
    return records.generated


async def full(bench: Bench, result: Table, budget: Budget) -> None:
    """Peeks and aborts while the engine runs as many sequences as it takes."""
    await bench.quiet()
    engine, sequences = Full(bench), f"{bench.sizes.capacity:,} sequences"
    try:
        async with asyncio.timeout(budget.left):
            await engine.fill()
            peeks = await engine.peeks()
            put(result, f"one look at {sequences} in {engine.groups} groups", [1e6 * s for s in peeks], "us")
            seconds, steps = await engine.aborts(bench.sizes.aborts)
            put(result, f"abort to a waiting request's first token, {sequences}", [1e3 * s for s in seconds], "ms")
            put(result, "the same", steps, "steps")
    finally:
        engine.empty()
        bench.shape_nothing()


# --- what they take ---------------------------------------------------------


def load_seconds(bench: Bench) -> float:
    """Of one load, about."""
    sizes = bench.sizes
    if bench.curve is None:
        return EXTRA_SECONDS
    return EXTRA_SECONDS + MARGIN * sizes.load_tokens * bench.curve.step_seconds(sizes.load_prompts * SIZE)


def full_seconds(bench: Bench) -> float:
    step = 0.0 if bench.curve is None else bench.curve.step_seconds(bench.sizes.capacity)
    return EXTRA_SECONDS + MARGIN * FULL_STEPS * step
