"""Predict how long rollouts take by what the server has learned, and measure how long they took.

    python -m benchmarks.prediction

The tiny task on a server of its own. Some batches under `off` teach it: its state has the time of a decode step by
running sequences, what a candidate costs when it starts, the mean length of each prompt and the distribution of lengths
around it. The state is saved, and from it alone the model of a rollout, by which `auto` chooses, predicts the mean time
of a batch under each policy. Then batches under all policies take turns, each of them from the same state.

What is predicted is compared with the mean over the rounds. Another column says how long the model takes the tokens to
last that were really generated: what differs there is not due to lengths. The last column corrects the prediction by
what batches under `off` took while the server learned, as `auto` does.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median

import numpy as np
from tqdm import tqdm

from benchmarks.cost_model import rollout_seconds
from benchmarks.tables import markdown
from darts_client import Client, Group
from darts_server.control import Control
from darts_server.demo.problems import MAX_RESPONSE_TOKENS, sample_problem
from darts_server.demo.server import DARTS, serving
from darts_server.policy.latency import LatencyCurve, LatencyModel
from darts_server.policy.length_profile import LengthProfile
from darts_server.policy.lengths import PromptStats
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.batch import BatchPlan
from darts_server.policy.simulation.engines import Machine, StepTime
from darts_server.policy.simulation.forecast import Expectation
from darts_server.policy.simulation.rollout import simulate
from darts_server.settings import load
from darts_server.store.archive import LIMIT_BYTES, unpack
from darts_server.types import RequestOptions

SIZE = 8
PROMPTS = (8, 16, 40)
"""Of a batch. With the largest, candidates queue under every policy."""
MAX_NUM_SEQS = 128
POLICIES = ("off", "uniform", "darts", "darts_cut", "cap")
"""All whose outcome is predicted: not those that prune."""
LEARNING = 4
"""Batches of each size under `off`, of which the first one only warms up."""
RATIOS, SAMPLES = 4096, 24
STEP_SIZES = (1, 32, MAX_NUM_SEQS)
"""Of which it says what a step takes."""
MEDIAN, LARGEST = 0.10, 0.25
"""Wanted errors."""


@dataclass(frozen=True)
class Learned:
    """What a server knows.

    ``prompts``: by key; ``ratios``: equally likely ratios of a length to its prompt's mean; ``start_seconds``: what a
    candidate costs when it starts.
    """

    prompts: Mapping[str, PromptStats]
    ratios: np.ndarray
    curve: LatencyCurve
    start_seconds: float

    @classmethod
    def of_state(cls, data: bytes) -> "Learned":
        """Read a saved state.

        Raises:
            ValueError: it lacks lengths or step times.
        """
        rows = {(kind, key): json.loads(text) for kind, key, text in unpack(data, LIMIT_BYTES)}
        values = {name: json.loads(row["value"]) for name, row in rows.items() if "value" in row}
        ratios, curve, start = None, None, 0.0
        if (profile := values.get(("profile", "all"))) is not None:
            ratios = LengthProfile(**profile).quantiles(RATIOS)
        if (latency := values.get(("latency", "engine"))) is not None:
            model = LatencyModel(**latency)
            curve, start = model.curve, model.start_seconds or 0.0
        if ratios is None or curve is None:
            raise ValueError("the state lacks lengths or step times: the server needs more batches to learn from")
        prompts = {key: PromptStats(**row) for (kind, key), row in rows.items() if kind == "prompt"}
        return cls(prompts, ratios, curve, start)

    @property
    def machine(self) -> Machine:
        return Machine(StepTime(self.curve, per_start=self.start_seconds), max_num_seqs=MAX_NUM_SEQS)

    def seconds(self, shaping: Shaping | None, keys: Sequence[str], rng: np.random.Generator) -> float:
        """Predict the mean seconds of a rollout of prompts with these keys."""
        stats = [self.prompts[key] for key in keys]
        stds = [each.std_ema for each in stats]
        plan, expected = BatchPlan.of(shaping, SIZE, stds), [each.mean_ema for each in stats]
        expectation = Expectation(expected, stds, self.ratios, max_tokens=MAX_RESPONSE_TOKENS)
        batches = [batch for _ in range(SAMPLES) for batch in expectation.sample(max(plan.candidates), rng, most=1)]
        return fmean(simulate(batch, plan, self.machine).seconds for batch in batches)

    def replayed(self, groups: Sequence[Group]) -> float:
        """Return the seconds that these groups take by their tokens, those of stopped candidates too."""
        tokens = [n for group in groups for n in (*group.lengths, *(d.length for d in group.discarded))]
        return rollout_seconds(self.curve, tokens, MAX_NUM_SEQS) + self.start_seconds * len(tokens)

    def __str__(self) -> str:
        """Say what steps and starts take."""
        steps = ", ".join(f"{1000 * self.curve.step_seconds(batch):.2f} ms of {batch}" for batch in STEP_SIZES)
        return f"Learned: steps of {steps}; a candidate that starts {1000 * self.start_seconds:.2f} ms."


@dataclass
class Row:
    """Batches of one policy and size: seconds predicted, measured in each round, and of what each round generated."""

    policy: str
    prompts: int
    predicted: float
    candidates: list[int] = field(default_factory=list)  # of each batch
    measured: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        return self.predicted / fmean(self.measured) - 1

    @property
    def replay_error(self) -> float:
        return fmean(self.replayed) / fmean(self.measured) - 1

    def corrected(self, factor: float) -> float:
        """Return the error of the prediction times a factor."""
        return factor * (1 + self.error) - 1


def shaping_of(policy: str) -> Shaping | None:
    """Return what the server does under its default settings; ``None`` for `off`."""
    plan = Control(load({}, None)).new_planner(settings(policy)).plan(SIZE, RequestOptions())
    return None if plan is None else plan.shaping


def settings(policy: str) -> dict[str, object]:
    return {"name": policy, "exploration": 0.0}  # a batch that runs past its deadline is not what is predicted


def run_batch(client: Client, policy: str, texts: Sequence[str]) -> tuple[float, list[Group]]:
    start = time.perf_counter()
    groups = list(client.rollouts(texts, group_size=SIZE, max_tokens=MAX_RESPONSE_TOKENS, policy=settings(policy)))
    return time.perf_counter() - start, sorted(groups, key=lambda group: group.number)


def measure(client: Client, sizes: Sequence[int], rounds: int, state: Path) -> tuple[Learned, list[Row], float]:
    """Let the server learn, predict and measure; return what it learned, the rows and the correction by `off`."""
    rng = Random(3)
    texts = list(dict.fromkeys(sample_problem(rng).prompt for _ in range(4 * max(sizes))))[: max(sizes)]
    keys: dict[str, str] = {}
    learning: list[tuple[int, float]] = []
    for number in range(LEARNING):
        for prompts in (*sizes, max(sizes)):  # the largest twice: there each prompt is learned
            seconds, groups = run_batch(client, "off", texts[:prompts])
            learning += [(prompts, seconds)] * bool(number)
            keys |= {texts[group.number]: group.prompt_key or "" for group in groups}
    client.state.save(state)
    learned = Learned.of_state(state.read_bytes())
    draws = np.random.default_rng(4)
    rows = [
        Row(policy, prompts, learned.seconds(shaping_of(policy), [keys[text] for text in texts[:prompts]], draws))
        for prompts in sizes
        for policy in POLICIES
    ]
    for _ in tqdm(range(rounds), unit="round"):
        for row in rng.sample(rows, len(rows)):
            client.state.load(state)
            seconds, groups = run_batch(client, row.policy, texts[: row.prompts])
            row.measured.append(seconds)
            row.replayed.append(learned.replayed(groups))
            row.candidates.append(sum(len(group.lengths) + len(group.discarded) for group in groups))
    off = {row.prompts: row.predicted for row in rows if row.policy == "off"}
    return learned, rows, median(seconds / off[prompts] for prompts, seconds in learning)


def report(learned: Learned, rows: Sequence[Row], factor: float) -> str:
    """Format the table, and the errors last."""
    head = ["prompts", "policy", "candidates", "measured, s", "predicted", "error", "of what was generated", "error"]
    head.append("predicted, corrected")
    cells = [
        [
            str(row.prompts),
            row.policy,
            f"{fmean(row.candidates):.0f}",
            f"{fmean(row.measured):.3f} [{min(row.measured):.3f}, {max(row.measured):.3f}]",
            f"{row.predicted:.3f}",
            f"{row.error:+.0%}",
            f"{fmean(row.replayed):.3f}",
            f"{row.replay_error:+.0%}",
            f"{row.corrected(factor):+.0%}",
        ]
        for row in rows
    ]
    return "\n".join(
        [
            markdown(head, cells),
            "",
            str(learned),
            f"Of what was generated: {errors([row.replay_error for row in rows])}.",
            f"Predicted, times {factor:.3f}, by which off took longer before: "
            f"{errors([row.corrected(factor) for row in rows])}.",
            f"Predicted: {errors([row.error for row in rows])}. Wanted: {MEDIAN:.0%}, {LARGEST:.0%}.",
        ]
    )


def errors(values: Sequence[float]) -> str:
    sizes = [abs(value) for value in values]
    return f"median error {median(sizes):.1%}, largest {max(sizes):.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.prediction", description=__doc__, formatter_class=form)
    parser.add_argument("--rounds", type=int, default=6, help="batches of each policy and size (default: %(default)s)")
    sizes_help = "prompts of a batch (default: %(default)s)"
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), metavar="N", help=sizes_help)
    options = parser.parse_args(argv)
    if min(options.rounds, *options.prompts) < 1:
        parser.error("--rounds and --prompts must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        with (
            serving(DARTS, out / "server.log", "--max-num-seqs", str(MAX_NUM_SEQS)) as server,
            Client(server.url, timeout=300) as client,
        ):
            found = measure(client, options.prompts, options.rounds, out / "state")
    print(report(*found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
