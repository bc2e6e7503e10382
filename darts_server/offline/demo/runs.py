"""Request batches of groups over HTTP, time what arrives, and compare the runs: a table, a sentence, a picture."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import httpx

from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward

RAW = "raw"
CLEAR = 0.15
"""Times whose ratio is closer to 1 than this are called equal: runs of a few seconds vary by as much."""
TIMEOUT_SECONDS = 300.0  # a batch of the tiny model takes a few seconds, on a busy machine some tens


@dataclass(frozen=True)
class Method:
    """How a run samples: ``policy``, a policy's name, and ``max_tokens`` of each trajectory.

    ``ahead``: prompts that are started ahead of their step, as a share of those that a step needs. Those that are not
    among the first to be complete go on in the next step.
    """

    policy: str
    max_tokens: int = MAX_RESPONSE_TOKENS
    ahead: float = 0.0


@dataclass(frozen=True)
class Step:
    """One batch, as a trainer requests one for each step. Lengths are in generated tokens, the end of sequence counted.

    ``arrivals``, ``lengths``, ``resumed``: of each group, in the order of arrival: seconds from the request, the
    returned trajectories, and whether it went on from what an earlier step had generated.
    """

    arrivals: Sequence[float]
    lengths: Sequence[Sequence[int]]
    right: int  # returned trajectories with the right answer
    generated: int  # tokens of all candidates, returned or not
    seconds: float  # from the request to the end of the answer
    resumed: Sequence[bool] = ()
    waiting: int = 0  # groups that go on in the next step
    truncated: int = 0  # returned trajectories that were cut off before the limit of raw


class Batches:
    """The batches of one run: each problem is in one step, or goes on until it is complete."""

    def __init__(self, problems: Sequence[Problem], needed: int, group_size: int, method: Method) -> None:
        self._problems, self._needed, self._group_size, self._method = problems, needed, group_size, method
        self._begun = self._waiting = 0

    def request(self, client: httpx.Client) -> Step:
        """Request the next step's groups, all in one batch, and read them as they complete.

        Raises:
            RuntimeError: the server refused the batch, or a group failed.
        """
        needed, method = self._needed, self._method
        running = needed + round(method.ahead * needed)
        new = range(self._begun, min(self._begun + running - self._waiting, len(self._problems)))
        self._begun = new.stop
        body: dict[str, Any] = {
            "prompts": [{"text": self._problems[number].prompt, "metadata": {"number": number}} for number in new],
            "group_size": self._group_size,
            "sampling": {"max_tokens": method.max_tokens, "temperature": 1.0},
            "policy": {"name": method.policy},
            "stream": "groups",
        }
        if method.ahead:
            # The last step waits for all.
            is_last = self._begun == len(self._problems) or self._waiting + len(new) <= needed
            body |= {"carry": "resume", "carried": True, "num_groups": None if is_last else needed}
        arrivals, lengths, resumed, right, truncated, done = [], [], [], 0, 0, dict[str, Any]()
        start = time.perf_counter()
        with client.stream("POST", "/darts/v1/rollouts", json=body) as response:
            if response.is_error:
                raise RuntimeError(f"the server answered {response.status_code}: {response.read().decode()}")
            for event, data in events(response.iter_lines()):
                if data.get("error"):
                    raise RuntimeError(f"the server answered: {data['error']['message']}")
                if event == "group":
                    problem, trajectories = self._problems[data["metadata"]["number"]], data["trajectories"]
                    arrivals.append(time.perf_counter() - start)
                    lengths.append([each["length"] for each in trajectories])
                    resumed.append(data["number"] >= len(new))
                    # Those that reach the limit of raw are cut off by it in every run.
                    cut = [each for each in trajectories if each["finish_reason"] == "length"]
                    truncated += sum(each["length"] < MAX_RESPONSE_TOKENS for each in cut)
                    right += sum(reward(problem, each["text"]) == 1 for each in trajectories)
                elif event == "done":
                    done = data
        seconds, returned = time.perf_counter() - start, sum(map(sum, lengths))
        usage, self._waiting = done.get("usage", {}), len(done.get("unfinished") or ())
        if usage.get("returned") != returned:
            raise RuntimeError(f"{returned} tokens arrived, the server counted {usage.get('returned')}")
        return Step(arrivals, lengths, right, usage["generated"], seconds, resumed, self._waiting, truncated)


def events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse server-sent events, as darts-server sends them: one line of JSON each."""
    name = ""
    for line in lines:
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            yield name, json.loads(value)


# --- comparing runs ---------------------------------------------------------


class Run:
    """All steps under one policy; ``name`` is the policy's, or `RAW`. Lengths are in tokens.

    ``right``, ``cut``: shares of the returned trajectories that have the right answer, and that were cut off before the
    limit of raw.
    """

    def __init__(self, name: str, steps: Sequence[Step]) -> None:
        self.name, self.steps = name, steps
        self.lengths = [length for step in steps for group in step.lengths for length in group]
        self.generated = sum(step.generated for step in steps)
        self.seconds = sum(step.seconds for step in steps)
        self.right = sum(step.right for step in steps) / len(self.lengths)
        self.cut = sum(step.truncated for step in steps) / len(self.lengths)


def table(raw: Run, others: Sequence[Run]) -> str:
    """Put the runs side by side."""
    runs = [raw, *others]
    rows = [
        ["", *(run.name for run in runs)],
        ["seconds, all steps", *(f"{run.seconds:.1f}" for run in runs)],
        ["right answers", *(f"{run.right:.1%}" for run in runs)],
        ["longest answer (tokens)", *(f"{max(run.lengths)}" for run in runs)],
        ["tokens generated", *(f"{run.generated:,}" for run in runs)],
    ]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def verdict(raw: Run, others: Sequence[Run]) -> str:
    """Say in one sentence what each run cost and kept, against raw in this very run."""
    # Two standard errors of a difference: trajectories of the same prompts differ by chance.
    costs, noise = [], 200 * sqrt(2 * raw.right * (1 - raw.right) / len(raw.lengths))
    for run in others:
        ratio, points = run.seconds / raw.seconds, 100 * (run.right - raw.right)
        pace = "about the same time" if abs(ratio - 1) < CLEAR else f"{ratio:.2f} of the time"
        more = "more" if points > 0 else "fewer"
        kept = f"has {abs(points):.1f} points {more} right answers"
        if abs(points) <= noise:
            kept = f"is as right within the noise of ± {noise:.0f} points"
        what = "throws nothing away" if sum(run.lengths) > 0.95 * run.generated else "returns the shorter ones"
        if run.cut > 0.005:
            what = f"cuts {run.cut:.0%} of the answers"
        longest = f"longest {max(run.lengths)} tokens of {max(raw.lengths)}"
        costs.append(f"{run.name} takes {pace}, {kept} and {what} ({longest})")
    return f"Against raw: {'; '.join(costs)}."


# --- a picture ----------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind readers can tell apart.
NEW, RESUMED, WAITING, GREY = "#0072B2", "#009E73", "#E69F00", "#555555"
LEGEND = {
    NEW: "a group, from its request to its end",
    RESUMED: "goes on from what an earlier step has generated",
    WAITING: "not waited for: goes on in the next step",
}


def draw(raw: Run, other: Run, path: Path) -> None:
    """Draw the same step of both runs, the middle one, as lanes into a PNG file."""
    from matplotlib.figure import Figure  # which is optional
    from matplotlib.lines import Line2D

    number = len(raw.steps) // 2
    longest = max(run.steps[number].seconds for run in (raw, other))
    shown = {NEW}
    figure = Figure(figsize=(9.6, 6.2), dpi=140, layout="constrained")
    for axes, run in zip(figure.subplots(2, 1, sharex=True), (raw, other), strict=True):
        step = run.steps[number]
        colours = [RESUMED if each else NEW for each in step.resumed] + [WAITING] * step.waiting
        shown |= {*colours}
        ends = [*step.arrivals, *[step.seconds] * step.waiting]
        waiting = range(len(step.arrivals), len(ends))
        axes.hlines(range(len(ends)), 0, ends, color=colours, linewidth=3)
        axes.scatter([step.seconds] * step.waiting, waiting, marker=">", color=WAITING, s=18)
        axes.axvline(step.seconds, color=GREY, linewidth=1)
        axes.set(ylim=(len(ends), -1), yticks=[], xlim=(0, 1.02 * longest))
        axes.spines[["top", "right", "left"]].set_visible(False)
        title = f"{run.name}: step {number + 1} of {len(run.steps)} takes {step.seconds:.1f} s"
        axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    axes.set_xlabel("seconds")
    handles = [
        Line2D([], [], color=colour, linewidth=2.5, label=label) for colour, label in LEGEND.items() if colour in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
