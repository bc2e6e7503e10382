"""Measure one model in a process of its own: ``python -m benchmarks.gpu.one_model SPEC``, with a `Spec` in JSON.

It writes its findings to a file after every part, so that a failure loses only its own part.
"""

import logging
import sys
import time
import traceback
from collections.abc import Awaitable
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import msgspec

from benchmarks.gpu.models import SHAPES, TINY
from benchmarks.gpu.plan import Budget
from benchmarks.gpu.results import Findings, Spec, Table
from benchmarks.gpu.traces import CANDIDATES, load_or_sample

STEPS, FIRST_ROLLOUTS, MORE_ROLLOUTS, TRAINING, COSTS = 2.0, 3.0, 1.5, 10.0, 2.0
"""Shares of the time: for step times, for the first number of prompts, for each further one, for each trace.
Unused time goes to the next parts."""
MAX_WEIGHTS_SHARE = 0.2
"""Share of the time that is reserved at most for weight updates, which run last."""


async def measure(spec: Spec, found: Findings, out: Path, budget: Budget) -> None:
    """Start the engine, and run every part, which fills its table."""
    from benchmarks.gpu.bench import DRY, GPU, Bench, start_engine
    from benchmarks.gpu.parts import costs, rollouts, steps, training, weights

    options = spec.options
    sizes, shape = (DRY, TINY) if options.dry else (GPU, SHAPES[spec.model])
    traces = load_or_sample(options.traces, options.seed)
    shares, found.tables = {"steps": STEPS}, {"steps": steps.table()}
    for number, prompts in enumerate(options.prompts):
        shares[f"rollouts-{prompts}"] = MORE_ROLLOUTS if number else FIRST_ROLLOUTS
        found.tables[f"rollouts-{prompts}"] = rollouts.table(prompts)
    for number in range(len(traces)):
        name = f"training-{number + 1}" if number else "training"
        shares[name] = TRAINING
        found.tables[name] = training.table(options.prompts[0])
    shares["costs"] = COSTS
    found.tables |= {"costs": costs.table(), "weights": weights.table()}
    found.tables = {name: one for name, one in found.tables.items() if spec.wants(name)}
    start, folder = time.monotonic(), Path(spec.folder)
    async with start_engine(Bench(shape, sizes, options.logprobs, options.seed), folder, options.flags) as bench:
        found.engine_seconds, found.capacity = time.monotonic() - start, bench.port.capacity
        found.write(out)
        last = min(weights.estimate_seconds(shape), MAX_WEIGHTS_SHARE * budget.remaining) * spec.wants("weights")
        shares = {name: share for name, share in shares.items() if name in found.tables}
        for name, share in chain(Budget(budget.remaining - last).split(shares), [("weights", budget)]):
            if (result := found.tables.get(name)) is None:
                continue
            match name.split("-"):
                case ["steps"]:
                    part = steps.measure(bench, share, result, spec.bandwidth, CANDIDATES * max(options.prompts))
                case ["costs"]:
                    part = costs.measure(bench, share, result)
                case ["training", *which]:
                    trace = traces[int(which[0]) - 1 if which else 0]
                    part = training.measure(bench, share, result, trace, options.prompts[0])
                case ["weights"]:
                    part = weights.measure(bench, share, result, folder)
                case [_, count]:
                    lines = found.timelines.setdefault(name, {})
                    part = rollouts.measure(bench, share, result, traces[0].first(int(count)), options.policies, lines)
            await run_part(part, result, share)
            found.curve = None if bench.curve is None else asdict(bench.curve)
            found.write(out)


async def run_part(part: Awaitable[None], result: Table, share: Budget) -> None:
    """Run a part; if it fails, note it in its table and go on."""
    given = share.remaining
    try:
        await part
    except TimeoutError:
        result.fail(f"Stopped: it took longer than its {given:.0f} s.")
    except Exception as error:
        logging.getLogger(__name__).exception("a part failed")
        result.fail(f"Failed: {type(error).__name__}: {error}")


def main(text: str) -> int:
    spec = msgspec.json.decode(text, type=Spec, dec_hook=lambda kind, value: kind(value))  # of paths
    found, out, budget = Findings(spec.model), Path(spec.out), Budget(spec.seconds)
    try:
        import uvloop

        uvloop.run(measure(spec, found, out, budget))
    except SystemExit as exit_:  # vLLM's parser has printed the reason
        found.error = f"exit code {exit_.code}"
        return 1
    except Exception as error:
        traceback.print_exc()
        found.error = f"{type(error).__name__}: {error}"
        return 1
    finally:
        found.write(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
