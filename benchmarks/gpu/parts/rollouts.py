"""Measure whole rollouts: the same prompts and sampled lengths under each policy."""

import logging
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu.bench import Bench, gather_within
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.plan import Plan, make_plan, order_policies
from benchmarks.gpu.policies import AGAIN, MEANING, PLAIN, SIZE
from benchmarks.gpu.rollout import Outcome, run_rollout
from benchmarks.gpu.tables import Table, Value
from benchmarks.gpu.traces import Trace

logger = logging.getLogger(__name__)

IDLE_BELOW = 0.25
"""The GPU counts as idle while fewer than this share of the sequences that it started with run."""
MOST_GROUPS = 0.9
"""The time of this share of the groups is shown too: a single last group may decide the time of all."""
WARM_UP_TOKENS = 8
MEASURED = (
    "Candidate i of a prompt has the same length and tail draw under every policy. The prompt statistics at the start "
    "of each rollout come from an earlier sample of the same trace. Ratios are to the faster run of plain. Idle: "
    "share of the time in which fewer than a quarter of the initially running sequences ran. Predicted: from the step "
    "times above and the lengths alone, by the paper's cost model."
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
    result.note(describe(plan, trace))
    result.note(MEASURED)
    await warm_up(bench, plan.trace, budget)
    for policy in (*must, *may):
        outcome = await try_policy(bench, budget, result, plan, policy)
        if outcome is None:
            continue
        result.rows.append(row(bench, outcome, plan.predicted[policy]))
        fill_ratios(result.rows)
        timelines[policy] = bench.log.between(outcome.start, outcome.end).timeline(outcome.start)


async def try_policy(bench: Bench, budget: Budget, result: Table, plan: Plan, policy: str) -> Outcome | None:
    """Run a rollout under one policy; on failure return ``None`` and note the reason."""
    needs, remaining = plan.estimate(policy), budget.remaining
    if not budget.fits(needs):
        result.note(f"`{policy}` was left out: it needs about {needs:.0f} s, and {remaining:.0f} s remain.")
        return None
    try:
        return await run_rollout(bench, policy, plan.trace, plan.limit(policy, remaining))
    except TimeoutError:
        predicted, limit = plan.predicted[policy], plan.limit(policy, remaining)
        result.fail(f"`{policy}` was stopped after {limit:.0f} s; {predicted:.0f} s were predicted.")
    except Exception as error:  # the others may still work
        logger.exception("policy %s failed", policy)
        result.fail(f"`{policy}` failed: {type(error).__name__}: {error}")
    return None


def describe(plan: Plan, wanted: Trace) -> str:
    """Describe the rollouts."""
    trace = plan.trace
    smaller = f", all divided by {trace.divisor}" if trace.divisor > 1 else ""
    fewer = f" {len(wanted.prompts)} prompts did not fit the time." if len(trace.prompts) < len(wanted.prompts) else ""
    size = f"{len(trace.prompts)} prompts x {SIZE}, lengths of up to {trace.cap:,} tokens"
    return f"{size} ({trace.source}{smaller}).{fewer} {MEANING}"


async def warm_up(bench: Bench, trace: Trace, budget: Budget) -> None:
    """Run a short load, so that kernels are compiled before anything is timed."""
    await bench.drain()
    bench.shape_nothing()
    params = bench.params(WARM_UP_TOKENS)
    count = len(trace.prompts) * SIZE
    await gather_within(
        (bench.request(i % len(trace.prompts), params, f"warm-up-{i}") for i in range(count)), budget.remaining
    )


def fill_ratios(rows: Sequence[dict[str, Value]]) -> None:
    """Fill in the ratios to the faster of vLLM's own two runs, since the first run of all tends to be slower."""
    times = {str(row["policy"]): float(row["seconds"] or 0.0) for row in rows}
    plain = min((times[policy] for policy in (PLAIN, AGAIN) if policy in times), default=None)
    for row in rows:
        row["ratio to plain"] = times[str(row["policy"])] / plain if plain else None


def row(bench: Bench, outcome: Outcome, predicted: float) -> dict[str, Value]:
    returned, started = sum(outcome.returned), min(outcome.candidates, bench.sizes.capacity)
    return {
        "policy": outcome.policy,
        "seconds": outcome.seconds,
        "ratio to plain": None,
        "predicted, s": predicted,
        "90% complete, s": outcome.seconds_to(MOST_GROUPS),
        "candidates a group": outcome.candidates * SIZE / len(outcome.returned),
        "generated": outcome.generated,
        "returned": returned,
        "wasted": outcome.generated - returned,
        "idle": bench.log.idle_share(outcome.start, outcome.end, IDLE_BELOW * started),
        "mean length": float(np.mean(outcome.returned)),
        "p95": float(np.percentile(outcome.returned, 95)),
        "CPU us a token": 1e6 * outcome.cpu / outcome.generated,
    }
