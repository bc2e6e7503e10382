"""``darts-server demo``."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from random import Random

import httpx

from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.runs import RAW, TIMEOUT_SECONDS, Batches, Method, Run, Step, compare, draw, format_table
from darts_server.offline.demo.server import DARTS, serving

DESCRIPTION = """\
See what a rollout server saves, in some two minutes on two CPU cores. The demo starts servers with real vLLM on a tiny
model that comes with the package. It requests the same prompts in five ways, and compares times, right answers and
lengths.
"""

EPILOG = """\
The model (451,648 parameters) does arithmetic. The task has a verifier, so the table shows right answers too. Each step
requests one batch as a trainer does, with a group for every prompt, and takes as long as its slowest group.

  raw          plain sampling (--policy off)
  raw, max 64  plain sampling with a smaller max_tokens, which cuts answers off
  auto         starts 50 % more prompts than a step needs, and returns the first groups that are complete. The other
               groups continue in the next step. The last step waits for all groups.
  others       start more candidates of a prompt than are returned, and stop or cut the slowest candidates
  ..., speculation
               the same on a second server with --speculate auto, which drafts tokens from the other answers to a
               prompt. This changes no distribution. Each prompt is new here; prompts that come again, as in a later
               epoch, have better drafts, and gain more.

All methods get the same prompts, and take turns.

examples:
  darts-server demo                                the defaults
  darts-server demo --steps 30                     more batches, steadier figures
  darts-server demo --policies darts cap           other policies
  darts-server demo --policies off+speculation     drafts alone
  darts-server demo --caps 32 64 128               other values of max_tokens; no values: --caps

Afterwards, the folder --out has the picture (if matplotlib is installed) and the server's log. To serve a model of your
own to a trainer of your own: darts-server serve --help
"""

POLICIES = ("auto", "darts_cut", "auto+speculation")
SPECULATION = "+speculation"
"""Ends the name of a policy that runs on the server with drafts."""
# vLLM's sampler is as fast on so small a model, and starts sooner.
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
AHEAD = 0.5
"""Prompts that run ahead, as a share of a step's prompts."""
CAPS = (64,)
"""The best fixed limit that was tried on this task, or next to it."""
PROMPT_SEED = 8
WARM_UP_PROMPTS = 4
"""An engine's first requests take seconds, which should count for no run."""
NO_VLLM = 'vLLM is not installed: pip install "darts-server[cpu]", or "darts-server[gpu]" with an NVIDIA GPU'


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    can_draw = find_spec("matplotlib") is not None
    try:
        if find_spec("vllm") is None:
            raise RuntimeError(NO_VLLM)
        if not can_draw:
            print("matplotlib is not installed, so there will be no picture. To get one: pip install matplotlib")
        with ExitStack() as stack:
            raw, *others = measure(start_servers(stack, options), options)
    except httpx.HTTPError as error:
        return _fail(f"{error}\nThe server's log is in {options.out}")
    except (RuntimeError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; the server was stopped")

    groups = sum(len(step.lengths) for step in raw.steps)
    print(f"\n{groups} groups, {len(raw.lengths)} trajectories returned by each run\n\n{format_table(raw, others)}\n")
    print("Figures vary from run to run. Times vary most, if the machine does other work.")
    if not others:
        return 0
    if can_draw:
        drawn_run = others[-1]
        for run in others:
            if run.name == "auto":
                drawn_run = run
        draw(raw, drawn_run, options.picture)
        print(f"Picture of one step: {options.picture}")
    print(compare(raw, others))
    return 0


def _fail(message: str) -> int:
    print(f"darts-server demo: {message}", file=sys.stderr)
    return 1


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "darts-server demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="batches of each run (default: %(default)s)",
    )
    add(
        "--prompts",
        type=int,
        default=16,
        metavar="N",
        help="prompts in a batch (default: %(default)s)",
    )
    size_help = "trajectories in a group, at least 2 (default: %(default)s)"
    add(
        "--group-size",
        type=int,
        default=8,
        metavar="N",
        help=size_help,
    )
    policies_help = f"policies to compare with raw, also NAME{SPECULATION} (default: {' '.join(POLICIES)})"
    add(
        "--policies",
        nargs="+",
        default=POLICIES,
        metavar="NAME",
        help=policies_help,
    )
    caps_help = "values of max_tokens for further raw runs (default: 64)"
    add(
        "--caps",
        nargs="*",
        type=int,
        default=CAPS,
        metavar="N",
        help=caps_help,
    )
    add(
        "--port",
        type=int,
        default=0,
        help="port of the server (default: a free port)",
    )
    out_help = "folder for picture and log (default: %(default)s)"
    add(
        "--out",
        type=Path,
        default=Path("darts-demo"),
        metavar="FOLDER",
        help=out_help,
    )
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="file of the picture (default: demo.png in --out)",
    )
    options = parser.parse_args(argv)
    if min(options.steps, options.prompts) < 1 or options.group_size < 2:
        parser.error("--steps and --prompts must be at least 1, and --group-size at least 2")
    if min(options.caps, default=1) < 1:
        parser.error("--caps must be at least 1 token")
    options.picture = options.picture or options.out / "demo.png"
    return options


def list_methods(options: argparse.Namespace) -> dict[str, Method]:
    methods = {RAW: Method("off")}
    for cap in options.caps:
        methods[f"{RAW}, max {cap}"] = Method("off", cap)
    for name in options.policies:
        if name != RAW:
            policy = name.removesuffix(SPECULATION)
            has_drafts = policy != name
            # Only `auto` starts prompts of the next step ahead.
            ahead = AHEAD if policy == "auto" else 0.0
            title = f"{policy}, speculation" if has_drafts else policy
            methods[title] = Method(policy, ahead=ahead, drafts=has_drafts)
    return methods


def start_servers(stack: ExitStack, options: argparse.Namespace) -> dict[bool, str]:
    """Start the server, and a server with drafts if a method needs it. Return their URLs by whether they draft.

    One server would draft for a method what the other methods have answered to the same prompts.
    """
    log = options.out / "server.log"
    print(f"Starting a server. Importing vLLM takes about half a minute. Log: {log}", flush=True)
    urls = {
        False: stack.enter_context(
            serving(
                DARTS,
                log,
                port=options.port,
                env=UNCOMPILED,
            )
        ).url
    }
    if any(method.drafts for method in list_methods(options).values()):
        log = options.out / "server-with-drafts.log"
        print(f"Starting a server with --speculate auto. Log: {log}", flush=True)
        server = stack.enter_context(
            serving(
                DARTS,
                log,
                "--speculate",
                "auto",
                env=UNCOMPILED,
            )
        )
        urls[True] = server.url
    return urls


def measure(urls: Mapping[bool, str], options: argparse.Namespace) -> list[Run]:
    """Request every batch by every method, and return the runs, raw first."""
    rng = Random(PROMPT_SEED)
    methods = list_methods(options)
    names = list(methods)
    steps: dict[str, list[Step]] = {name: [] for name in names}
    with ExitStack() as stack:
        clients = {
            has_drafts: stack.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS))
            for has_drafts, url in urls.items()
        }
        warm_up = [sample_problem(rng) for _ in range(WARM_UP_PROMPTS)]
        for method in methods.values():
            Batches(warm_up, len(warm_up), options.group_size, method).request(clients[method.drafts])

        problems = [sample_problem(rng) for _ in range(options.steps * options.prompts)]
        batches = {
            name: Batches(problems, options.prompts, options.group_size, method) for name, method in methods.items()
        }
        for number in range(options.steps):
            # Methods take turns and change places, so that none has the quieter machine or the warmer prefix cache.
            first = number % len(names)
            for name in names[first:] + names[:first]:
                steps[name].append(batches[name].request(clients[methods[name].drafts]))
            times = ", ".join(f"{name} {steps[name][-1].seconds:.2f} s" for name in names)
            print(f"step {number + 1} of {options.steps}: {times}", flush=True)
    return [Run(name, steps[name]) for name in names]
