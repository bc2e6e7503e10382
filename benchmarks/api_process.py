"""Compare the CPU time of the API process per generated token: vLLM's own server, this one unshaped, and shaped.

    python -m benchmarks.api_process

Both servers run at the same time on the same machine and take turns, round by round, so that other load on the machine
affects all rows. In every round as many candidates generate as many tokens each (``ignore_eos``), in groups of 8 over
HTTP: shaped groups have 12 candidates for 8 that are returned, so a round has fewer of them. "Batch" is a batch of
``POST /darts/v1/rollouts`` of the same groups.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.overhead import SCHEDULER, Round, measure, measure_batch, print_progress
from benchmarks.tables import markdown, quartiles
from darts_server.offline.demo.server import DARTS, PLAIN, Server, serving

REDUNDANCY = 1.5
LOGPROBS = (None, 0, 1)
PLAIN_ROW, RAW, SHAPED, BATCH = "vLLM's own server", "this one, unshaped", "shaped", "shaped, batch"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.api_process", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each row and column (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="shaped groups a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a candidate (default: %(default)s)")
    options = parser.parse_args(argv)
    logs = Path("out/api_process")
    with (
        serving(PLAIN, logs / "plain.log", *SCHEDULER) as plain,
        serving(DARTS, logs / "darts.log", *SCHEDULER, "--policy", "uniform", "--redundancy", str(REDUNDANCY)) as darts,
    ):
        cells: dict[tuple[str, int | None], list[float]] = {}
        for number in range(options.rounds + 1):
            for logprobs in LOGPROBS:
                rows = [PLAIN_ROW, RAW, SHAPED, BATCH]
                for row in rows if number % 2 else rows[::-1]:
                    cost = measure_row(row, plain, darts, logprobs, options.groups, options.tokens).cpu_per_token * 1e6
                    if number:  # the first round warms up
                        cells.setdefault((row, logprobs), []).append(cost)
            if number:
                shown = ", ".join(f"{row} {cells[row, 0][-1]:.1f}" for row in (PLAIN_ROW, SHAPED))
                print_progress(number - 1, options.rounds, f"us a token with log-probs: {shown}")
    print(report(cells))
    return 0


def measure_row(row: str, plain: Server, darts: Server, logprobs: int | None, groups: int, tokens: int) -> Round:
    """Run one round of a row."""
    sampling: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True, "logprobs": logprobs}
    if row == BATCH:
        return measure_batch(darts, groups, sampling)
    server, model = {PLAIN_ROW: (plain, "tiny"), RAW: (darts, "tiny:raw"), SHAPED: (darts, "tiny")}[row]
    return measure(server, model, groups if row == SHAPED else round(groups * REDUNDANCY), sampling)


def report(cells: dict[tuple[str, int | None], list[float]]) -> str:
    """Format the table: medians with quartiles, and the ratio to vLLM's own server in the same rounds."""
    rows = []
    for row in (PLAIN_ROW, RAW, SHAPED, BATCH):
        shown = [row]
        for logprobs in LOGPROBS:
            ratios = [a / b for a, b in zip(cells[row, logprobs], cells[PLAIN_ROW, logprobs], strict=True)]
            ratio = "" if row == PLAIN_ROW else f", x {statistics.median(ratios):.2f}"
            shown.append(quartiles(cells[row, logprobs], 1) + ratio)
        rows.append(shown)
    return markdown(["CPU us per generated token", *(f"`logprobs` {one}" for one in LOGPROBS)], rows)


if __name__ == "__main__":
    sys.exit(main())
