"""One model in a process of its own: ``python -m benchmarks.gpu.one_model SPEC``, SPEC being a `Spec` in JSON.

It writes what it has to a file after every part, so that the parts before a failure count.
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

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.models import SHAPES, TINY
from benchmarks.gpu.sizes import DRY, GPU
from benchmarks.gpu.tables import Table
from benchmarks.gpu.traces import CANDIDATES, Trace, lengths

SHARES = {"steps": 2.0, "costs": 2.0}
FIRST_ROLLOUTS, MORE_ROLLOUTS = 5.0, 2.0
"""Shares of the time: of the first number of prompts, and of each further one. What a part leaves goes to the rest."""
KEPT = 0.2
"""Share of the time that is kept at most for new weights, which come last and have what the others left besides."""


@dataclass(frozen=True)
class Spec:
    """What to measure. ``folder``: an empty one for the model. ``seconds``: for everything, with the engine's start.
    ``bandwidth``: the card's, bytes/s.
    """

    model: str
    folder: str
    out: str
    seconds: float
    seed: int
    prompts: tuple[int, ...]
    policies: tuple[str, ...]
    bandwidth: float
    trace: str | None = None
    logprobs: bool = False
    dry: bool = False
    flags: tuple[str, ...] = ()

    def lengths(self) -> Trace:
        """Of as many prompts as there are."""
        return lengths(self.trace, self.seed)


@dataclass
class Findings:
    """What is known so far. ``engine_seconds``: that the engine took to start. ``curve``: batches and step seconds.

    ``last_words``: the end of its log, if something went wrong. ``timelines``: of each policy, by table.
    """

    model: str
    engine_seconds: float | None = None
    error: str | None = None
    last_words: str | None = None
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
    """Start the engine, and let each part fill its table."""
    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.parts import costs, rollouts, steps, weights
    from benchmarks.gpu.start import running

    sizes, shape = (DRY, TINY) if spec.dry else (GPU, SHAPES[spec.model])
    shares, found.tables = dict(SHARES), {"steps": steps.table()}
    for number, prompts in enumerate(spec.prompts):
        shares[f"rollouts-{prompts}"] = MORE_ROLLOUTS if number else FIRST_ROLLOUTS
        found.tables[f"rollouts-{prompts}"] = rollouts.table(prompts)
    found.tables |= {"costs": costs.table(), "weights": weights.table()}
    began, folder = time.monotonic(), Path(spec.folder)
    async with running(Bench(shape, sizes, spec.logprobs, spec.seed), folder, spec.flags) as bench:
        found.engine_seconds, found.capacity = time.monotonic() - began, bench.port.capacity
        found.write(out)
        trace = spec.lengths()
        others = Budget(budget.left - min(weights.needs(shape), KEPT * budget.left))
        for name, share in chain(others.shared(shares), [("weights", budget)]):
            result = found.tables[name]
            match name.split("-"):
                case ["steps"]:
                    part = steps.measure(bench, share, result, spec.bandwidth, CANDIDATES * max(spec.prompts))
                case ["costs"]:
                    part = costs.measure(bench, share, result)
                case ["weights"]:
                    part = weights.measure(bench, share, result, folder)
                case [_, count]:
                    lines = found.timelines.setdefault(name, {})
                    part = rollouts.measure(bench, share, result, trace.first(int(count)), spec.policies, lines)
            await told(part, result, share)
            found.curve = None if bench.curve is None else asdict(bench.curve)
            found.write(out)


async def told(part: Awaitable[None], result: Table, share: Budget) -> None:
    """Whatever ends a part early ends that part alone, and is said in its table."""
    given = share.left
    try:
        await part
    except TimeoutError:
        result.fail(f"Stopped: it took longer than its {given:.0f} s.")
    except Exception as error:
        logging.getLogger(__name__).exception("a part failed")
        result.fail(f"Failed: {type(error).__name__}: {error}")


def main(text: str) -> int:
    value = json.loads(text)
    spec = Spec(**value | {key: tuple(value[key]) for key in ("prompts", "policies", "flags")})
    found, out, budget = Findings(spec.model), Path(spec.out), Budget(spec.seconds)
    try:
        import uvloop

        uvloop.run(measure(spec, found, out, budget))
    except SystemExit as left:  # vLLM's parser has said why
        found.error = f"exit code {left.code}"
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
