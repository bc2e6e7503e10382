"""PTL(b): seconds of a decode step by batch size, against the bound that the card's bandwidth sets."""

import time
from itertools import pairwise

from benchmarks.gpu.bench import Bench, all_of
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.steplog import monotone
from benchmarks.gpu.tables import Table
from darts_server.policy.latency.curve import LatencyCurve

TITLE = "Seconds of a decode step (PTL)"
GROWTH = 2.2
"""How much longer a batch twice as large may take: its prompts more than its steps."""
USUAL = 512
"""The curve goes up to this batch; beyond it only to foretell rollouts that are larger."""
FIRST_SECONDS = 3.0
"""What the first batch may take; it is also the first that runs at all."""


def table() -> Table:
    columns = {
        "sequences": ",d",
        "step, ms": ".3f",
        "bound, ms": ".3f",
        "step / bound": ".2f",
        "tokens/s": ",.0f",
        "steps seen": ",d",
    }
    return Table(TITLE, columns)


async def measure(bench: Bench, budget: Budget, result: Table, bandwidth: float, most: int) -> None:
    """One batch after the other, each with prompts of its own; larger ones only if ``most`` sequences will run."""
    sizes = bench.sizes
    context = sizes.prompt + sizes.step_tokens / 2
    result.note(
        f"Median of the steps in which exactly so many sequences decoded, {context:.0f} tokens each on the average. "
        f"The bound is the time to read the weights ({bench.shape.step_bytes(0, 0) / 1e9:.3g} GB) and the sequences' "
        f"KV cache ({bench.shape.kv_bytes / 1e3:.3g} kB a token) once, at the {bandwidth / 1e12:.3g} TB/s that this "
        "card copies with (read and written bytes)."
    )
    bench.shape_nothing()
    points: list[tuple[int, float]] = []
    took = FIRST_SECONDS / GROWTH
    for batch in (b for b in sizes.batches if b <= max(most, USUAL)):
        if not budget.fits(took * GROWTH):
            result.note(f"Left out for want of time: {batch} sequences and more.")
            break
        seconds, steps, took = await timed(bench, batch, budget.left)
        if seconds is None:
            result.note(
                f"At no step exactly {batch} sequences decoded: reading their prompts took longer than they ran, or "
                "they do not fit into the KV cache together."
            )
            break
        points.append((batch, seconds))
        bench.curve = curve_of(points)
        bound = bench.shape.step_bytes(batch, context) / bandwidth
        result.rows.append(
            {
                "sequences": batch,
                "step, ms": 1e3 * seconds,
                "bound, ms": 1e3 * bound,
                "step / bound": seconds / bound,
                "tokens/s": batch / seconds,
                "steps seen": steps,
            }
        )


async def timed(bench: Bench, batch: int, limit: float) -> tuple[float | None, int, float]:
    """Median step of a batch, how many steps it is of, and the seconds that all of it took."""
    began = time.perf_counter()
    await bench.quiet()
    params = bench.params(bench.sizes.step_tokens)
    await all_of((bench.ask(i, params, f"steps-{batch}-{i}") for i in range(batch)), limit)
    ended = time.perf_counter()
    seconds, count = bench.log.between(began, ended).typical(batch)
    return seconds, count, ended - began


def curve_of(points: list[tuple[int, float]]) -> LatencyCurve:
    """The curve through the points, made monotone; beyond the last it rises as between the last two."""
    rising = monotone(points)
    slopes = [(t2 - t1) / (b2 - b1) for (b1, t1), (b2, t2) in pairwise(rising)]
    batches, seconds = zip(*rising, strict=True)
    return LatencyCurve(batches, seconds, slopes[-1] if slopes else 0.0)
