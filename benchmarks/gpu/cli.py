"""The command line of the benchmark."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.models import SHAPES, TINY
from benchmarks.gpu.plan import ORDER
from benchmarks.gpu.traces import SAMPLED, recorded
from darts_server.rollout.learned.statistics import MIN_COHORT

DESCRIPTION = """\
Measure whether shaped rollouts are faster than plain vLLM on this machine's GPU, in minutes and without any download.

For each model it starts one engine (real architecture, random weights) and measures
  1. the seconds of a decode step by batch size, against what the card's bandwidth allows,
  2. whole rollouts: the same prompts and lengths under plain vLLM and under each policy,
  3. the cost of our code: throughput with nothing shaped, CPU time per token, aborts and probes,
  4. weight updates, from a file and pushed, by phase.
With few prompts the card waits for the longest trajectory; with many it is always busy. So rollouts of both kinds are
measured. `darts-server simulate` predicts where shaping pays between them.

The length of each candidate comes from a trace, so it is the same under every policy; every token is really decoded.
The trace is sampled with a seed, or read from a file. Lengths are divided by 2, 4, ... if there is not enough time, and
the report says by what. Weight updates need disk space in --out for two models while one is measured (8B: 33 GB). A
measurement for which there is no space or time is left out, and the report says so.
"""
EPILOG = """\
examples:
  benchmarks/gpu/run --quick                      0.6B and 1.7B, 64 prompts and 16, within 4 minutes
  benchmarks/gpu/run                              0.6B, 1.7B and 8B, up to 256 prompts and 16, within 9 minutes
  benchmarks/gpu/run --models 8B --minutes 60     undivided lengths
  benchmarks/gpu/run --dry                        no GPU: everything once, tiny, to check that it works
  benchmarks/gpu/run --quick -- --attention-backend TRITON_ATTN     flags after -- go to vLLM

a recorded trace is JSON Lines, one line a prompt, the lengths of its trajectories in tokens:
  {"lengths": [412, 388, 1903, 455, 4096, 401, 390, 520]}
the longest length of the file counts as truncated, all others as finished.

output: results.json, results.md, a picture for each model and the log of each engine, in the folder --out. The report
is also printed at the end.
"""
QUICK_MODELS, FULL_MODELS = ("0.6B", "1.7B"), ("0.6B", "1.7B", "8B")
QUICK_MINUTES, FULL_MINUTES, DRY_MINUTES = 4.0, 9.0, 6.0
QUICK_PROMPTS, FULL_PROMPTS, DRY_PROMPTS = (64, 16), (256, 16), (8,)


@dataclass(frozen=True)
class Options:
    """The checked options, with all defaults filled in."""

    models: tuple[str, ...]
    prompts: tuple[int, ...]
    policies: tuple[str, ...]
    seed: int
    traces: tuple[Path, ...]
    parts: tuple[str, ...] | None
    minutes: float
    logprobs: bool
    dry: bool
    out: Path
    flags: tuple[str, ...]


def arguments(argv: Sequence[str]) -> Options:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks/gpu/run", description=DESCRIPTION, epilog=EPILOG, formatter_class=form)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="two models, fewer prompts, 4 minutes")
    size.add_argument("--dry", action="store_true", help="a tiny model on the CPU; its figures mean nothing")
    parser.add_argument("--models", metavar="A,B", help=f"models, of {', '.join(SHAPES)} (default: by --quick)")
    parser.add_argument(
        "--prompts",
        metavar="N,N",
        help="groups of 8 in a rollout, the most important first (default: 256,16; --quick: 64,16)",
    )
    parser.add_argument(
        "--policies", metavar="A,B", help=f"policies, of {', '.join(ORDER)} (default: all); plain is always included"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and prompts (default: %(default)s)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="read lengths from a file instead of sampling them; training steps run with each that is given",
    )
    parser.add_argument(
        "--parts", metavar="A,B", help="only these tables, such as steps,rollouts-64,training,costs,weights"
    )
    parser.add_argument("--minutes", type=float, help="total time (default: 9; --quick: 4)")
    parser.add_argument("--logprobs", action="store_true", help="request log-probs of sampled tokens, as trainers do")
    parser.add_argument("--out", type=Path, default=Path("out/gpu-benchmark"), help="folder (default: %(default)s)")
    split = list(argv).index("--") if "--" in argv else len(argv)
    chosen, flags = parser.parse_args(argv[:split]), argv[split + 1 :]
    dry, quick = chosen.dry, chosen.quick
    default = (TINY.name,) if dry else QUICK_MODELS if quick else FULL_MODELS
    prompts: tuple[int, ...] = DRY_PROMPTS if dry else QUICK_PROMPTS if quick else FULL_PROMPTS
    if chosen.prompts:
        try:
            prompts = tuple(dict.fromkeys(map(int, chosen.prompts.split(","))))
        except ValueError:
            parser.error(f"--prompts must be whole numbers with commas between them, got {chosen.prompts!r}")
    options = Options(
        models=tuple(chosen.models.split(",")) if chosen.models else default,
        prompts=prompts,
        policies=tuple(chosen.policies.split(",")) if chosen.policies else ORDER,
        seed=chosen.seed,
        traces=tuple(chosen.trace),
        parts=tuple(chosen.parts.split(",")) if chosen.parts else None,
        minutes=chosen.minutes or (DRY_MINUTES if dry else QUICK_MINUTES if quick else FULL_MINUTES),
        logprobs=chosen.logprobs,
        dry=dry,
        out=chosen.out,
        flags=tuple(flags),
    )
    if error := _find_error(options):
        parser.error(error)
    return options


def _find_error(options: Options) -> str | None:
    """Return what is wrong with the options."""
    available = (TINY.name,) if options.dry else tuple(SHAPES)
    for flag, names, allowed in (("--models", options.models, available), ("--policies", options.policies, ORDER)):
        if unknown := [name for name in names if name not in allowed]:
            return f"{flag}: {', '.join(unknown)} unknown; available: {', '.join(allowed)}"
    if min(options.prompts) < MIN_COHORT or max(options.prompts) > SAMPLED:
        return f"--prompts must be from {MIN_COHORT} (fewer are not allocated together) to {SAMPLED}"
    if options.minutes <= 0:
        return "--minutes must be above 0"
    for path in options.traces:
        try:
            recorded(path, options.seed)
        except (OSError, ValueError) as error:
            return f"--trace: {error}"
    return None
