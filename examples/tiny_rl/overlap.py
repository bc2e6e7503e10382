"""Compare log-probs computed during the rollout with log-probs computed afterwards, by the total time of both.

    OMP_NUM_THREADS=1 python -m examples.tiny_rl.overlap

Starts darts-server with the tiny model. A trainer computes the log-probs of the returned trajectories twice: after the
rollout, in forward passes over whole trajectories, and during the rollout, with `darts_client.overlap`. The trainer and
the engine share the cores. So token streams are also recorded, without any computation, and replayed in real time after
the server has stopped. Then the trainer has its core to itself, as if the rollout ran on another machine. Run it from
the root of the repository, with vLLM, the extra "dev", torch and clients/ installed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from statistics import median
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from darts_client import Client, DartsError, Event, Group, GroupEvent
from darts_client.overlap import Overlap
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, sample_problem
from darts_server.offline.demo.server import DARTS, MODEL, serving
from examples.tiny_rl.tokenizer import build_tokenizer

PROMPT_SEED = 8
BATCH_TOKENS = 512
"""Tokens of a forward pass: the fastest of 512 to 8192 for whole trajectories on one core."""

Rows = Sequence[tuple[str, Sequence[int], Sequence[int]]]
"""Trajectory id, prompt and completion."""


@dataclass(frozen=True)
class Round:
    """Seconds until all log-probs of a batch are computed. ``..._tail`` is the part after the last token."""

    sequential: float
    sequential_tail: float
    overlapped: float
    overlapped_tail: float
    error: float
    """Largest difference between the two results."""

    @property
    def ratio(self) -> float:
        return self.sequential / self.overlapped


@dataclass(frozen=True)
class Recording:
    """A recorded token stream: each event with its seconds after the request."""

    events: Sequence[tuple[float, Event]]

    def replay(self) -> Iterator[Event]:
        """Yield each event at its time."""
        start = time.perf_counter()
        for seconds, event in self.events:
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
            yield event


class Trainer:
    """The model and its training prompts."""

    def __init__(self, options: argparse.Namespace) -> None:
        causal_lm: Any = AutoModelForCausalLM
        self.model = causal_lm.from_pretrained(MODEL).eval()
        tokenizer = build_tokenizer()
        rng = Random(PROMPT_SEED)
        self.prompts = [tokenizer.encode(sample_problem(rng).prompt) for _ in range(options.prompts)]
        self.request: dict[str, Any] = {"group_size": options.group_size, "max_tokens": MAX_RESPONSE_TOKENS}
        self.chunk_tokens: int = options.chunk_tokens

    def run_live(self, client: Client, seed: int) -> Round:
        """Run both variants beside the engine, on the same prompts and seeds."""
        start = time.perf_counter()
        groups = list(client.rollouts(self.prompts, seed=seed, **self.request))
        rolled_out = time.perf_counter()
        forward_after(self.model, rows_of(groups, self.prompts))
        end = time.perf_counter()
        return self.run_overlapped(self.stream(client, seed), end - start, end - rolled_out)

    def record(self, client: Client, seed: int) -> Recording:
        """Record a stream without any computation."""
        start = time.perf_counter()
        return Recording([(time.perf_counter() - start, event) for event in self.stream(client, seed)])

    def replay(self, recording: Recording) -> Round:
        """Run both variants on a recorded stream, without an engine."""
        rows = rows_of((event.group for _, event in recording.events if isinstance(event, GroupEvent)), self.prompts)
        start = time.perf_counter()
        forward_after(self.model, rows)
        tail = time.perf_counter() - start
        return self.run_overlapped(recording.replay(), recording.events[-1][0] + tail, tail)

    def stream(self, client: Client, seed: int) -> Iterable[Event]:
        return client.stream_tokens(self.prompts, seed=seed, chunk_tokens=self.chunk_tokens, **self.request)

    def run_overlapped(self, events: Iterable[Event], sequential: float, sequential_tail: float) -> Round:
        """Compute log-probs while events arrive, and return a round with the given times of the sequential variant."""
        overlap = Overlap(self.model, batch_tokens=BATCH_TOKENS)
        start = time.perf_counter()
        for number, prompt in enumerate(self.prompts):
            overlap.add_prompt(number, prompt)
        groups, streamed = follow(overlap, events)
        end = time.perf_counter()
        rows = rows_of(groups, self.prompts)
        expected = forward_after(self.model, rows)
        error = max(float((overlap.logprobs(name) - expected[name]).abs().max()) for name, _, _ in rows)
        return Round(sequential, sequential_tail, end - start, end - streamed, error)


def follow(overlap: Overlap, events: Iterable[Event]) -> tuple[list[Group], float]:
    """Read events in a thread, and forward while no event waits. Return the groups and the end of the stream."""
    arrived: SimpleQueue[tuple[float, Event | Exception | None]] = SimpleQueue()
    Thread(target=read, args=(events, arrived), daemon=True).start()
    groups: list[Group] = []
    while True:
        while overlap.pending_tokens and arrived.empty():
            overlap.step()
        when, event = arrived.get()
        if event is None:
            break
        if isinstance(event, Exception):
            raise event
        overlap.add_event(event)
        if isinstance(event, GroupEvent):
            groups.append(event.group)
    while overlap.pending_tokens:
        overlap.step()
    return groups, when


def read(events: Iterable[Event], arrived: "SimpleQueue[tuple[float, Event | Exception | None]]") -> None:
    """Put each event with its arrival time into the queue, then the error if the stream failed, then ``None``."""
    try:
        for event in events:
            arrived.put((time.perf_counter(), event))
    except Exception as exc:
        arrived.put((time.perf_counter(), exc))
    arrived.put((time.perf_counter(), None))


def rows_of(groups: Iterable[Group], prompts: Sequence[Sequence[int]]) -> Rows:
    """Return a row for each trajectory of the groups."""
    return [
        (trajectory.trajectory_id or "", prompts[group.number or 0], trajectory.token_ids)
        for group in groups
        for trajectory in group.trajectories
    ]


@torch.no_grad()
def forward_after(model: Any, rows: Rows, batch_tokens: int = BATCH_TOKENS) -> dict[str, Tensor]:
    """Return the log-probs of each completion, from forward passes over rows of similar length."""
    logprobs = {}
    for part in parts_of(sorted(rows, key=lambda row: len(row[1]) + len(row[2])), batch_tokens):
        width = max(len(prompt) + len(completion) for _, prompt, completion in part)
        tokens = torch.zeros((len(part), width), dtype=torch.long)
        # Padding at the end needs no mask, because attention is causal.
        for row, (_, prompt, completion) in enumerate(part):
            tokens[row, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
        logits = model(input_ids=tokens).logits
        for row, (name, prompt, completion) in enumerate(part):
            scores = logits[row, len(prompt) - 1 : len(prompt) + len(completion) - 1].log_softmax(-1)
            logprobs[name] = scores[range(len(completion)), list(completion)]
    return logprobs


def parts_of(rows: Rows, batch_tokens: int) -> Iterator[Rows]:
    """Split sorted rows into parts of at most ``batch_tokens``, with padding."""
    part: list[tuple[str, Sequence[int], Sequence[int]]] = []
    for row in rows:
        if part and (len(part) + 1) * (len(row[1]) + len(row[2])) > batch_tokens:
            yield part
            part = []
        part.append(row)
    yield part


ROWS: tuple[tuple[str, Callable[[Round], float]], ...] = (
    ("sequential (s)", lambda r: r.sequential),
    ("  after the last token", lambda r: r.sequential_tail),
    ("overlapped (s)", lambda r: r.overlapped),
    ("  after the last token", lambda r: r.overlapped_tail),
    ("ratio", lambda r: r.ratio),
)


def table(live: Sequence[Round], replayed: Sequence[Round]) -> Table:
    """Return the table of medians over the rounds."""
    caption = "Medians. Ratio: sequential over overlapped time of a round; above 1, overlapping saves time."
    result = Table("", title=f"Rollout and log-probs, {len(live)} rounds", caption=caption)
    for column in ("cores shared with the engine", "replay, without the engine"):
        result.add_column(column, justify="right")
    for name, value in ROWS:
        result.add_row(name, f"{median(map(value, live)):.3f}", f"{median(map(value, replayed)):.3f}")
    result.add_row("  lowest .. highest", _spread(live), _spread(replayed))
    return result


def _spread(rounds: Sequence[Round]) -> str:
    ratios = [r.ratio for r in rounds]
    return f"{min(ratios):.2f} .. {max(ratios):.2f}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.tiny_rl.overlap", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--prompts", type=int, default=32, metavar="N", help="groups in a rollout (default: %(default)s)")
    add("--group-size", type=int, default=8, metavar="N", help="trajectories a group (default: %(default)s)")
    add("--chunk-tokens", type=int, default=100, metavar="N", help="minimum tokens in an event (default: %(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="rollouts of each kind (default: %(default)s)")
    add("--log", type=Path, default=Path("out/overlap/server.log"), help="the server's log (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print. Exits with a message if the server or the rollout fails."""
    options = arguments(argv)
    torch.set_num_threads(1)
    trainer = Trainer(options)
    seeds = range(1, options.rounds + 1)
    try:
        with serving(DARTS, options.log) as server, Client(server.url) as client:
            # A warm-up, because an engine's first requests take seconds.
            trainer.run_live(client, seed=0)
            live = [trainer.run_live(client, seed) for seed in seeds]
            recordings = [trainer.record(client, seed) for seed in seeds]
    except (DartsError, RuntimeError) as error:
        sys.exit(f"overlap: {error}\nThe server's log is {options.log}")
    replayed = [trainer.replay(recording) for recording in recordings]
    difference = max(r.error for r in live + replayed)
    console = Console()
    console.print(table(live, replayed))
    console.print(f"Largest difference between log-probs of the two variants: {difference:.1e}")


if __name__ == "__main__":
    main()
