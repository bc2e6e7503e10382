"""Measure one model in a process of its own: ``python -m benchmarks.gpu.one_model SPEC``, with a `Spec` in JSON.

It writes its findings to a file after every part, so that a failure loses only its own part.
"""

import json
import logging
import sys
import time
import traceback
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.models import SHAPES, TINY
from benchmarks.gpu.sizes import DRY, GPU
from benchmarks.gpu.tables import Table
from benchmarks.gpu.traces import CANDIDATES, Trace, load_or_sample

STEPS, FIRST_ROLLOUTS, MORE_ROLLOUTS, TRAINING, COSTS = 2.0, 3.0, 1.5, 10.0, 2.0
"""Shares of the time: for step times, for the first number of prompts, for each further one, for each trace.
Unused time goes to the next parts."""
MAX_WEIGHTS_SHARE = 0.2
"""Share of the time that is reserved at most for weight updates, which run last."""


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        folder: an empty one for the model.
        seconds: for everything, including the engine's start.
        bandwidth: the card's, bytes/s.
    """

    model: str
    folder: str
    out: str
    seconds: float
    seed: int
    prompts: tuple[int, ...]
    policies: tuple[str, ...]
    bandwidth: float
    traces: tuple[str, ...] = ()
    parts: tuple[str, ...] | None = None
    logprobs: bool = False
    dry: bool = False
    flags: tuple[str, ...] = ()

    def lengths(self) -> list[Trace]:
        """Return the traces, each of all prompts."""
        return load_or_sample(self.traces, self.seed)

    def wants(self, table: str) -> bool:
        """Return whether this table is to be filled; without step times no other can be."""
        return self.parts is None or table in (*self.parts, "steps")


@dataclass
class Findings:
    """The results so far.

    Attributes:
        engine_seconds: how long the engine took to start.
        log_tail: the end of its log, if something went wrong.
        curve: batch sizes and step seconds.
        timelines: of each policy, by table.
    """

    model: str
    engine_seconds: float | None = None
    error: str | None = None
    log_tail: str | None = None
    capacity: int | None = None
    curve: dict[str, Any] | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "Findings":
        value = json.loads(path.read_text())
        tables = {name: Table(**table) for name, table in value.pop("tables").items()}
        return Findings(**value, tables=tables)

    def write(self, path: Path) -> None:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(path)


async def measure(spec: Spec, found: Findings, out: Path, budget: Budget) -> None:
    """Start the engine, and run every part, which fills its table."""
    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.parts import costs, rollouts, steps, training, weights
    from benchmarks.gpu.start import start_engine

    sizes, shape = (DRY, TINY) if spec.dry else (GPU, SHAPES[spec.model])
    traces = spec.lengths()
    shares, found.tables = {"steps": STEPS}, {"steps": steps.table()}
    for number, prompts in enumerate(spec.prompts):
        shares[f"rollouts-{prompts}"] = MORE_ROLLOUTS if number else FIRST_ROLLOUTS
        found.tables[f"rollouts-{prompts}"] = rollouts.table(prompts)
    for number in range(len(traces)):
        name = f"training-{number + 1}" if number else "training"
        shares[name] = TRAINING
        found.tables[name] = training.table(spec.prompts[0])
    shares["costs"] = COSTS
    found.tables |= {"costs": costs.table(), "weights": weights.table()}
    found.tables = {name: one for name, one in found.tables.items() if spec.wants(name)}
    start, folder = time.monotonic(), Path(spec.folder)
    async with start_engine(Bench(shape, sizes, spec.logprobs, spec.seed), folder, spec.flags) as bench:
        found.engine_seconds, found.capacity = time.monotonic() - start, bench.port.capacity
        found.write(out)
        last = min(weights.estimate_seconds(shape), MAX_WEIGHTS_SHARE * budget.remaining) * spec.wants("weights")
        shares = {name: share for name, share in shares.items() if name in found.tables}
        for name, share in chain(Budget(budget.remaining - last).split(shares), [("weights", budget)]):
            if (result := found.tables.get(name)) is None:
                continue
            match name.split("-"):
                case ["steps"]:
                    part = steps.measure(bench, share, result, spec.bandwidth, CANDIDATES * max(spec.prompts))
                case ["costs"]:
                    part = costs.measure(bench, share, result)
                case ["training", *which]:
                    trace = traces[int(which[0]) - 1 if which else 0]
                    part = training.measure(bench, share, result, trace, spec.prompts[0])
                case ["weights"]:
                    part = weights.measure(bench, share, result, folder)
                case [_, count]:
                    lines = found.timelines.setdefault(name, {})
                    part = rollouts.measure(bench, share, result, traces[0].first(int(count)), spec.policies, lines)
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
    spec = msgspec.json.decode(text, type=Spec)
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
