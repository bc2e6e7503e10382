"""``darts-server simulate``: its flags, its output, and a picture of one step under each policy."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import numpy as np

from darts_server.drafts.lengths import MAX_DRAFT_TOKENS
from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.baselines import simulate_baselines
from darts_server.offline.simulation.model.engines import Machine
from darts_server.offline.simulation.model.sessions import Session
from darts_server.offline.simulation.policies import DEFAULT, NAMES, Policy, parse_policy, split_policies
from darts_server.offline.simulation.presets import PRESETS, with_engines
from darts_server.offline.simulation.sessions import (
    SESSION_COLUMNS,
    SESSION_LEGEND,
    SESSION_POLICIES,
    SessionTraining,
    compare_with_limits,
)
from darts_server.offline.simulation.summary import COLUMNS, LEGEND, Summary, format_table, relative_to, summarise
from darts_server.offline.simulation.training import LEARNING, MAX_STALENESS, Candidates, Step, run_policy
from darts_server.offline.simulation.workload import Format, TracedWorkload, Workload, describe_trace, read_traces
from darts_server.policy.auto import MARGIN
from darts_server.types import OFF

DESCRIPTION = """\
Simulate what policies would bring on your workload before you run it. The simulation uses the server's own rules on a
model of engines and trainer, with the lengths of a trace or of a preset. It prints a table, and needs neither vLLM nor
a GPU.
"""

EPILOG = f"""\
A trace has one prompt a line: {{"step": 0, "prompt_tokens": 112, "lengths": [450, 396, 274], "cap": 10112}}. "lengths"
are the lengths of the prompt's samples in tokens, and "cap" is their limit: a sample of that length counts as
truncated. Without a preset, a trace runs on the machine of dapo-32b. Candidates beyond the samples are resampled.
docs/scaling.md says how, and what the model leaves out.

A line may also be a sample with its turns and tool calls. A trace of such lines is simulated as sessions: tools take
their seconds, and policies stop whole sessions. first is for comparison: it returns the first sessions that finish.
Sessions have no auto, rounds and order, and carry=resume is for off alone. The table also has the best limits of turns
and tokens in hindsight. --join-turns joins the turns of each sample to one answer instead.

A policy is NAME[,OPTION=VALUE...], for example darts_cut,quantile=0.8,start=1.25.
names: {", ".join(NAMES)}

options of a policy:
  redundancy      a number, or auto
  max_redundancy  a number
  longest         places of the tail
  tail            sampled or longest
  adaptive        yes or no
  quantile        quantile of the deadline
  start           prompts that are started, divided by the prompts that are returned
  carry           restart: left-over prompts start again. resume: they continue, in at most {MAX_STALENESS} steps
  rounds          all: left-over prompts run in the next step. long: they wait until they fill a step
  order           given, or long: first left-over prompts, then prompts with the longest earlier groups

options of auto:
  start           maximum of the prompts that are started (default: 1.5)
  stale           --most-stale of the server

auto learns for {LEARNING} steps before the measured steps.

--speculate ACCEPTANCE adds a line for each policy on a server with --speculate auto. ACCEPTANCE is the probability that
a drafted token is right if all tokens before it were, or one for each place in the draft: 0.8,0.7,0.6. The last counts
for all further places. A prototype had .2 for a chat model of 135M parameters on word problems at temperature 1, .4
at .7; and for the tiny model .55, and .88 from the third epoch on. docs/scaling.md says how to measure yours.

presets:
{chr(10).join(f"  {name:<18} {preset.about}" for name, preset in PRESETS.items())}

examples:
  darts-server simulate --preset dapo-32b
  darts-server simulate --trace lengths.jsonl --preset deepcoder-14b-16k --replicas 4 --policies off uniform darts_cut
  darts-server simulate --preset h200-8b --policies auto --speculate 0.5
"""

DRAFTS = " + drafts"
DRAFTS_LEGEND = "\n+ drafts                     with --speculate, compared with off without it"


def main(argv: Sequence[str]) -> int:
    """Return the exit code, or raise `InvalidSetting`."""
    options = parse_arguments(argv)
    workload_name = options.preset or "dapo-32b"
    preset = PRESETS[workload_name]
    machine = with_engines(preset.machine, options.replicas or preset.machine.replicas)
    options.prompts = options.prompts or preset.prompts
    workload: Workload = preset.workload
    about = ""
    sessions: list[tuple[Session, ...]] = []
    if options.trace:
        traced_prompts, max_tokens = read_traces(options.trace, options.format, options.max_tokens)
        workload = TracedWorkload(traced_prompts, max_tokens, options.seed)
        about = f"{describe_trace(traced_prompts, max_tokens)}\n"
        workload_name = f"{', '.join(path.name for path in options.trace)} on the machine of {workload_name}"
        if options.format is Format.JSONL and not options.join_turns:
            sessions = [prompt.sessions for prompt in traced_prompts]
    columns = COLUMNS
    if sessions and all(sessions):
        summaries = compare_sessions(options, sessions, machine)
        about += SESSION_LEGEND
        columns = SESSION_COLUMNS
    else:
        summaries, legend = compare_policies(options, workload, machine)
        about += legend
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "workload": workload_name,
            "group_size": options.group_size,
            "prompts": options.prompts,
            "steps": options.steps,
            "replicas": machine.replicas,
            "machine": asdict(machine),
            "speculate": options.speculate,
            "policies": summaries,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        f"\n{workload_name}: {options.steps} steps, {options.prompts} prompts x {options.group_size} trajectories, "
        f"at most {workload.max_tokens} tokens, engines: {machine.replicas}\n{about}\n\n"
        f"{format_table(summaries, columns)}"
    )
    return 0


def compare_policies(
    options: argparse.Namespace,
    workload: Workload,
    machine: Machine,
) -> tuple[list[Summary], str]:
    size = options.group_size
    policies = [parse_policy(text, size) for text in dict.fromkeys([OFF, *split_policies(options.policies or DEFAULT)])]
    candidates = Candidates(
        workload,
        machine,
        size,
        options.prompts,
        options.steps,
        # At least twice the size, so that most comparisons draw the same candidates, whichever policies they have.
        most=max(2 * size, *(policy.max_candidates(size) for policy in policies)),
        knows_prompts=not options.new_prompts,
        seed=options.seed,
    )
    candidates_by_suffix = {"": candidates}
    legend = LEGEND
    if options.speculate is not None:
        times = replace(machine.step_time, drafts=options.speculate)
        candidates_by_suffix[DRAFTS] = replace(candidates, machine=replace(machine, step_time=times))
        legend += DRAFTS_LEGEND

    runs: dict[str, list[Step]] = {}
    try:
        for policy in policies:
            for suffix, candidates_of_run in candidates_by_suffix.items():
                run = run_policy(policy, candidates_of_run)
                print(f"{policy.name}{suffix}: the first rollout takes {run[0].rollout.seconds:.1f} s", flush=True)
                runs[policy.name + suffix] = run
        summaries = [summarise(name_of_run, run, size) for name_of_run, run in runs.items()]
        summaries += simulate_baselines(runs[OFF], candidates)
    except ValueError as error:
        # A sequence does not fit into the engines' KV cache.
        raise InvalidSetting(f"the machine is too small for this workload: {error}") from error
    if options.picture is not None:
        draw({policy: run[0] for policy, run in runs.items()}, options.picture)
        print(f"Picture: {options.picture}")
    # The first run is `off`.
    summaries = [relative_to(summaries[0], summary) for summary in summaries]
    return summaries, f"{advise_on_carrying(policies, summaries)}\n{legend}"


def compare_sessions(
    options: argparse.Namespace,
    sessions: Sequence[Sequence[Session]],
    machine: Machine,
) -> list[Summary]:
    if options.speculate or options.picture or options.max_tokens:
        raise InvalidSetting("--speculate, --picture and --max-tokens are not for sessions; add --join-turns")
    training = SessionTraining(
        sessions,
        machine,
        options.group_size,
        options.prompts,
        options.steps,
        options.session_measure == "seconds",
        options.seed,
    )
    return compare_with_limits(split_policies(options.policies or SESSION_POLICIES), training)


def advise_on_carrying(policies: Sequence[Policy], summaries: Sequence[Summary]) -> str:
    """Return a line about the best policy that carries prompts over, if any."""
    resuming = [policy.name for policy in policies if policy.resumes]
    speedups = {summary["policy"]: summary["step_speedup"] for summary in summaries if summary["policy"] in resuming}
    if not speedups:
        return ""
    best = max(speedups, key=lambda name: speedups[name])
    gain = "gains next to nothing on these lengths: it " if speedups[best] < 1 + MARGIN else ""
    return f"Carry-over {gain}is at best {speedups[best]:.2f} times as fast as off ({best}).\n"


def parse_acceptance(text: str) -> tuple[float, ...]:
    """Return `StepTime.drafts`."""
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate <= 1 for rate in rates) or len(rates) > MAX_DRAFT_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number from 0 to 1 nor a list of up to {MAX_DRAFT_TOKENS} of them, such as 0.8,0.7"
        )
    # The last rate counts for all further places of a draft. A token is accepted only with all tokens before it.
    rates += [rates[-1]] * (MAX_DRAFT_TOKENS - len(rates))
    return tuple(probability for probability in np.cumprod(rates).tolist() if probability > 0)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "darts-server simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help="lengths and machine, or with --trace only the machine",
    )
    add(
        "--trace",
        action="append",
        type=Path,
        metavar="FILE",
        help="file with lengths; may be repeated",
    )
    format_help = "format of the traces: jsonl or polytrace (default: jsonl)"
    add(
        "--format",
        type=Format,
        choices=list(Format),
        default=Format.JSONL,
        help=format_help,
    )
    limit_help = "length limit; default and maximum: the smallest cap that a sample of the trace reaches"
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help=limit_help,
    )
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="engines, whose GPUs also train (default: the preset's)",
    )
    add(
        "--prompts",
        type=int,
        metavar="N",
        help="prompts of a step (default: the preset's)",
    )
    add(
        "--group-size",
        type=int,
        default=8,
        metavar="N",
        help="trajectories of a group (default: %(default)s)",
    )
    add(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="steps under each policy (default: %(default)s)",
    )
    defaults = f"for sessions: {' '.join(SESSION_POLICIES)}; else: {' '.join(DEFAULT)}"
    add(
        "--policies",
        nargs="+",
        metavar="POLICY",
        help=f"policies to compare with off (default {defaults})",
    )
    add("--join-turns", action="store_true", help="join the turns of each sample to one answer, without tool time")
    measure_help = "unit by which policies compare sessions (default: %(default)s)"
    add(
        "--session-measure",
        choices=["tokens", "seconds"],
        default="tokens",
        help=measure_help,
    )
    speculate_help = "add a line for each policy with speculation, whose drafted tokens are right so often"
    add(
        "--speculate",
        type=parse_acceptance,
        metavar="ACCEPTANCE",
        help=speculate_help,
    )
    add("--new-prompts", action="store_true", help="no prompt was seen before, so its lengths are not known")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of all random numbers (default: %(default)s)",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="file for the figures of the table",
    )
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="file for a picture of one step under each policy",
    )
    options = parser.parse_args(argv)
    if options.preset is None and not options.trace:
        parser.error("--preset or --trace is needed")
    limits = {"max_tokens": 1, "replicas": 1, "prompts": 1, "steps": 1, "group_size": 2, "seed": 0}
    for flag, least in limits.items():
        value = getattr(options, flag)
        if value is not None and value < least:
            parser.error(f"--{flag.replace('_', '-')} must be at least {least}")
    if options.picture is not None and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    return options


# --- the picture ------------------------------------------------------------

# Colours of Okabe and Ito, which colour-blind readers can tell apart.
RETURNED = "#0072B2"
TRUNCATED = "#D55E00"
STOPPED = "#BBBBBB"
LABELS = {"returned": RETURNED, "returned truncated": TRUNCATED, "not returned": STOPPED}
PANELS = 3


def draw(steps: Mapping[str, Step], path: Path) -> None:
    """Draw a panel for each policy, with a line for each candidate."""
    # matplotlib is optional.
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = ceil(len(steps) / PANELS)
    figure = Figure(figsize=(4.2 * PANELS, 2.5 * rows + 0.8), dpi=110, layout="constrained")
    panels = figure.subplots(
        rows,
        PANELS,
        sharex=True,
        squeeze=False,
    ).ravel()
    longest_seconds = max(step.rollout.seconds for step in steps.values())
    for axes, (name, step) in zip(panels, steps.items(), strict=False):
        rollout = step.rollout
        started_at, ended_at = rollout.start_and_end_seconds()
        lines: list[list[tuple[float, float]]] = []
        colours = []
        for group in np.argsort(rollout.clocks.engine_of_group, kind="stable").tolist():
            for index in np.flatnonzero(np.isfinite(ended_at[group])).tolist():
                height = len(lines)
                candidate = (group, index)
                lines.append([(started_at[candidate], height), (ended_at[candidate], height)])
                colour = STOPPED
                if rollout.returned[candidate]:
                    colour = TRUNCATED if rollout.truncated[candidate] else RETURNED
                colours.append(colour)
        axes.add_collection(LineCollection(lines, colors=colours, linewidths=max(0.4, 150 / len(lines))))
        axes.axvline(rollout.seconds, color="#222222", linewidth=1)
        axes.set(xlim=(0, longest_seconds * 1.02), ylim=(len(lines), 0), yticks=[])
        axes.set_title(f"{name}: {rollout.seconds:.0f} s", loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
    for unused_axes in panels[len(steps) :]:
        unused_axes.set_visible(False)
    figure.supxlabel("seconds of one rollout; a line is a candidate, in the order of engines and prompts", fontsize=10)
    handles = [
        Line2D(
            [],
            [],
            color=colour,
            linewidth=2,
            label=label,
        )
        for label, colour in LABELS.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=len(handles),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
