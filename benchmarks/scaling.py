"""Draw the pictures of docs/scaling.md, and print their figures: where shaping pays, by simulation.

    python -m benchmarks.scaling            in about a minute on one core

Nothing here runs an engine. The curves are predicted from order statistics, the steps are simulated as by
``darts-server simulate``.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from darts_server.policy.simulation.prediction import predict
from darts_server.simulation import hardware
from darts_server.simulation.picture import draw
from darts_server.simulation.policies import OFF, parse_policy
from darts_server.simulation.presets import PRESETS, Preset, with_tail
from darts_server.simulation.training import Candidates, Prompt, Setting, run_policy

SIZE = 8
STEPS = 2
COMPARED = {
    "uniform": ("#56B4E9", "-"),
    "uniform,longest=0": ("#0072B2", ":"),
    "darts": ("#0072B2", "-"),
    "darts_cut,adaptive=no": ("#D55E00", "-"),
    "cap": ("#009E73", "-"),
    "off,start=1.25": ("#E69F00", "-"),
    "darts_cut,adaptive=no,start=1.25": ("#CC79A7", "-"),
}
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
SHOWN = ("off", "uniform", "uniform,longest=0", "darts_cut", "cap", "off,start=1.25")
WORKLOADS = ("dapo-32b", "deepcoder-14b-16k", "search-r1-7b")


@dataclass(frozen=True)
class Curve:
    """A row of panels: step speed-ups over one quantity, for each workload."""

    label: str
    values: Sequence[float]

    def presets(self, preset: Preset) -> Iterator[tuple[float, Preset]]:
        for value in self.values:
            if self.label == "engines":
                yield value, replace(preset, machine=hardware.with_engines(preset.machine, int(value)))
            elif self.label == "prompts a step":
                yield value, replace(preset, prompts=int(value))
            else:
                yield value, replace(preset, workload=with_tail(preset.workload, value))


CURVES = (
    Curve("engines", (2, 4, 8, 16, 32)),
    Curve("prompts a step", (32, 64, 128, 256, 512)),
    Curve("weight of the tail", (0.25, 0.5, 0.75, 1.0, 1.25)),
)


def speedups(preset: Preset) -> dict[str, float]:
    """Return the predicted step speed-up of each policy. Prompts that are not complete in their step are dropped."""
    seconds = dict.fromkeys((OFF, *COMPARED), 0.0)
    for name in seconds:
        policy = parse_policy(name, SIZE)
        prompts = round(policy.start * preset.prompts)
        setting = Setting(preset.machine, SIZE, prompts, STEPS)
        candidates = Candidates(preset.workload, setting, 2 * SIZE)
        for step in range(STEPS):
            numbers = [Prompt(step * 2 * preset.prompts + number) for number in range(prompts)]
            enough = preset.prompts if policy.start > 1 else None
            plan = policy.plan(SIZE, [candidates.std(prompt.number) for prompt in numbers], enough)
            batch = candidates.batch(numbers, max(plan.candidates))
            found = predict(batch, plan, preset.machine)
            trained = found.returned.sum() + ((found.returned > 0).sum(axis=1) * batch.prompt_tokens).sum()
            seconds[name] += found.seconds + preset.machine.training_seconds(float(trained))
    return {name: seconds[OFF] / seconds[name] for name in COMPARED}


def draw_curves(path: Path) -> None:
    """Draw and print all curves."""
    figure = Figure(figsize=(4 * len(WORKLOADS), 3 * len(CURVES) + 0.8), dpi=100, layout="constrained")
    panels = figure.subplots(len(CURVES), len(WORKLOADS), squeeze=False)
    for row, curve in zip(panels, CURVES, strict=True):
        for axes, workload in zip(row, WORKLOADS, strict=True):
            points = [(value, speedups(preset)) for value, preset in curve.presets(PRESETS[workload])]
            for name, (colour, dashes) in COMPARED.items():
                values = [found[name] for _, found in points]
                axes.plot([value for value, _ in points], values, dashes, color=colour, marker=".", label=name)
                printed = (f"{value:g}: {found[name]:.2f}" for value, found in points)
                print(f"{workload}, {curve.label}, {name}: {', '.join(printed)}", flush=True)
            axes.axhline(1, color="#222222", linewidth=1)
            axes.set_title(workload, loc="left", fontsize=10)
            axes.set(xlabel=curve.label, ylabel="step speed-up")
            if curve.label != "weight of the tail":
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:.0f}")
            axes.grid(axis="y", color="#DDDDDD")
            axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def draw_steps(path: Path) -> None:
    """Draw one step of the first workload under some policies."""
    preset = PRESETS[WORKLOADS[0]]
    setting = Setting(preset.machine, SIZE, preset.prompts, 1)
    candidates = Candidates(preset.workload, setting, 2 * SIZE)
    draw({name: run_policy(parse_policy(name, SIZE), candidates, setting)[0] for name in SHOWN}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), metavar="FOLDER")
    options = parser.parse_args()
    draw_steps(options.out / "scaling-steps.png")
    draw_curves(options.out / "scaling-curves.png")


if __name__ == "__main__":
    main()
