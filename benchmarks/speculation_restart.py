"""What drafts bring in the third epoch of a server that is restarted before it, and of two engines.

    python -m benchmarks.speculation_restart
    python -m benchmarks.speculation_restart --rounds 1

All servers run the tiny model with ``--speculate auto``, one after the other, and answer the same prompts.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from time import perf_counter

from tqdm import tqdm

from benchmarks.speculation import METHODS, decode_steps, draw
from benchmarks.tables import markdown
from darts_server.offline.demo.problems import Problem, sample_problem
from darts_server.offline.demo.server import DARTS, serving

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PATIENCE_SECONDS = 1200.0
"""Seconds that a start may take while other programs run."""
NO_HISTORY = ("--history-bytes", "0")
TWO_ENGINES = ("--data-parallel-size", "2")
CASES: Mapping[str, tuple[bool, Sequence[str]]] = {
    "one server": (False, ()),
    "restarted": (True, ()),
    "restarted, without history": (True, NO_HISTORY),
    "two engines": (False, TWO_ENGINES),
    "two engines, without history": (False, (*TWO_ENGINES, *NO_HISTORY)),
}
"""Whether the server is restarted before the third epoch, and its flags."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.speculation_restart", description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server (default: %(default)s)")
    options = parser.parse_args(argv)
    rng = Random(0)
    print(restarts([sample_problem(rng) for _ in range(options.prompts)], options.rounds))
    return 0


def restarts(problems: Sequence[Problem], rounds: int) -> str:
    """Return a table of the decode steps and seconds of a third epoch, in each round."""
    root = Path("out/speculation")
    saved = root / "two epochs"
    rows = []
    with tqdm(total=1 + len(CASES) * rounds, unit="server") as bar:
        measure_epochs(problems, 2, saved, ())
        bar.update()
        for name, (restart, flags) in CASES.items():
            measured = []
            for number in range(rounds):
                epochs = 1 if restart else 3
                found = measure_epochs(problems, epochs, root / f"{name} {number}", flags, saved if restart else None)
                measured.append(found[-1])
                bar.update()
            rows.append(
                [name, *(", ".join(f"{value:.3g}" for value in values) for values in zip(*measured, strict=True))]
            )
    return markdown(["server", "tokens of a sequence in a step of the third epoch", "steps", "seconds"], rows)


def measure_epochs(
    problems: Sequence[Problem],
    epochs: int,
    folder: Path,
    flags: Sequence[str],
    saved: Path | None = None,
) -> list[tuple[float, float, float]]:
    """Measure the epochs of a new server, which has the state in ``saved``.

    Returns tokens of a sequence in a step, decode steps, and seconds. Steps are those of the longest answer, and so
    vary more than tokens.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if saved is None:
        folder.mkdir(parents=True)
    else:
        shutil.copytree(saved, folder)
    measured = []
    with serving(
        DARTS, folder / "log", *METHODS["auto"], "--state-dir", str(folder), *flags, patience=PATIENCE_SECONDS
    ) as server:
        # Prompts of no epoch, so that nothing is measured that only the first requests of a server take.
        draw(server, [sample_problem(Random(1))], {"max_tokens": 2})
        for _ in range(epochs):
            before = decode_steps(server)
            accepted = server.metric(ACCEPTED)
            begin = perf_counter()
            answers = draw(server, problems, {})
            seconds = perf_counter() - begin
            tokens = sum(len(answer.token_ids) for answer in answers)
            accepted = server.metric(ACCEPTED) - accepted
            measured.append((tokens / (tokens - accepted), decode_steps(server) - before, seconds))
    return measured


if __name__ == "__main__":
    sys.exit(main())
