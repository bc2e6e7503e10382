"""Measure whole rollouts: the same prompts and sampled lengths under each policy."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from vllm import SamplingParams

from benchmarks.gpu.bench import Bench, Step, cpu_seconds, gather_within, prompt_number
from benchmarks.gpu.plan import (
    AGAIN,
    PLAIN,
    SHAPED,
    SIZE,
    UNSHAPED,
    Budget,
    make_plan,
    order_policies,
    statistics,
)
from benchmarks.gpu.results import Table, Value
from benchmarks.gpu.traces import Trace
from darts_server.records import GroupRecord
from darts_server.rollout.learned.statistics import KIND
from darts_server.types import OFF, FinishReason
from darts_server.vllm.requests.prompt_request import PromptRequest

logger = logging.getLogger(__name__)

IDLE_BELOW = 0.25
"""The GPU counts as idle while fewer than this share of the sequences that it started with run."""
MOST_GROUPS = 0.9
"""The time of this share of the groups is shown too: a single last group may decide the time of all."""
WARM_UP_TOKENS = 8
POINTS = 400
"""Points of a timeline that are kept for the picture."""
MEASURED = (
    f"All give {SIZE} trajectories a prompt. `{PLAIN}` is vLLM's `AsyncLLM` itself, measured twice; `{OFF}` is the "
    "same through our code with nothing shaped.",
    "Candidate i of a prompt has the same length and tail draw under every policy. The prompt statistics at the start "
    "of each rollout come from an earlier sample of the same trace. Ratios are to the faster run of plain. Idle: "
    "share of the time in which fewer than a quarter of the initially running sequences ran. Predicted: from the step "
    "times above and the lengths alone, by the paper's cost model.",
)


def table(prompts: int) -> Table:
    columns = {
        "policy": "",
        "seconds": ".2f",
        "ratio to plain": ".3f",
        "predicted, s": ".2f",
        "90% complete, s": ".2f",
        "candidates a group": ".2f",
        "generated": ",d",
        "returned": ",d",
        "wasted": ",d",
        "idle": ".0%",
        "mean length": ".1f",
        "p95": ",.0f",
        "CPU us a token": ".1f",
    }
    return Table(f"Rollouts of {prompts} prompts: seconds until all groups are complete", columns)


async def measure(
    bench: Bench, budget: Budget, result: Table, trace: Trace, policies: Sequence[str], timelines: dict[str, object]
) -> None:
    """Run the policies one after the other, as many as fit."""
    if bench.curve is None:
        raise RuntimeError("step times are unknown, so it is unknown what fits the time")
    plan = make_plan(bench.curve, trace, policies, bench.sizes.divisors, bench.port.capacity, budget)
    must, may = order_policies(policies)
    small, count = plan.trace, len(plan.trace.prompts)
    divided = f", all divided by {small.divisor}" if small.divisor > 1 else ""
    fewer = f" {len(trace.prompts)} prompts did not fit the time." if count < len(trace.prompts) else ""
    size = f"{count} prompts x {SIZE}, lengths of up to {small.cap:,} tokens"
    result.note(f"{size} ({small.source}{divided}).{fewer} {MEASURED[0]}")
    result.note(MEASURED[1])

    # A short load, so that kernels are compiled before anything is timed.
    await bench.drain()
    bench.shape_nothing()
    params = bench.params(WARM_UP_TOKENS)
    requests = (bench.request(i % count, params, f"warm-up-{i}") for i in range(count * SIZE))
    await gather_within(requests, budget.remaining)

    for policy in (*must, *may):
        needs, remaining = plan.estimate(policy), budget.remaining
        if not budget.fits(needs):
            result.note(f"`{policy}` was left out: it needs about {needs:.0f} s, and {remaining:.0f} s remain.")
            continue
        limit = plan.limit(policy, bench.sizes.patience, remaining)
        try:
            outcome = await run_rollout(bench, policy, small, limit)
        except TimeoutError:
            predicted = plan.predicted[policy]
            result.fail(f"`{policy}` was stopped after {limit:.0f} s; {predicted:.0f} s were predicted.")
            continue
        except Exception as error:  # the others may still work
            logger.exception("policy %s failed", policy)
            result.fail(f"`{policy}` failed: {type(error).__name__}: {error}")
            continue
        steps = bench.steps_between(outcome.start, outcome.end)
        result.rows.append(row(bench, outcome, plan.predicted[policy], steps))
        # Relative to the faster of vLLM's own two runs, since the first run of all tends to be slower.
        times = {str(row["policy"]): float(row["seconds"] or 0.0) for row in result.rows}
        plain = min((times[name] for name in (PLAIN, AGAIN) if name in times), default=None)
        for each in result.rows:
            each["ratio to plain"] = times[str(each["policy"])] / plain if plain else None
        # Thinned out evenly, with the last one.
        every = max(1, len(steps) // POINTS)
        kept = steps[::every] + (steps[-1:] if (len(steps) - 1) % every else [])
        timelines[policy] = [(round(at - outcome.start, 4), batch) for at, batch, _ in kept]


def row(bench: Bench, outcome: "Outcome", predicted: float, steps: Sequence[Step]) -> dict[str, Value]:
    returned, seconds = sum(outcome.returned), outcome.end - outcome.start
    # The engine does not report steps with prefill; their time counts with the step after them.
    idle_below, idle, before = IDLE_BELOW * min(outcome.candidates, bench.sizes.capacity), 0.0, outcome.start
    for at, batch, _ in steps:
        idle += at - before if batch < idle_below else 0.0
        before = at
    complete = sorted(outcome.complete.values())
    return {
        "policy": outcome.policy,
        "seconds": seconds,
        "ratio to plain": None,
        "predicted, s": predicted,
        "90% complete, s": complete[min(len(complete) - 1, int(MOST_GROUPS * len(complete)))] - outcome.start,
        "candidates a group": outcome.candidates * SIZE / len(outcome.returned),
        "generated": outcome.generated,
        "returned": returned,
        "wasted": outcome.generated - returned,
        "idle": idle / seconds,
        "mean length": float(np.mean(outcome.returned)),
        "p95": float(np.percentile(outcome.returned, 95)),
        "CPU us a token": 1e6 * outcome.cpu / outcome.generated,
    }


# --- one rollout ----------------------------------------------------------------


@dataclass
class Outcome:
    """The result of a rollout. Times are of ``time.perf_counter()``; ``complete``: of each group, by prompt."""

    policy: str
    start: float = 0.0
    end: float = 0.0
    cpu: float = 0.0
    candidates: int = 0
    generated: int = 0
    returned: list[int] = field(default_factory=list)
    complete: dict[int, float] = field(default_factory=dict)


async def run_rollout(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    """Run all prompts at once on an idle engine, with lengths from the trace, until the last group is complete.

    Raises:
        TimeoutError: it took longer than ``limit`` seconds.
        AssertionError: a trajectory does not have its length.
    """
    await bench.drain()
    plain, outcome, records = policy in (PLAIN, AGAIN), Outcome(policy), list[GroupRecord]()
    requests: list[tuple[int, SamplingParams, str]] = []
    if policy in UNSHAPED:
        bench.shape_nothing(plain=plain)
        for i, prompt in enumerate(trace.prompts):
            for j, tokens in enumerate(prompt.lengths[:SIZE]):  # a request each: all choices of one have one length
                requests.append((i, bench.params(tokens), f"{policy}-{j}-{i}"))
    else:
        store = bench.empty_store()
        for i, prompt in enumerate(trace.prompts):
            store.put(KIND, f"prompt-{i}", asdict(statistics(prompt, trace)))
            params = bench.params(trace.cap, SIZE, darts_policy=policy, darts_prompt_key=f"prompt-{i}")
            requests.append((i, params, f"{policy}-{i}"))

        def length(request: PromptRequest, index: int, resumed: bool) -> tuple[int, FinishReason]:
            tokens = trace.prompts[prompt_number(request.request_id)].length(index)
            return tokens, trace.reason(tokens)

        bench.shape_with({policy: SHAPED[policy]}, store, length, records)

    async def one(prompt: int, params: SamplingParams, name: str) -> list[int]:
        output = await bench.request(prompt, params, name, plain=plain)
        outcome.complete[prompt] = time.perf_counter()  # of the last one, if a group is several requests
        return [len(choice.token_ids) for choice in output.outputs]

    for i in range(len(trace.prompts)):
        bench.prompt(i)  # rendered before the clock starts
    outcome.start, used = time.perf_counter(), cpu_seconds()
    lengths = await gather_within((one(*request) for request in requests), limit)
    outcome.end, outcome.cpu = time.perf_counter(), cpu_seconds() - used
    outcome.returned = [tokens for each in lengths for tokens in each]
    outcome.generated, outcome.candidates = sum(outcome.returned), len(outcome.returned)
    if policy not in UNSHAPED:
        outcome.generated = sum(record.generated_tokens for record in records)
        outcome.candidates = sum(len(record.candidates) for record in records)
    for record in records:
        prompt = trace.prompts[prompt_number(record.group_id)]
        for candidate in record.selected:
            tokens = prompt.length(candidate.index)
            if candidate.tokens != tokens and not (candidate.cut and candidate.tokens < tokens):
                raise AssertionError(f"{record.group_id}: {candidate} should have {tokens} tokens")
    return outcome
