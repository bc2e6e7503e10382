"""Request batches of groups over HTTP, time what arrives, and compare the runs in a table and a sentence for each."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import httpx
import numpy as np

from darts_server.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward

RAW = "raw"
CLEAR = 0.15
"""Times whose ratio is closer to 1 than this are called equal: runs of a few seconds vary by as much."""
TIMEOUT_SECONDS = 300.0  # a batch of the tiny model takes a few seconds, on a busy machine some tens


@dataclass(frozen=True)
class Method:
    """How a run samples: ``policy``, a policy's name, and ``max_tokens`` of each trajectory."""

    policy: str
    max_tokens: int = MAX_RESPONSE_TOKENS


@dataclass(frozen=True)
class Step:
    """One batch, as a trainer requests one for each step. Lengths are in generated tokens, the end of sequence counted.

    Attributes:
        arrivals: seconds from the request to each group, in the order of arrival.
        lengths: of the returned trajectories, for each of these groups.
        right: returned trajectories with the right answer.
        generated: tokens of all candidates, returned or not.
        seconds: from the request to the end of the answer.
    """

    arrivals: Sequence[float]
    lengths: Sequence[Sequence[int]]
    right: int
    generated: int
    seconds: float


def request_groups(client: httpx.Client, problems: Sequence[Problem], group_size: int, method: Method) -> Step:
    """Request a group for each problem, all in one batch, and read them as they complete.

    Raises:
        RuntimeError: the server refused the batch, or a group failed.
    """
    body = {
        "prompts": [{"text": problem.prompt} for problem in problems],
        "group_size": group_size,
        "sampling": {"max_tokens": method.max_tokens, "temperature": 1.0},
        "policy": {"name": method.policy},
        "stream": "groups",
    }
    arrivals, lengths, right, usage = [], [], 0, {}
    start = time.perf_counter()
    with client.stream("POST", "/darts/v1/rollouts", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"the server answered {response.status_code}: {response.read().decode()}")
        for event, data in events(response.iter_lines()):
            if data.get("error"):
                raise RuntimeError(f"the server answered: {data['error']['message']}")
            if event == "group":
                arrivals.append(time.perf_counter() - start)
                lengths.append([trajectory["length"] for trajectory in data["trajectories"]])
                right += sum(reward(problems[data["number"]], each["text"]) == 1 for each in data["trajectories"])
            elif event == "done":
                usage = data["usage"]
    seconds, returned = time.perf_counter() - start, sum(map(sum, lengths))
    if usage.get("returned") != returned:
        raise RuntimeError(f"{returned} tokens arrived, the server counted {usage.get('returned')}")
    return Step(arrivals, lengths, right, usage["generated"], seconds)


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


@dataclass(frozen=True)
class Run:
    """All steps under one policy; ``name`` is the policy's, or `RAW`."""

    name: str
    steps: Sequence[Step]

    @cached_property
    def lengths(self) -> list[int]:
        """The length of every returned trajectory, in tokens."""
        return [length for step in self.steps for group in step.lengths for length in group]

    @property
    def generated(self) -> int:
        """Tokens of all candidates, returned or not."""
        return sum(step.generated for step in self.steps)

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(step.seconds for step in self.steps)


Row = tuple[str, Callable[[Run], float], str]
"""A name, its number for a run, and the format of that number."""

ROWS: tuple[Row | None, ...] = (
    ("wall time, all steps (s)", lambda run: run.seconds, ".2f"),
    ("wall time, median step (s)", lambda run: median(step.seconds for step in run.steps), ".2f"),
    None,
    ("tokens generated", lambda run: run.generated, ",.0f"),
    ("tokens returned", lambda run: sum(run.lengths), ",.0f"),
    ("tokens discarded", lambda run: run.generated - sum(run.lengths), ",.0f"),
    None,
    ("length, mean (tokens)", lambda run: float(np.mean(run.lengths)), ".1f"),
    ("length, 95th percentile", lambda run: float(np.percentile(run.lengths, 95)), ".0f"),
    ("length, longest", lambda run: max(run.lengths), ".0f"),
    (
        "length, std within a group",
        lambda run: float(np.mean([np.std(group) for step in run.steps for group in step.lengths])),
        ".1f",
    ),
    None,
    ("right answers", lambda run: sum(step.right for step in run.steps) / len(run.lengths), ".1%"),
)
"""``None`` is a rule between rows."""


def table(raw: Run, shaped: Sequence[Run]) -> str:
    """Put the runs side by side; each ratio is against raw in this very run."""
    rows: list[list[str] | None] = [["", RAW, *(cell for run in shaped for cell in (run.name, "ratio"))], None]
    for row in ROWS:
        if row is None:
            rows.append(None)
            continue
        name, number, form = row
        before = number(raw)
        cells = [name, format(before, form)]
        for run in shaped:
            cells += [format(number(run), form), f"{number(run) / before:.2f}" if before else "-"]
        rows.append(cells)
    first, *others = (max(map(len, column)) for column in zip(*filter(None, rows), strict=True))
    rule = "  ".join("-" * width for width in (first, *others))
    return "\n".join(
        rule if row is None else "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows
    )


def verdict(raw: Run, run: Run) -> str:
    """Say in one sentence what shaping did to tokens and time.

    The pace is that of the median step against raw's same step: one step that other work on the machine slowed down
    does not decide it.
    """
    ratio = median(mine.seconds / its.seconds for mine, its in zip(run.steps, raw.steps, strict=True))
    pace = "about as fast as raw" if abs(ratio - 1) < CLEAR else "faster than raw" if ratio < 1 else "slower than raw"
    return (
        f"{run.name}: {run.generated / raw.generated:.2f} x the generated tokens for the same {len(run.lengths)} "
        f"trajectories; a step took {ratio:.2f} x the time (median): {pace} here."
    )
