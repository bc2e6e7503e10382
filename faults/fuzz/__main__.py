"""Fuzz a server of its own with the tiny model: mutated requests on every route, and sequences of requests.

python -m faults.fuzz --requests 100000
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm

from darts_server.demo.server import DARTS, Server, launch, serving
from faults.__main__ import open_folder
from faults.fuzz.fuzzer import (
    DEATH,
    HANG,
    MAX_GROWTH_MB,
    NO_ANSWER,
    NOT_SERVED,
    STALL,
    UNBALANCED,
    Failure,
    Fuzzer,
    Tally,
)
from faults.fuzz.uploads import write_weights_root
from tests.integration.fork_server import Forks, ForkServer, can_fork

WEIGHTS_SECONDS = "1"
"""Timeouts of updates: a sequence may leave one unfinished."""
FLAGS = (
    *("--enable-scale-out", "--group-wait", "0.2", "--group-name-wait", "1", "--weights-wait", WEIGHTS_SECONDS),
    *("--resume-seconds", "2", "--weights-timeout", WEIGHTS_SECONDS),
    *("--max-model-len", "160"),  # the longest request takes that many steps of the engine, and others wait for it
    *("--worker-extension-cls", "tests.integration.backend.Extension"),
    *("--weight-transfer-config", '{"backend": "file"}'),
)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}


class OwnServer:
    """A server that is started again whenever it must be."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "weights"
        self._folder, self._started = folder, 0
        write_weights_root(self.root)
        self._fork_server = ForkServer() if can_fork() else None
        self._launch = launch if self._fork_server is None else Forks(self._fork_server.address).launch
        self._life = ExitStack()
        self.restart()

    @property
    def server(self) -> Server:
        return self._server

    def restart(self) -> None:
        self._life.close()
        self._started += 1
        staging = self._folder / f"staging-{self._started}"
        staging.mkdir()
        folders = ("--weights-root", str(self.root), "--weights-staging", str(staging))
        log = self._folder / f"server-{self._started}.log"
        start = partial(serving, launch=self._launch)
        self._server = self._life.enter_context(start(DARTS, log, *FLAGS, *folders, env=ENVIRONMENT))

    def close(self) -> None:
        self._life.close()
        if self._fork_server is not None:
            self._fork_server.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m faults.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the first round (default: by the clock)")
    parser.add_argument("--folder", type=Path, help="for logs and bodies of failures (default: a temporary one)")
    options = parser.parse_args(argv)
    first_seed = int(time.time()) if options.seed is None else options.seed
    console = Console(stderr=True)
    console.print(f"seed {first_seed}")
    bar = tqdm(total=options.requests, unit="request", smoothing=0.05)

    def print_failure(failure: Failure) -> None:
        bar.write(str(failure), file=sys.stderr)

    with (
        bar,
        open_folder(options.folder) as folder,
        closing(OwnServer(folder)) as target,
        Fuzzer(target, folder, found=print_failure, sent=lambda sent: bar.update(sent - bar.n)) as fuzzer,
    ):
        tally = fuzzer.run(first_seed, options.requests)
    report(Console(), tally)
    return 0 if tally.survived else 1


def report(console: Console, tally: Tally) -> None:
    """Print what was answered on each route, the failures, and what happened to the server."""
    answers = Table(Column("route", no_wrap=True), "requests", "of these by status", title="Answers")
    for route in sorted({route for route, _ in tally.answers}):
        counts = {status: count for (each, status), count in sorted(tally.answers.items()) if each == route}
        answers.add_row(route, str(sum(counts.values())), ", ".join(f"{s}: {count}" for s, count in counts.items()))
    console.print(answers)
    for failure in tally.failures:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
    growth = "run longer to measure it" if tally.growth is None else f"{tally.growth:+.0f} (limit {MAX_GROWTH_MB:.0f})"
    summary = Table("", "", show_header=False)
    for name, value in {
        "requests": tally.requests,
        "seconds": f"{tally.seconds:.0f}",
        "deaths": tally.count(DEATH),
        "hangs": tally.count(HANG, NO_ANSWER),
        "servers started again": tally.restarts,
        "stalls of /health": tally.count(STALL),
        "stalls that did not repeat": tally.single_stalls,
        "longest /health, s": f"{tally.longest_health:.2f}",
        "counters unbalanced": tally.count(UNBALANCED),
        "plain group not served": tally.count(NOT_SERVED),
        "failures of different kinds": len(tally.failures),
        "memory growth, MB": growth,
    }.items():
        summary.add_row(name, str(value))
    console.print(summary)
    console.print("survived" if tally.survived else "NOT survived")


if __name__ == "__main__":
    sys.exit(main())
