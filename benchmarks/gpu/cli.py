"""What may be asked for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.models import SHAPES, TINY
from benchmarks.gpu.policies import ORDER
from benchmarks.gpu.traces import DRAWN, recorded
from darts_server.rollout.allocation.budgets import SMALLEST_BATCH

DESCRIPTION = """\
Measures on this machine's GPU whether shaped rollouts are faster than plain vLLM, in minutes and without any download.

For each model it starts one engine (real architecture, weights that were never trained) and measures
  1. the seconds of a decode step by batch size, against what the card's bandwidth allows,
  2. whole rollouts, the same prompts and lengths under plain vLLM and under each policy,
  3. what our code costs: throughput with nothing shaped, CPU time a token, aborts, and looking at running sequences,
  4. what new weights cost, read from a file and pushed, by phase.
From the first it works out where shaping pays on this card: few prompts leave it waiting for the longest trajectory,
many keep it at work, so rollouts of both kinds are measured, and the sizes between are foretold.

How long each candidate of each prompt becomes is imposed from a trace, so that it is the same under every policy; each
of its tokens is really decoded. The trace is drawn from a seed, or read from a file. Lengths are divided by 2, 4, ...
where the time does not allow more, and the report says by what. New weights need room in --out for two models while
one is measured (8B: 33 GB); a path for which there is no room or time is left out, and the report says so.
"""
EPILOG = """\
examples:
  benchmarks/gpu/run --quick                      0.6B and 1.7B, 64 prompts and 16, within 4 minutes
  benchmarks/gpu/run                              0.6B, 1.7B and 8B, up to 256 prompts and 16, within 9 minutes
  benchmarks/gpu/run --models 8B --minutes 60     lengths as they are
  benchmarks/gpu/run --dry                        no GPU: everything once in small, to see that it works
  benchmarks/gpu/run --quick -- --attention-backend TRITON_ATTN     what follows -- goes to vLLM

a recorded trace is JSON Lines, one line a prompt, the lengths of its trajectories in tokens:
  {"lengths": [412, 388, 1903, 455, 4096, 401, 390, 520]}
the longest length of the file counts as truncated, all others as ended by themselves.

what comes out: results.json, results.md and a picture for each model in the folder --out, and the log of each engine.
The report is also printed last.
"""
QUICK_MODELS, FULL_MODELS = ("0.6B", "1.7B"), ("0.6B", "1.7B", "8B")
QUICK_MINUTES, FULL_MINUTES, DRY_MINUTES = 4.0, 9.0, 6.0
QUICK_PROMPTS, FULL_PROMPTS, DRY_PROMPTS = (64, 16), (256, 16), (8,)


@dataclass(frozen=True)
class Options:
    """Checked, and with every default filled in."""

    models: tuple[str, ...]
    prompts: tuple[int, ...]
    policies: tuple[str, ...]
    seed: int
    trace: Path | None
    minutes: float
    logprobs: bool
    dry: bool
    out: Path
    flags: tuple[str, ...]


def arguments(argv: Sequence[str]) -> Options:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks/gpu/run", description=DESCRIPTION, epilog=EPILOG, formatter_class=form)
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--quick", action="store_true", help="two models, fewer prompts, 4 minutes")
    how_much.add_argument("--dry", action="store_true", help="a tiny model on the CPU; its figures mean nothing")
    parser.add_argument("--models", metavar="A,B", help=f"of {', '.join(SHAPES)} (default: by --quick)")
    parser.add_argument(
        "--prompts",
        metavar="N,N",
        help="groups of 8 in a rollout, what matters most first (default: 256,16; --quick: 64,16)",
    )
    parser.add_argument(
        "--policies", metavar="A,B", help=f"of {', '.join(ORDER)} (default: all); plain is always there"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and prompts (default: %(default)s)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="lengths from a file, instead of drawn from the seed"
    )
    parser.add_argument("--minutes", type=float, help="for everything (default: 9; --quick: 4)")
    parser.add_argument("--logprobs", action="store_true", help="ask for the sampled tokens' log-probs, as trainers do")
    parser.add_argument("--out", type=Path, default=Path("out/gpu-benchmark"), help="folder (default: %(default)s)")
    split = list(argv).index("--") if "--" in argv else len(argv)
    chosen, flags = parser.parse_args(argv[:split]), argv[split + 1 :]
    small, quick = chosen.dry, chosen.quick
    default = (TINY.name,) if small else QUICK_MODELS if quick else FULL_MODELS
    prompts: tuple[int, ...] = DRY_PROMPTS if small else QUICK_PROMPTS if quick else FULL_PROMPTS
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
        trace=chosen.trace,
        minutes=chosen.minutes or (DRY_MINUTES if small else QUICK_MINUTES if quick else FULL_MINUTES),
        logprobs=chosen.logprobs,
        dry=small,
        out=chosen.out,
        flags=tuple(flags),
    )
    if error := _wrong(options):
        parser.error(error)
    return options


def _wrong(options: Options) -> str | None:
    """What cannot be done."""
    known = (TINY.name,) if options.dry else tuple(SHAPES)
    for flag, names, allowed in (("--models", options.models, known), ("--policies", options.policies, ORDER)):
        if unknown := [name for name in names if name not in allowed]:
            return f"{flag}: {', '.join(unknown)} not known; there are {', '.join(allowed)}"
    if min(options.prompts) < SMALLEST_BATCH or max(options.prompts) > DRAWN:
        return f"--prompts must be from {SMALLEST_BATCH} (fewer are not allocated together) to {DRAWN}"
    if options.minutes <= 0:
        return "--minutes must be above 0"
    if options.trace is not None:
        try:
            recorded(options.trace, options.seed)
        except (OSError, ValueError) as error:
            return f"--trace: {error}"
    return None
