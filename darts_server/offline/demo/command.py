"""``darts-server demo``."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random

import httpx

from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.runs import RAW, TIMEOUT_SECONDS, Batches, Method, Run, Step, draw, table, verdict
from darts_server.offline.demo.server import DARTS, serving

DESCRIPTION = """\
See what a rollout server saves, in about a minute on two CPU cores: start one with real vLLM on a tiny model that
comes with the package, request the same prompts in four ways, and compare times, right answers and lengths.
"""

EPILOG = """\
The model (451,648 parameters) does arithmetic; the task has a verifier, so the table shows right answers too. Each step
requests one batch as a trainer does: a group for every prompt, and the step takes as long as its slowest group. "raw"
is plain sampling (--policy off). "raw, max 64" is what anyone can have: a smaller max_tokens, which cuts answers off.
"auto" starts half as many prompts more than a step needs, returns the first groups that are complete, and lets the
others go on in the next step from what they have; the last step waits for all. Other policies start more candidates of
a prompt than are returned, and stop or cut the slowest. All get the same prompts, in turns.

examples:
  darts-server demo                                the defaults
  darts-server demo --steps 30                     more batches: steadier figures
  darts-server demo --policies darts cap           other policies
  darts-server demo --caps 32 64 128               other limits to compare with; none: --caps

The folder --out has the picture (if matplotlib is installed) and the server's log afterwards. Next, with a model and
a trainer of your own: darts-server serve --help
"""

POLICIES = ("auto", "darts_cut")
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}  # vLLM's sampler is as fast on so small a model, and starts sooner
AHEAD = 0.5  # prompts that auto starts ahead, over those of a step
CAPS = (64,)  # of the fixed limits tried on this task, the best or next to it
PROMPT_SEED = 8
WARM_UP_PROMPTS = 4  # the engine's first requests take seconds, which no run should pay for
NO_VLLM = 'vLLM is not installed: pip install "darts-server[cpu]", or "darts-server[gpu]" with an NVIDIA GPU'


def main(argv: Sequence[str]) -> int:
    """Run the demo; return the exit code."""
    options = parse_arguments(argv)
    log = options.out / "server.log"
    can_draw = find_spec("matplotlib") is not None
    try:
        if find_spec("vllm") is None:
            raise RuntimeError(NO_VLLM)
        if not can_draw:
            print("matplotlib is not installed, so there will be no picture; for one: pip install matplotlib")
        print(f"Starting a server; importing vLLM takes about half a minute. Log: {log}", flush=True)
        with serving(DARTS, log, port=options.port, env=UNCOMPILED) as server:
            raw, *shaped = measure(server.url, options)
    except httpx.HTTPError as error:
        return _fail(f"{error}\nThe server's log is {log}")
    except (RuntimeError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; its server has been stopped")
    groups = sum(len(step.lengths) for step in raw.steps)
    print(f"\n{groups} groups, {len(raw.lengths)} trajectories returned by each run\n\n{table(raw, shaped)}\n")
    print("One run: figures vary from run to run, and times most of all if the machine does other work.")
    if can_draw and shaped:
        draw(raw, next((run for run in shaped if run.name == "auto"), shaped[-1]), options.picture)
        print(f"Picture of one step: {options.picture}")
    if shaped:
        print(verdict(raw, shaped))
    return 0


def _fail(message: str) -> int:
    print(f"darts-server demo: {message}", file=sys.stderr)
    return 1


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "darts-server demo", description=DESCRIPTION, epilog=EPILOG, formatter_class=form, allow_abbrev=False
    )
    add = parser.add_argument
    add("--steps", type=int, default=3, metavar="N", help="batches under each policy (default: %(default)s)")
    add("--prompts", type=int, default=16, metavar="N", help="prompts in a batch, a group each (default: %(default)s)")
    add("--group-size", type=int, default=8, metavar="N", help="trajectories a group, 2 or more (default: %(default)s)")
    add("--policies", nargs="+", default=POLICIES, metavar="NAME", help="compared with raw (default: auto darts_cut)")
    caps_help = "values of max_tokens under which raw runs too (default: 64)"
    add("--caps", nargs="*", type=int, default=CAPS, metavar="N", help=caps_help)
    add("--port", type=int, default=0, help="where the server listens (default: a free port)")
    out = Path("darts-demo")
    add("--out", type=Path, default=out, metavar="FOLDER", help="for picture and log (default: %(default)s)")
    add("--picture", type=Path, metavar="FILE", help="file of the picture (default: demo.png in --out)")
    options = parser.parse_args(argv)
    if min(options.steps, options.prompts) < 1 or options.group_size < 2:
        parser.error("--steps and --prompts must be at least 1, and --group-size at least 2")
    if min(options.caps, default=1) < 1:
        parser.error("--caps must be at least 1 token")
    options.picture = options.picture or options.out / "demo.png"
    return options


def methods(options: argparse.Namespace) -> dict[str, Method]:
    """Return what is compared, by name: raw, raw with each smaller ``max_tokens``, and the policies."""
    caps = {f"{RAW}, max {cap}": Method("off", cap) for cap in options.caps}
    policies = {name: Method(name, ahead=AHEAD if name == "auto" else 0.0) for name in options.policies if name != RAW}
    return {RAW: Method("off"), **caps, **policies}


def measure(url: str, options: argparse.Namespace) -> list[Run]:
    """Request every batch by every method, raw first in the result.

    The methods take turns within each step and change places from step to step, so that none has the quieter machine
    or the warmer prefix cache.
    """
    rng, runs, size = Random(PROMPT_SEED), methods(options), options.group_size
    names, steps = list(runs), {name: list[Step]() for name in runs}
    with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        few = [sample_problem(rng) for _ in range(WARM_UP_PROMPTS)]
        for method in runs.values():
            Batches(few, len(few), size, method).request(client)
        problems = [sample_problem(rng) for _ in range(options.steps * options.prompts)]
        batches = {name: Batches(problems, options.prompts, size, method) for name, method in runs.items()}
        for number in range(options.steps):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                steps[name].append(batches[name].request(client))
            times = ", ".join(f"{name} {steps[name][-1].seconds:.2f} s" for name in names)
            print(f"step {number + 1} of {options.steps}: {times}", flush=True)
    return [Run(name, steps[name]) for name in names]
