"""Draw the pictures of docs/policies.md from lengths of the tiny model; about a minute on two CPU cores.

    python -m examples.tiny_rl.pictures

Twelve unshaped candidates are generated for each of 64 prompts, and each rule is replayed on them: all candidates of
all prompts start together and get one token a step. Run it from the root of the repository, with vLLM and the extra
"dev" installed.
"""

import argparse
import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import ENVIRONMENT
from darts_server.policies import OFF
from darts_server.policy.allocation.optimum import allocate_by_std
from darts_server.policy.candidate import Candidate, State
from darts_server.policy.deadline import Deadline
from darts_server.policy.named_policies import build_policies
from darts_server.policy.selection.rules import InOrder, SelectionRule
from darts_server.policy.shaping import Shaping, Tail
from darts_server.types import FinishReason
from examples.tiny_rl.colours import BLUE, GREY, ORANGE, SKY
from examples.tiny_rl.replay import Replay, replay

SIZE, CANDIDATES, PROMPTS = 8, 12, 64
SEED = 1  # of prompts, candidates and the sampled tail
REDUNDANCIES = {1.75: ORANGE, 1.5: BLUE, 1.25: "#009E73"}  # mean M'/M in the picture of the allocation

LINE, PALE, FAINT = "#222222", "#C9C9C9", "#EEEEEE"
PANELS: dict[str, Any] = {"nrows": 2, "ncols": 3, "sharex": True, "sharey": True}
SMALL = 9

Prompt = Sequence[Candidate]
"""All candidates of one prompt, finished and with their random draws."""


@dataclass(frozen=True)
class Panel:
    """One rule, titled by the policies that use it."""

    title: str
    note: str
    rule: SelectionRule
    candidates: int = CANDIDATES
    deadline: bool = False

    def play(self, prompt: Prompt, limit: int) -> Replay:
        """Replay the rule on a prompt whose cohort has the deadline ``limit``, and the bound that follows from it."""
        started = prompt[: self.candidates]
        return (
            replay(self.rule, started, limit, Deadline().bound_of(limit))
            if self.deadline
            else replay(self.rule, started)
        )


def panels() -> list[Panel]:
    """Return the rules to show, each as its named policy has it."""
    policies = build_policies(Shaping(), Deadline())
    rules = {name: shaping.selection_rule(SIZE) for name, shaping in policies.items()}
    return [
        Panel("off", f"the first {SIZE}, no others started", InOrder(SIZE), candidates=SIZE),
        Panel("uniform, darts", "7 shortest, 1 sampled", rules["uniform"]),
        Panel("--tail longest", "7 shortest, the longest", Shaping(tail=Tail.LONGEST).selection_rule(SIZE)),
        Panel("darts, saturated prompt", "8 shortest", policies["darts"].selection_rule(SIZE, saturated=True)),
        Panel("cap", f"the first {SIZE}, cut at D", rules["cap"], candidates=SIZE, deadline=True),
        Panel("darts_cut", "7 shortest, 1 sampled, cut at D", rules["darts_cut"], deadline=True),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Generate, replay, draw."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.tiny_rl.pictures", description=__doc__, formatter_class=form)
    help_out = "folder for the pictures (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="FOLDER", help=help_out)
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.INFO)
    for path in draw(asyncio.run(generate()), options.out):
        print(path)


async def generate() -> list[Prompt]:
    """Generate unshaped candidates."""
    from examples.tiny_rl.engine import shaping_engine

    rng = Random(SEED)
    texts = list(dict.fromkeys(sample_problem(rng).prompt for _ in range(2 * PROMPTS)))[:PROMPTS]
    async with shaping_engine({}) as engine:
        requests = (
            engine.generate(text, f"prompt-{i}", OFF, n=CANDIDATES, seed=SEED + i * CANDIDATES)
            for i, text in enumerate(texts)
        )
        outputs = await asyncio.gather(*requests)
    ends = [[(len(c.token_ids), c.finish_reason or "stop") for c in output.outputs] for output in outputs]
    return batch_of(ends)


def batch_of(ends: Sequence[Sequence[tuple[int, str]]]) -> list[Prompt]:
    """Make a batch from each candidate's length and finish reason, with random draws."""
    rng = np.random.default_rng(SEED)
    return [
        [
            Candidate(i, float(rng.random()), State.FINISHED, tokens, FinishReason(reason))
            for i, (tokens, reason) in enumerate(prompt)
        ]
        for prompt in ends
    ]


def deadline_of(batch: Sequence[Prompt]) -> int:
    """Return the batch's deadline, from the prompts with enough finished candidates."""
    needs = [need for prompt in batch if (need := needed(prompt)) is not None]
    tokens = Deadline().from_lengths(needs, len(needs))
    if tokens is None:
        raise ValueError("no prompt has as many valid candidates as a group")
    return tokens


def needed(prompt: Prompt, place: int = SIZE) -> int | None:
    """Return the length of the M-th shortest valid candidate, or of the one at another ``place``."""
    lengths = sorted(c.tokens for c in prompt if c.valid)
    return lengths[place - 1] if len(lengths) >= place else None


# --- drawing ----------------------------------------------------------------


def draw(batch: Sequence[Prompt], folder: Path) -> list[Path]:
    """Draw all pictures; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    limit = deadline_of(batch)
    figures = {
        "policies-timeline.png": timeline(pick_example(batch, limit), limit),
        "policies-lengths.png": lengths(batch, limit),
        "policies-waiting.png": waiting(batch, limit),
        "allocation.png": allocation(batch),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name)
    return [folder / name for name in figures]


def pick_example(batch: Sequence[Prompt], limit: int) -> Prompt:
    """Pick the prompt that shows most: its sampled candidate is cut and not the longest, and lengths differ."""
    uniform = panels()[1]

    def score(prompt: Prompt) -> tuple[bool, bool, bool, int]:
        need, order = needed(prompt), sorted(prompt, key=lambda c: c.sort_key)
        chosen = uniform.play(prompt, limit).selection
        drawn = max((prompt[i] for i in chosen), key=lambda c: c.sort_key)
        in_time = need is not None and need < limit and any(limit > c.tokens > need for c in prompt)
        return in_time, drawn.tokens > limit, drawn is not order[-1], len({c.tokens for c in prompt})

    return max(batch, key=score)


FATES: dict[str, dict[str, Any]] = {
    "short": {"facecolor": BLUE, "label": "returned"},
    "tail": {"facecolor": ORANGE, "label": "returned as the tail"},
    "cut": {"facecolor": ORANGE, "hatch": "////", "edgecolor": "white", "label": "returned, cut"},
    "stopped": {"facecolor": SKY, "label": "stopped"},
    "finished": {"facecolor": SKY, "hatch": "....", "edgecolor": "white", "label": "finished, not returned"},
    "saved": {"facecolor": FAINT, "edgecolor": PALE, "linestyle": ":", "label": "not generated"},
}


def fate(candidate: Candidate, played: Replay, panel: Panel, prompt: Prompt) -> str:
    """Return which of the `FATES` a candidate has."""
    whole = played.lengths[candidate.index] == candidate.tokens
    if candidate.index not in played.selection:
        return "finished" if whole else "stopped"
    if not whole:
        return "cut"
    ordered = sorted(played.selection, key=lambda i: prompt[i].sort_key)
    return "short" if candidate.index in ordered[: panel.rule.num_shortest] else "tail"


def timeline(prompt: Prompt, limit: int) -> Figure:
    """Draw what each rule does to one prompt's candidates, shortest on top."""
    figure = Figure(figsize=(10, 7.2), dpi=110, layout="constrained")
    rows = sorted(prompt, key=lambda c: c.sort_key)
    for axes, panel in zip(figure.subplots(**PANELS).flat, panels(), strict=True):
        played = panel.play(prompt, limit)
        for row, candidate in enumerate(rows):
            reached = played.lengths[candidate.index] if candidate.index < panel.candidates else 0
            if reached < candidate.tokens:
                axes.barh(row, candidate.tokens - reached, left=reached, height=0.72, **FATES["saved"])
            if reached:
                axes.barh(row, reached, height=0.72, **FATES[fate(candidate, played, panel, prompt)])
        if panel.deadline:
            own_need = needed(prompt[: panel.candidates], panel.rule.completion_place) or 0
            own = min(max(limit, own_need), Deadline().bound_of(limit))
            axes.axvline(own, color=GREY, linestyle="--", linewidth=1.2)
            axes.text(own, -0.75, f" D = {own}", color=GREY, fontsize=SMALL)
        axes.plot(played.steps, len(rows) - 0.2, "^", color=LINE, markersize=7, clip_on=False)
        generated, returned = played.generated, played.returned
        heading(axes, panel.title, f"{panel.note}\n{generated} tokens generated, {returned} returned")
        axes.set_yticks(range(len(rows)), [str(c.index) for c in rows], fontsize=SMALL)
        axes.set_ylim(len(rows) - 0.3, -1.5)
        axes.tick_params(axis="y", length=0)
        tidy(axes, "x")
    figure.supxlabel("generated tokens = decode steps; triangle: the group is complete", fontsize=10)
    figure.supylabel("candidate (its index), shortest on top", fontsize=10)
    patches = [Patch(**style) for style in FATES.values()]
    figure.legend(handles=patches, frameon=False, loc="outside upper center", ncols=3, fontsize=10)
    return figure


def lengths(batch: Sequence[Prompt], limit: int) -> Figure:
    """Draw the tail of returned trajectories against that of all generated ones."""
    figure = Figure(figsize=(10, 6.6), dpi=110, layout="constrained")
    generated = np.array([c.tokens for prompt in batch for c in prompt])
    for axes, panel in zip(figure.subplots(**PANELS).flat, panels(), strict=True):
        groups = [panel.play(prompt, limit) for prompt in batch]
        returned = np.array([group.lengths[i] for group in groups for i in group.selection])
        for values, style in ((generated, {"color": PALE}), (returned, {"color": BLUE})):
            steps = np.arange(1, values.max() + 1)
            longer = [float(np.mean(values >= step)) for step in steps]
            axes.step(steps, longer, where="pre", linewidth=2.4, **style)
            axes.plot(steps[-1], longer[-1], "o", markersize=5, **style)
        if panel.deadline:
            axes.axvline(limit, color=GREY, linestyle="--", linewidth=1.2)
            axes.text(limit * 0.9, 0.0025, f"D = {limit}", color=GREY, fontsize=SMALL, ha="right")
        heading(axes, panel.title, f"{panel.note}\nmean {returned.mean():.1f}, longest {returned.max()}")
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_locator(FixedLocator([1, 4, 16, 64, 256]))
        axes.yaxis.set_major_locator(FixedLocator([1, 0.1, 0.01, 0.001]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.1%}" if share < 0.01 else f"{share:.0%}")
        axes.set_xlim(2, 330)
        tidy(axes, "y")
    figure.supxlabel("length in tokens", fontsize=10)
    figure.supylabel("share of trajectories with at least this length", fontsize=10)
    text = f"all {generated.size} generated: mean {generated.mean():.1f}, longest {generated.max()}"
    patches = [Patch(color=BLUE, label="returned"), Patch(color=PALE, label=text)]
    figure.legend(handles=patches, frameon=False, loc="outside upper center", ncols=2, fontsize=10)
    return figure


def waiting(batch: Sequence[Prompt], limit: int) -> Figure:
    """Draw how long each group takes, shortest first."""
    figure = Figure(figsize=(10, 6.6), dpi=110, layout="constrained")
    place = np.arange(1, len(batch) + 1)
    plain = sorted(panels()[0].play(prompt, limit).steps for prompt in batch)
    for axes, panel in zip(figure.subplots(**PANELS).flat, panels(), strict=True):
        steps = sorted(panel.play(prompt, limit).steps for prompt in batch)
        axes.bar(place, steps, width=0.86, color=BLUE)
        axes.bar(place[-1], steps[-1], width=0.86, color=ORANGE)
        axes.step(place, plain, where="mid", color=GREY, linewidth=1.4)
        if panel.deadline:
            axes.axhline(limit, color=GREY, linestyle="--", linewidth=1.2)
            axes.text(0, limit + 14, f"D = {limit}", color=GREY, fontsize=SMALL, va="bottom")
        heading(axes, panel.title, f"{panel.note}\nmedian group {median(steps):.0f} steps, last one {steps[-1]}")
        axes.xaxis.set_major_locator(FixedLocator([1, 16, 32, 48, 64]))
        axes.yaxis.set_major_locator(MultipleLocator(64))
        axes.set_ylim(0, 270)
        tidy(axes, "y")
    figure.supxlabel("groups, in the order of completion", fontsize=10)
    figure.supylabel("decode steps until the group is complete", fontsize=10)
    handles = [
        Patch(color=BLUE, label="group"),
        Patch(color=ORANGE, label="the last one, which the batch waits for"),
        Line2D([], [], color=GREY, linewidth=1.4, label="off, for comparison"),
    ]
    figure.legend(handles=handles, frameon=False, loc="outside upper center", ncols=3, fontsize=10)
    return figure


def allocation(batch: Sequence[Prompt]) -> Figure:
    """Draw the number of candidates by the spread of a prompt's lengths, under three budgets."""
    figure = Figure(figsize=(10, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    stds, low, high = [stdev(c.tokens for c in prompt) for prompt in batch], SIZE, 2 * SIZE
    for redundancy, colour in REDUNDANCIES.items():
        counts = allocate_by_std(stds, budget=round(redundancy * SIZE * len(stds)), low=low, high=high)
        mean = f"{redundancy * SIZE:g} on average ({redundancy} M)"
        label = f"{mean}: {counts.count(high)} of {len(stds)} prompts are saturated"
        ordered = sorted(zip(stds, counts, strict=True))
        axes.plot(*zip(*ordered, strict=True), "o-", color=colour, markersize=6, linewidth=1, label=label)
    for bound, text in ((low, f"at least M = {low}"), (high, f"at most 2 M = {high}: saturated")):
        axes.axhline(bound, color=GREY, linestyle=":", linewidth=1.2)
        axes.text(max(stds), bound + 0.15, text, color=GREY, fontsize=10, ha="right")
    axes.set(xlabel="length std of the prompt (tokens)", ylabel="candidates started", ylim=(low - 0.6, high + 1))
    axes.yaxis.set_major_locator(MultipleLocator(2))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.12), fontsize=10)
    tidy(axes, "y")
    return figure


def heading(axes: Any, title: str, note: str) -> None:
    """Write a bold title and a note below it."""
    axes.set_title(note, loc="left", fontsize=SMALL, color=GREY)
    axes.annotate(title, (0, 1), (0, 30), "axes fraction", textcoords="offset points", fontsize=11, fontweight="bold")


def tidy(axes: Any, lines: str) -> None:
    axes.grid(axis=lines, color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)


if __name__ == "__main__":
    main()
