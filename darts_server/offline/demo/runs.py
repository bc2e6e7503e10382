"""Request batches of groups over HTTP, measure them, and compare the runs."""

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
"""Times whose ratio is closer to 1 are called equal: runs of a few seconds vary as much."""
ROUNDS_TO_ZERO = 0.005
NEARLY_ALL = 0.95
"""Share of the generated tokens above which a run is said to discard nothing."""
TIMEOUT_SECONDS = 300.0
"""A batch of the tiny model takes a few seconds, and some tens on a busy machine."""


@dataclass(frozen=True)
class Method:
    policy: str
    max_tokens: int = MAX_RESPONSE_TOKENS
    ahead: float = 0.0
    """Prompts that are started ahead of their step, as a share of the prompts that a step needs."""
    drafts: bool = False


@dataclass(frozen=True)
class Step:
    """One batch, as a trainer requests it. Lengths are in generated tokens, with the end of sequence.

    ``arrivals``, ``lengths`` and ``resumed`` have an entry for each group, in the order of arrival.
    """

    arrivals: Sequence[float]
    """Seconds from the request to the group."""
    lengths: Sequence[Sequence[int]]
    right: int
    generated: int
    """Tokens of all candidates, returned or not."""
    seconds: float
    """Seconds from the request to the end of the answer."""
    resumed: Sequence[bool] = ()
    """Whether the group continued what an earlier step had generated."""
    waiting: int = 0
    """Groups that continue in the next step."""
    truncated: int = 0
    """Returned trajectories that were cut off before the limit of raw."""


class Batches:
    """The batches of one run. Each problem is in one step, or continues until it is complete."""

    def __init__(
        self,
        problems: Sequence[Problem],
        needed: int,
        group_size: int,
        method: Method,
    ) -> None:
        self._problems = problems
        self._needed = needed
        self._group_size = group_size
        self._method = method
        self._num_requested = 0
        self._num_waiting = 0

    def request(self, client: httpx.Client) -> Step:
        """Request the groups of the next step as one batch, and read them as they complete.

        Raises:
            RuntimeError: the server refused the batch, or a group failed.
        """
        method = self._method
        num_running = self._needed + round(method.ahead * self._needed)
        first_new = self._num_requested
        self._num_requested = min(first_new + num_running - self._num_waiting, len(self._problems))
        new = range(first_new, self._num_requested)
        body: dict[str, Any] = {
            "prompts": [{"text": self._problems[number].prompt, "metadata": {"number": number}} for number in new],
            "group_size": self._group_size,
            "sampling": {"max_tokens": method.max_tokens, "temperature": 1.0},
            "policy": {"name": method.policy},
            "stream": "groups",
        }
        if method.ahead:
            # The last step waits for all groups, and so does a step with too few prompts to run ahead.
            is_last = self._num_requested == len(self._problems)
            runs_ahead = self._num_waiting + len(new) > self._needed
            num_groups = self._needed if runs_ahead and not is_last else None
            body |= {"carry": "resume", "carried": True, "num_groups": num_groups}

        arrivals: list[float] = []
        lengths: list[list[int]] = []
        resumed: list[bool] = []
        num_right = 0
        num_truncated = 0
        done: dict[str, Any] = {}
        start = time.perf_counter()
        with client.stream("POST", "/darts/v1/rollouts", json=body) as response:
            if response.is_error:
                raise RuntimeError(f"the server answered {response.status_code}: {response.read().decode()}")
            for event, data in parse_events(response.iter_lines()):
                if data.get("error"):
                    raise RuntimeError(f"the server answered: {data['error']['message']}")
                if event == "group":
                    problem = self._problems[data["metadata"]["number"]]
                    trajectories = data["trajectories"]
                    arrivals.append(time.perf_counter() - start)
                    lengths.append([trajectory["length"] for trajectory in trajectories])
                    # The server numbers carried prompts after the prompts of the request.
                    resumed.append(data["number"] >= len(new))
                    for trajectory in trajectories:
                        num_right += reward(problem, trajectory["text"]) == 1
                        # The limit of raw cuts trajectories off in every run.
                        is_cut = trajectory["finish_reason"] == "length"
                        num_truncated += is_cut and trajectory["length"] < MAX_RESPONSE_TOKENS
                elif event == "done":
                    done = data
        seconds = time.perf_counter() - start

        returned_tokens = sum(map(sum, lengths))
        usage = done.get("usage", {})
        if usage.get("returned") != returned_tokens:
            raise RuntimeError(f"{returned_tokens} tokens arrived, the server counted {usage.get('returned')}")
        self._num_waiting = len(done.get("unfinished") or ())
        return Step(
            arrivals,
            lengths,
            num_right,
            usage["generated"],
            seconds,
            resumed,
            self._num_waiting,
            num_truncated,
        )


def parse_events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse server-sent events whose data is one line of JSON, as darts-server sends them."""
    name = ""
    for line in lines:
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            yield name, json.loads(value)


# --- comparing runs ---------------------------------------------------------


class Run:
    def __init__(self, name: str, steps: Sequence[Step]) -> None:
        self.name = name
        self.steps = steps
        self.lengths = [length for step in steps for group in step.lengths for length in group]
        self.generated = sum(step.generated for step in steps)
        self.seconds = sum(step.seconds for step in steps)
        self.right_share = sum(step.right for step in steps) / len(self.lengths)
        self.truncated_share = sum(step.truncated for step in steps) / len(self.lengths)


def format_table(raw: Run, others: Sequence[Run]) -> str:
    runs = [raw, *others]
    rows = [
        ["", *(run.name for run in runs)],
        ["seconds, all steps", *(f"{run.seconds:.1f}" for run in runs)],
        ["right answers", *(f"{run.right_share:.1%}" for run in runs)],
        ["longest answer (tokens)", *(f"{max(run.lengths)}" for run in runs)],
        ["tokens generated", *(f"{run.generated:,}" for run in runs)],
    ]
    first_width, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([row[0].ljust(first_width), *map(str.rjust, row[1:], widths)]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def compare(raw: Run, others: Sequence[Run]) -> str:
    """Say in one sentence how each run differs from raw."""
    # Two standard errors of a difference in points: trajectories of the same prompts differ by chance.
    noise = 200 * sqrt(2 * raw.right_share * (1 - raw.right_share) / len(raw.lengths))
    differences = []
    for run in others:
        ratio = run.seconds / raw.seconds
        pace = "about the same time" if abs(ratio - 1) < CLEAR else f"{ratio:.2f} of the time"

        points = 100 * (run.right_share - raw.right_share)
        more = "more" if points > 0 else "fewer"
        answers = f"has {abs(points):.1f} points {more} right answers"
        if abs(points) <= noise:
            answers = f"has as many right answers (within the noise of ± {noise:.0f} points)"

        selection = "returns the shorter answers"
        if run.truncated_share > ROUNDS_TO_ZERO:
            selection = f"cuts off {run.truncated_share:.0%} of the answers"
        elif sum(run.lengths) > NEARLY_ALL * run.generated:
            selection = "discards nothing"
        longest = f"longest answer {max(run.lengths)} tokens, raw {max(raw.lengths)}"
        differences.append(f"{run.name} takes {pace}, {answers} and {selection} ({longest})")
    return f"Compared with raw: {'; '.join(differences)}."


# --- a picture ----------------------------------------------------------------

# Colours of Okabe and Ito, which colour-blind readers can tell apart.
NEW = "#0072B2"
RESUMED = "#009E73"
WAITING = "#E69F00"
GREY = "#555555"
LEGEND = {
    NEW: "a group, from its request to its end",
    RESUMED: "continues what an earlier step has generated",
    WAITING: "continues in the next step",
}


def draw(raw: Run, other: Run, path: Path) -> None:
    """Draw the middle step of both runs, with a line for each group."""
    # matplotlib is optional.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    middle = len(raw.steps) // 2
    longest_seconds = max(run.steps[middle].seconds for run in (raw, other))
    used_colours = {NEW}
    figure = Figure(figsize=(9.6, 6.2), dpi=140, layout="constrained")
    for axes, run in zip(figure.subplots(2, 1, sharex=True), (raw, other), strict=True):
        step = run.steps[middle]
        colours = [RESUMED if is_resumed else NEW for is_resumed in step.resumed] + [WAITING] * step.waiting
        used_colours.update(colours)
        ends = [*step.arrivals, *[step.seconds] * step.waiting]
        waiting_rows = range(len(step.arrivals), len(ends))
        axes.hlines(
            range(len(ends)),
            0,
            ends,
            color=colours,
            linewidth=3,
        )
        axes.scatter(
            [step.seconds] * step.waiting,
            waiting_rows,
            marker=">",
            color=WAITING,
            s=18,
        )
        axes.axvline(step.seconds, color=GREY, linewidth=1)
        # The first group is on top.
        axes.set(ylim=(len(ends), -1), yticks=[], xlim=(0, 1.02 * longest_seconds))
        axes.spines[["top", "right", "left"]].set_visible(False)
        title = f"{run.name}: step {middle + 1} of {len(run.steps)} takes {step.seconds:.1f} s"
        axes.set_title(
            title,
            loc="left",
            fontsize=11.5,
            fontweight="bold",
        )
    axes.set_xlabel("seconds")
    handles = [
        Line2D(
            [],
            [],
            color=colour,
            linewidth=2.5,
            label=label,
        )
        for colour, label in LEGEND.items()
        if colour in used_colours
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9.5,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
