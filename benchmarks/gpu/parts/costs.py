"""Measure the cost of our code: throughput with nothing shaped, CPU time of the API process, aborts, and probes."""

import asyncio
import time
from collections.abc import Sequence
from statistics import median

from vllm.outputs import RequestOutput

from benchmarks.gpu.bench import Bench, cpu_seconds, gather_within
from benchmarks.gpu.plan import SHAPED, SIZE, Budget
from benchmarks.gpu.results import Table
from darts_server.engine.port import HiddenState, Probe, RunningCandidate
from darts_server.records import GroupRecord
from darts_server.types import FinishReason
from darts_server.vllm.requests.prompt_request import PromptRequest

MARGIN, EXTRA_SECONDS = 1.5, 0.5
"""Time of a load beyond its decode steps: a factor, and seconds."""
FULL_STEPS = 150
"""Steps for filling the engine and stopping a few sequences."""
PAUSE_SECONDS = 0.01


def table() -> Table:
    return Table("Cost of shaping", {"measured": "", "value": ".4g", "unit": "", "smallest": ".4g", "largest": ".4g"})


async def measure(bench: Bench, budget: Budget, result: Table) -> None:
    """Run one load after the other; leave out those that do not fit the time."""
    sizes = bench.sizes
    load, full = (
        EXTRA_SECONDS + (MARGIN * steps * bench.curve.step_seconds(batch) if bench.curve is not None else 0.0)
        for steps, batch in ((sizes.load_tokens, sizes.load_prompts * SIZE), (FULL_STEPS, sizes.capacity))
    )
    for name, needs, part in (
        ("throughput", 2 * sizes.rounds * load, throughput),
        ("aborts", full, full_engine),
        ("CPU time", 4 * load, cpu_time),
        ("probes", 2 * sizes.rounds * load, probes),
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
    """Measure the CPU time of this process per generated token, with and without the sampled token's log-prob.

    Raw, and shaped with lengths from 0.5 to 1.5 times the load's.
    """
    configured, sizes, policy = bench.logprobs, bench.sizes, SHAPED["uniform"]
    count = policy.candidates(SIZE)

    def length(_: PromptRequest, index: int, resumed: bool) -> tuple[int, FinishReason]:
        return max(1, sizes.load_tokens * (count + 2 * index) // (2 * count)), FinishReason.STOP

    for bench.logprobs in (False, True):
        for load in ("raw", "shaped"):
            await bench.drain()
            used, records = cpu_seconds(), list[GroupRecord]()
            if load == "raw":
                bench.shape_nothing()
                params = bench.params(sizes.load_tokens, SIZE)
            else:
                bench.shape_with({"uniform": policy}, bench.empty_store(), length, records)
                params = bench.params(2 * sizes.load_tokens, SIZE, darts_policy="uniform")
            names = (f"{load}-{bench.logprobs}-{i}" for i in range(sizes.load_prompts))
            requests = (bench.request(i, params, name) for i, name in enumerate(names))
            await gather_within(requests, budget.remaining)
            tokens = sum(record.generated_tokens for record in records) or sizes.load_prompts * SIZE * sizes.load_tokens
            measured = f"API process, CPU time a token, {load}{', with log-probs' if bench.logprobs else ''}"
            add_row(result, measured, [1e6 * (cpu_seconds() - used) / tokens], "us")
    bench.logprobs = configured


async def full_engine(bench: Bench, result: Table, budget: Budget) -> None:
    """Measure how soon the slot of an aborted sequence is reused while the engine runs as many as it can."""
    await bench.drain()
    sizes, running = bench.sizes, list[RunningCandidate[RequestOutput]]()
    params = bench.params(sizes.model_length - sizes.prompt - 1)

    async def start(number: int) -> RunningCandidate[RequestOutput]:
        return await bench.port.start(PromptRequest(bench.prompt(0), params, f"full-{number}"), 0)

    seconds, steps = [], []
    try:
        async with asyncio.timeout(budget.remaining):
            # All have the same prompt and share its cache; only the number of running sequences matters here.
            await bench.request(0, bench.params(1), "shared-prompt")
            for number in range(sizes.capacity):
                running.append(await start(number))
            while not all(candidate.count_tokens() for candidate in running):
                await asyncio.sleep(PAUSE_SECONDS)
            for number in range(sizes.aborts):
                stopped, other, waiting = running.pop(0), running[-1], await start(sizes.capacity + number)
                until = (other.count_tokens() or 0) + 3
                while (other.count_tokens() or 0) < until:
                    await asyncio.sleep(0)
                if waiting.count_tokens():
                    raise RuntimeError("the engine was not full: the request that should wait is running")
                before, begun = other.count_tokens() or 0, time.perf_counter()
                stopped.stop()
                while not waiting.count_tokens():
                    await asyncio.sleep(0)
                seconds.append(1e3 * (time.perf_counter() - begun))
                steps.append((other.count_tokens() or 0) - before)
                running.append(waiting)
        sequences = f"{sizes.capacity:,} sequences"
        add_row(result, f"abort to a waiting request's first token, {sequences}", seconds, "ms")
        add_row(result, "the same", steps, "steps")
    finally:
        for candidate in running:
            candidate.stop()
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
