"""Measure training steps, one after the other: prompts that a step does not decide go on in the next, or start again.

The weights stay the same, and nothing is trained in between.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.bench import LIMITS, Bench
from benchmarks.gpu.plan import SHAPED, SIZE, Budget
from benchmarks.gpu.results import Table
from benchmarks.gpu.traces import CANDIDATES, Prompt, Trace
from darts_server.estimates.latency import LatencyCurve
from darts_server.policy.auto import AutoLimits
from darts_server.records import GroupRecord
from darts_server.rollout.batches.batch import BatchRequest, prepare_batch
from darts_server.rollout.batches.carried import CarriedPrompts, Carry, CarryLimits
from darts_server.rollout.batches.run import AnswerFormat, BatchRun
from darts_server.rollout.plan import Planner
from darts_server.types import AUTO, OFF, FinishReason, PromptSpec
from darts_server.vllm.requests.prompt_request import PromptRequest

STEPS, SETTLED = 12, 6
"""Steps of each method, and those at its beginning that are not counted: prompts wait first, and `auto` learns."""
STALENESS = 4
"""Steps for which tokens are kept, as by default."""
MARGIN = 1.15
"""Time of a step beyond the prediction."""
FEWEST = 6
"""Methods that lengths are divided for; the others get the remaining time."""


@dataclass(frozen=True)
class Method:
    """``start``: prompts that run at once over those whose groups are returned."""

    policy: str = OFF
    start: float = 1.0
    carry: Carry = Carry.DROP


METHODS = {
    "off": Method(),
    "auto": Method(AUTO),
    "resume": Method(OFF, 1.5, Carry.RESUME),
    "auto, resume": Method(AUTO, 1.5, Carry.RESUME),
    "cap, resume": Method("cap", 1.5, Carry.RESUME),
    "uniform": Method("uniform"),
    "tail batching": Method(OFF, 1.5, Carry.RESTART),
}


def table(prompts: int) -> Table:
    columns = {
        "method": "",
        "s a step": ".2f",
        "error": ".2f",
        "ratio to off": ".3f",
        "predicted, s": ".2f",
        "generated": ",d",
        "returned": ",d",
        "mean length": ".1f",
        "p95": ",.0f",
        "longest": ",d",
    }
    return Table(f"Training steps of {prompts} groups, one after the other", columns)


@dataclass
class Lengths:
    """Lengths of a trace; a prompt that starts again has others. Prompt numbers beyond the trace begin it again."""

    trace: Trace
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Of prompts, by their tokens."""
    started: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Of each prompt the request that started it last, and how often it was started before."""

    def __call__(self, request: PromptRequest, index: int, resumed: bool) -> tuple[int, FinishReason]:
        number = self.numbers[tuple(request.prompt["prompt_token_ids"])]
        last, times = self.started.get(number, (request.request_id, 0))
        if not resumed and last != request.request_id:
            times += 1
        self.started[number] = (last if resumed else request.request_id, times)
        tokens = lengths_of(self.trace, number, times).length(index)
        return tokens, self.trace.reason(tokens)


@cache
def lengths_of(trace: Trace, number: int, times: int) -> Prompt:
    """Return the lengths of a prompt that was started so many times before."""
    prompt = trace.prompts[number % len(trace.prompts)]
    if times == 0:
        return prompt
    drawn = np.random.default_rng((number, times)).choice(prompt.lengths, CANDIDATES)
    return Prompt(tuple(drawn.tolist()), prompt.earlier)


async def measure(bench: Bench, budget: Budget, result: Table, trace: Trace, prompts: int) -> None:
    """Run the methods one after the other, as many as fit."""
    assert bench.curve is not None, "step times are unknown, so it is unknown what fits the time"
    for divisor in bench.sizes.divisors:
        short = trace.shortened(divisor)
        predicted = {name: predict(method, short, prompts, bench.curve) for name, method in METHODS.items()}
        if budget.fits(MARGIN * sum(map(sum, [*predicted.values()][:FEWEST]))):
            break
    result.note(
        f"{trace.source}, all divided by {divisor}: lengths of up to {short.cap:,} tokens, mean "
        f"{np.mean([p.lengths[:SIZE] for p in short.prompts]):.1f}. {STEPS} steps of {prompts} groups, the first "
        f"{SETTLED} not counted; where prompts are carried over, half as many again run at once. Predicted from the "
        "step times and lengths alone; under `uniform` and `cap` as if they did what `off` does. Each step counts as "
        "one of new weights, and groups that end together with the last one needed are for the next."
    )
    for name, method in METHODS.items():
        needs = MARGIN * sum(predicted[name])
        if not budget.fits(needs):
            result.note(f"`{name}` was left out: it needs about {needs:.0f} s, and {budget.remaining:.0f} s remain.")
            continue
        seconds, records = await run(bench, method, short, prompts, budget.remaining)
        kept = [candidate.tokens for record in records for candidate in record.selected]
        counted = seconds[SETTLED:]
        mean = float(np.mean(counted))
        off = mean if name == OFF else float(result.rows[0]["s a step"] or 0.0)
        result.add(
            method=name,
            s_a_step=mean,
            error=float(np.std(counted, ddof=1) / len(counted) ** 0.5),
            ratio_to_off=mean / off,
            **{"predicted,_s": float(np.mean(predicted[name][SETTLED:]))},
            generated=sum(record.generated_tokens for record in records),
            returned=sum(kept),
            mean_length=float(np.mean(kept)),
            p95=float(np.percentile(kept, 95)),
            longest=max(kept),
        )


async def run(
    bench: Bench, method: Method, trace: Trace, prompts: int, limit: float
) -> tuple[list[float], list[GroupRecord]]:
    """Return the seconds of each step, and the records of the groups that the counted steps returned."""
    await bench.drain()
    planner = Planner(SHAPED, method.policy, LIMITS, AutoLimits())
    lengths = Lengths(trace)
    rollouts = bench.shape_with(SHAPED, bench.empty_store(), lengths, [])
    assert bench.traced is not None
    kept, started, spare = CarriedPrompts(CarryLimits(staleness=STALENESS)), 0, 0
    seconds, records = list[float](), list[GroupRecord]()
    async with asyncio.timeout(limit):
        for step in range(STEPS):
            bench.traced.newer_weights = step
            begin = time.perf_counter()
            if spare >= prompts:
                spare -= prompts
                seconds.append(0.0)
                continue
            new = range(started, started + round(method.start * prompts) - kept.count(None) - spare)
            started = new.stop
            texts = [bench.prompt(number)["prompt_token_ids"] for number in new]
            lengths.numbers |= zip(map(tuple, texts), new, strict=True)
            batch = BatchRequest(
                [PromptSpec(token_ids=text) for text in texts],
                SIZE,
                {"max_tokens": trace.cap, "ignore_eos": True, "temperature": 1.0},
                num_groups=None if method.carry is Carry.DROP else prompts - spare,
                carry=method.carry,
                carried=method.carry is not Carry.DROP,
            )
            prepared = await prepare_batch(batch, rollouts, bench.renderer, lambda _: planner, kept)
            run = BatchRun(
                prepared, rollouts, bench.renderer, kept, AnswerFormat(), on_idle=lambda batch: batch.cancel("too late")
            )
            with run.listen():
                done = await run.wait()
            for group in done.results:
                if group.error is not None:
                    raise group.error
                spare += 1
                if step >= SETTLED and group.record is not None:
                    records.append(group.record)
            spare -= prompts
            seconds.append(time.perf_counter() - begin)
    return seconds, records


def predict(method: Method, trace: Trace, prompts: int, curve: LatencyCurve) -> list[float]:
    """Predict the seconds of each step by the paper's cost model: nothing but lengths and step times, nothing cut."""
    seconds, started, spare = [], 0, 0
    running: dict[int, NDArray[np.int64]] = {}  # the tokens that are left, by prompt
    times: Mapping[int, int] = {}

    def start(number: int) -> NDArray[np.int64]:
        return np.asarray(lengths_of(trace, number, times.get(number, 0)).lengths[:SIZE])

    for _ in range(STEPS):
        if spare >= prompts:
            spare -= prompts
            seconds.append(0.0)
            continue
        for number in range(started, started + round(method.start * prompts) - len(running) - spare):
            running[number], started = start(number), number + 1
        ends = {number: int(left.max()) for number, left in running.items()}
        end = sorted(ends.values())[prompts - spare - 1]
        each: Sequence[int] = np.minimum(np.concatenate(list(running.values())), end).tolist()
        seconds.append(float(max(curve.completion_seconds(each))))
        undecided = [number for number in ends if ends[number] > end]
        spare += len(ends) - len(undecided) - prompts
        times = {number: times.get(number, 0) + 1 for number in undecided}
        keeps = method.carry is Carry.RESUME
        running = {n: np.maximum(running[n] - end, 0) if keeps else start(n) for n in undecided}
    return seconds
