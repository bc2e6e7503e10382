"""Measure how many answers verifiers verify, and whether a slow verifier delays a fast one.

    python -m benchmarks.verifiers
    python -m benchmarks.verifiers --processes 1 2

The first table has verifications a second of each kind of verifier, with all answers waiting, and the processor time of
the server and of the verifier's processes for one answer. Texts have as many characters as ``--chars``, and end with
the answer. The second table has the time of single calls of a fast verifier, alone and beside a verifier that takes two
seconds for each of its answers, of which many wait.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.tables import markdown
from darts_server.types import PromptSpec
from darts_server.verify.specs import parse_specs
from darts_server.verify.types import NO_VERDICT, Answer
from darts_server.verify.verifiers import VerifierLimits, Verifiers

CODE = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str[-20:])


def trl_reward(completions, answer, **columns):
    return [float(right in text[-20:]) for text, right in zip(completions, answer)]


def slow(solution_str, **columns):
    time.sleep(2)
    return 1.0
"""
METADATA = b'{"answer": "42", "ground_truth": "42", "data_source": "sums"}'
SEEN = "Then 6 times {7} is forty-two. "
END = r"The answer is \boxed{42}"
ROUND = 1024
"""Answers that are given at the same time, as if several batches had ended."""
CALLS = 200


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.verifiers", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each measurement (default: %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="processes of a verifier (default: 1)")
    parser.add_argument("--chars", type=int, nargs="+", default=[100, 10_000], help="lengths of answers")
    options = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rewards.py"
        file.write_text(CODE)
        kinds = {
            "regex": r"regex:is \\boxed\{(\d+)\}",
            "boxed": "boxed",
            "veRL's function": f"{file}:compute_score",
            "TRL's function": f"{file}:trl_reward",
            "math-verify": "math-verify",
        }
        rows = []
        for processes in options.processes:
            for chars in options.chars:
                for kind, spec in kinds.items():
                    figures = asyncio.run(measure_rate(spec, chars, processes, options.seconds))
                    rows.append([kind, f"{chars:,}", f"{processes}", *figures])
                    print(rows[-1], file=sys.stderr)
        head = ["verifier", "characters", "processes", "verifications/s", "server (µs)", "processes (µs)"]
        print(markdown(head, rows))
        print()
        print(asyncio.run(measure_delay(file)))
    return 0


def answer_of(chars: int) -> Answer:
    text = (SEEN * (chars // len(SEEN) + 1))[: max(0, chars - len(END))] + END
    return Answer(PromptSpec(text="6*7=", metadata=METADATA), text, list(range(chars // 4)))


async def measure_rate(spec: str, chars: int, processes: int, seconds: float) -> list[str]:
    """Return verifications per second, and microseconds of the server and of the processes for one answer."""
    verifiers = Verifiers(parse_specs([spec]), VerifierLimits(processes=processes))
    await verifiers.start()
    try:
        answer = answer_of(chars)
        verdicts = await asyncio.gather(*(verifiers.verify(answer) for _ in range(ROUND)))
        assert NO_VERDICT not in verdicts

        count = 0
        began = time.monotonic()
        used = os.times()
        of_processes = children_seconds()
        while time.monotonic() < began + seconds:
            await asyncio.gather(*(verifiers.verify(answer) for _ in range(ROUND)))
            count += ROUND
        took = time.monotonic() - began
        server = sum(os.times()[:2]) - sum(used[:2])
        worked = children_seconds() - of_processes
    finally:
        await verifiers.close()
    return [f"{count / took:,.0f}", f"{server / count * 1e6:.0f}", f"{worked / count * 1e6:.0f}"]


def children_seconds() -> float:
    """Return the processor time of living processes that this process has started, and of their children."""
    seconds = 0.0
    parents = {os.getpid()}
    rows = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent, *rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        rows.append((int(stat.parent.name), int(parent), sum(map(int, rest[9:11]))))
    # A process has a higher id than its parent, unless the ids have begun again.
    for pid, parent_id, ticks in sorted(rows):
        if parent_id in parents:
            parents.add(pid)
            seconds += ticks / os.sysconf("SC_CLK_TCK")
    return seconds


async def measure_delay(file: Path) -> str:
    rows = []
    specs = ["boxed", f"{file}:slow"]
    for waiting in (0, 64):
        verifiers = Verifiers(parse_specs(specs), VerifierLimits(processes=2))
        await verifiers.start()
        tasks = [asyncio.create_task(verifiers.verify(answer_of(100), ["slow"])) for _ in range(waiting)]
        await asyncio.sleep(1)
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            await verifiers.verify(answer_of(100), ["boxed"])
            times.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await verifiers.close()
        times.sort()
        rows.append([f"{waiting}", f"{statistics.median(times):.2f}", f"{times[int(0.99 * CALLS)]:.2f}"])
    return markdown(["answers of the slow verifier that wait", "boxed, median (ms)", "99th percentile (ms)"], rows)


if __name__ == "__main__":
    sys.exit(main())
