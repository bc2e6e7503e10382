"""Measure PTL(b), the seconds of a decode step by batch size, against the bound of the card's bandwidth."""

import time
from itertools import accumulate, pairwise
from statistics import median

from benchmarks.gpu.bench import Bench, gather_within
from benchmarks.gpu.plan import Budget
from benchmarks.gpu.results import Table, Value
from darts_server.estimates.latency import LatencyCurve

GROWTH = 2.2
"""How much longer a batch twice as large may take; its prompts grow more than its steps."""
PREFILL_SECONDS = 4e-15
"""Of a byte of weights and a token of a prompt, at a quarter of what a large card reaches."""
ALWAYS_UP_TO = 512
"""Batches up to this size are always measured, larger ones only if rollouts need them."""
FIRST_SECONDS = 3.0
"""Time for the first batch, which is also the first load of all."""


def table() -> Table:
    columns = {
        "sequences": ",d",
        "tokens of each": ",.0f",
        "step, ms": ".3f",
        "bound, ms": ".3f",
        "step / bound": ".2f",
        "tokens/s": ",.0f",
        "steps": ",d",
    }
    return Table("Seconds of a decode step (PTL)", columns)


async def measure(bench: Bench, budget: Budget, result: Table, bandwidth: float, sequences: int) -> None:
    """Time one batch size after the other, each with prompts of its own, up to the ``sequences`` of a rollout."""
    sizes = bench.sizes
    context = sizes.prompt + sizes.step_tokens / 2
    result.note(
        f"Median of the steps in which exactly so many sequences decoded. "
        f"The bound is the time to read the weights ({bench.shape.step_bytes(0, 0) / 1e9:.3g} GB) and the sequences' "
        f"KV cache ({bench.shape.kv_bytes / 1e3:.3g} kB a token) once, at the {bandwidth / 1e12:.3g} TB/s that this "
        "card copies with (read and written bytes)."
    )
    bench.shape_nothing()
    points: list[tuple[int, float]] = []
    took = FIRST_SECONDS / GROWTH
    for batch in (b for b in sizes.batches if b <= max(sequences, ALWAYS_UP_TO)):
        if not budget.fits(took * GROWTH):
            result.note(f"Left out for lack of time: {batch} sequences and more.")
            break
        seconds, steps, took = await time_batch(bench, batch, budget.remaining)
        if seconds is None:
            result.note(
                f"In no step exactly {batch} sequences decoded: their prefill took longer than their decoding, or "
                "they do not fit into the KV cache together."
            )
            break
        points.append((batch, seconds))
        bench.curve = make_curve(points)
        result.rows.append(row(bench, batch, context, seconds, steps, bandwidth))
    for batch, prompt in sizes.contexts:
        if budget.fits(PREFILL_SECONDS * batch * prompt * bench.shape.weight_bytes):
            seconds, steps, _ = await time_batch(bench, batch, budget.remaining, prompt)
            if seconds is not None:
                result.rows.append(row(bench, batch, prompt + sizes.step_tokens / 2, seconds, steps, bandwidth))


def row(bench: Bench, batch: int, context: float, seconds: float, steps: int, bandwidth: float) -> dict[str, Value]:
    bound = bench.shape.step_bytes(batch, context) / bandwidth
    return {
        "sequences": batch,
        "tokens of each": context,
        "step, ms": 1e3 * seconds,
        "bound, ms": 1e3 * bound,
        "step / bound": seconds / bound,
        "tokens/s": batch / seconds,
        "steps": steps,
    }


async def time_batch(
    bench: Bench, batch: int, limit: float, prompt: int | None = None
) -> tuple[float | None, int, float]:
    """Return the median step of a batch, the number of its steps, and the seconds of the whole load."""
    start = time.perf_counter()
    await bench.drain()
    params = bench.params(bench.sizes.step_tokens)
    requests = (bench.request(i, params, f"steps-{batch}-{prompt}-{i}", length=prompt) for i in range(batch))
    await gather_within(requests, limit)
    end = time.perf_counter()
    seconds = [each for _, running, each in bench.steps_between(start, end) if running == batch]
    return median(seconds) if seconds else None, len(seconds), end - start


def make_curve(points: list[tuple[int, float]]) -> LatencyCurve:
    """Return the monotone curve through the points; beyond the last it rises as between the last two."""
    batches, times = zip(*points, strict=True)
    seconds = tuple(accumulate(times, max))
    slopes = [(t2 - t1) / (b2 - b1) for (b1, t1), (b2, t2) in pairwise(zip(batches, seconds, strict=True))]
    return LatencyCurve(batches, seconds, slopes[-1] if slopes else 0.0)
