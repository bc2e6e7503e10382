"""Whole rollouts: the same prompts and the same draws of lengths under each policy."""

import logging
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu.bench import Bench, all_of
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.nvml import Utilisation
from benchmarks.gpu.plan import Plan, ordered, planned
from benchmarks.gpu.policies import AGAIN, MEANING, PLAIN, SIZE
from benchmarks.gpu.rollout import Outcome, rollout
from benchmarks.gpu.tables import Table, Value
from benchmarks.gpu.traces import Trace

logger = logging.getLogger(__name__)

IDLE_BELOW = 0.25
"""The GPU counts as idle while fewer than this share of the sequences that it started with run."""
MOST_GROUPS = 0.9
"""Share of the groups whose time is shown beside that of all: the last one alone may decide that."""
WARM_UP_TOKENS = 8
MEASURED = (
    "Candidate i of a prompt has the same length and lot under every policy. What is known of prompts at the start of "
    "each rollout comes from one earlier draw of the same trace. Ratios are to the faster of plain's two runs. Idle: "
    "share of the time in which fewer than a quarter of the sequences ran that could run at the start. GPU busy: share "
    "of the time in which any kernel ran, where NVML tells. Foretold: from the step times above and the lengths alone, "
    "by the paper's cost model."
)


def table(prompts: int) -> Table:
    columns = {
        "policy": "",
        "seconds": ".2f",
        "ratio to plain": ".3f",
        "foretold, s": ".2f",
        "90% decided, s": ".2f",
        "candidates a group": ".2f",
        "generated": ",d",
        "returned": ",d",
        "wasted": ",d",
        "idle": ".0%",
        "GPU busy": ".0%",
        "mean length": ".1f",
        "p95": ",.0f",
        "CPU us a token": ".1f",
    }
    return Table(f"Rollouts of {prompts} prompts: seconds until all groups are decided", columns)


async def measure(
    bench: Bench, budget: Budget, result: Table, trace: Trace, policies: Sequence[str], timelines: dict[str, object]
) -> None:
    """The policies in turn, as many as fit."""
    if bench.curve is None:
        raise RuntimeError("step times are not known, so there is no telling what fits the time")
    plan = planned(bench.curve, trace, policies, bench.sizes.divisors, bench.port.capacity, budget)
    must, may = ordered(policies)
    result.note(told(plan, trace))
    result.note(MEASURED)
    await warm_up(bench, plan.trace, budget)
    with Utilisation() as busy:
        for policy in (*must, *may):
            outcome = await tried(bench, budget, result, plan, policy)
            if outcome is None:
                continue
            result.rows.append(row(bench, outcome, plan.foretold[policy], busy))
            relate(result.rows)
            timelines[policy] = bench.log.between(outcome.began, outcome.ended).timeline(outcome.began)


async def tried(bench: Bench, budget: Budget, result: Table, plan: Plan, policy: str) -> Outcome | None:
    """A rollout under one policy; ``None``, and a note that says why, if there is none."""
    needs, left = plan.needs(policy), budget.left
    if not budget.fits(needs):
        result.note(f"`{policy}` was left out: it needs about {needs:.0f} s, and {left:.0f} s are left.")
        return None
    try:
        return await rollout(bench, policy, plan.trace, plan.limit(policy, left))
    except TimeoutError:
        foretold, limit = plan.foretold[policy], plan.limit(policy, left)
        result.fail(f"`{policy}` was stopped after {limit:.0f} s; {foretold:.0f} s were foretold.")
    except Exception as error:  # the others may still work
        logger.exception("policy %s failed", policy)
        result.fail(f"`{policy}` failed: {type(error).__name__}: {error}")
    return None


def told(plan: Plan, wanted: Trace) -> str:
    """What the rollouts are made of."""
    trace = plan.trace
    smaller = f", all divided by {trace.divisor}" if trace.divisor > 1 else ""
    fewer = f" {len(wanted.prompts)} prompts did not fit the time." if len(trace.prompts) < len(wanted.prompts) else ""
    size = f"{len(trace.prompts)} prompts x {SIZE}, lengths of up to {trace.cap:,} tokens"
    return f"{size} ({trace.source}{smaller}).{fewer} {MEANING}"


async def warm_up(bench: Bench, trace: Trace, budget: Budget) -> None:
    """Everything that is compiled at its first use is compiled before the clock runs."""
    await bench.quiet()
    bench.shape_nothing()
    params = bench.params(WARM_UP_TOKENS)
    count = len(trace.prompts) * SIZE
    await all_of((bench.ask(i % len(trace.prompts), params, f"warm-up-{i}") for i in range(count)), budget.left)


def relate(rows: Sequence[dict[str, Value]]) -> None:
    """Fill the ratios in: to the faster of vLLM's own runs, since whatever comes first is the slower for it."""
    times = {str(row["policy"]): float(row["seconds"] or 0.0) for row in rows}
    plain = min((times[policy] for policy in (PLAIN, AGAIN) if policy in times), default=None)
    for row in rows:
        row["ratio to plain"] = times[str(row["policy"])] / plain if plain else None


def row(bench: Bench, outcome: Outcome, foretold: float, busy: Utilisation) -> dict[str, Value]:
    returned, started = sum(outcome.returned), min(outcome.candidates, bench.sizes.capacity)
    return {
        "policy": outcome.policy,
        "seconds": outcome.seconds,
        "ratio to plain": None,
        "foretold, s": foretold,
        "90% decided, s": outcome.share_decided(MOST_GROUPS),
        "candidates a group": outcome.candidates * SIZE / len(outcome.returned),
        "generated": outcome.generated,
        "returned": returned,
        "wasted": outcome.generated - returned,
        "idle": bench.log.idle_share(outcome.began, outcome.ended, IDLE_BELOW * started),
        "GPU busy": busy.mean(outcome.began, outcome.ended),
        "mean length": float(np.mean(outcome.returned)),
        "p95": float(np.percentile(outcome.returned, 95)),
        "CPU us a token": 1e6 * outcome.cpu / outcome.generated,
    }
