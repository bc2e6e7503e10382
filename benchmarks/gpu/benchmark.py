"""Run the benchmark: measure the card, then one model after the other, and write the report."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.card import Card, probe
from benchmarks.gpu.cli import Options, arguments
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.plan import Budget
from benchmarks.gpu.report import about, draw, markdown
from benchmarks.gpu.results import Findings, Spec

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""No network: the machine may have none, and lookups would wait for their timeouts."""
DRY_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL for a process that took too long."""
LOG_LINES = 25
REPORT_SECONDS = 8.0
"""Time for pictures and report."""
END_SECONDS = 8.0
"""Time for an engine to stop."""
DOUBLE_TIME_PARAMETERS = 25e9
"""A model of this size gets twice the time of a tiny one."""
MAX_WEIGHTS_SHARE = 0.8
"""Share of the card's memory that weights may take: the KV cache needs the rest."""


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(sys.argv[1:] if argv is None else argv)
    budget = Budget(60 * options.minutes)
    try:
        card = probe()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if not card.is_gpu and not options.dry:
        print("There is no NVIDIA GPU that torch can use here; --dry runs on the CPU.", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    print_progress(f"{card.name}: copies {card.bandwidth / 1e12:.2f} TB/s")
    sizes = {name: SHAPES[name].parameters if name in SHAPES else 0.0 for name in options.models}
    weights = {name: 1 + parameters / DOUBLE_TIME_PARAMETERS for name, parameters in sizes.items()}
    shares = Budget(budget.remaining - REPORT_SECONDS).split(weights)
    found = [measure_model(name, options, card, share) for name, share in shares]
    print(report(options, card, found))
    complete = not any(model.error or any(table.failed for table in model.tables.values()) for model in found)
    return 0 if complete else 1


def measure_model(name: str, options: Options, card: Card, budget: Budget) -> Findings:
    """Measure one model in a process of its own, within the budget; return what it found until then."""
    if name in SHAPES and SHAPES[name].weight_bytes > MAX_WEIGHTS_SHARE * card.memory:
        return Findings(name, error=f"its {SHAPES[name].weight_bytes / 1e9:.0f} GB of weights do not fit this card")
    limit, out, log = budget.remaining - GRACE_SECONDS, options.out / f"{name}.json", options.out / f"{name}.log"
    print_progress(f"{name}: starting the engine, {limit:.0f} s for everything")
    out.unlink(missing_ok=True)
    # This process owns the folder: the child may be killed before it has removed gigabytes.
    with (
        TemporaryDirectory(prefix="model-", dir=options.out.resolve(), ignore_cleanup_errors=True) as folder,
        log.open("wb") as output,
    ):
        spec = Spec(name, folder, str(out), limit - END_SECONDS, card.bandwidth, options)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.one_model", json.dumps(asdict(spec), default=str)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | (DRY_ENVIRONMENT if options.dry else {}) | os.environ,
            start_new_session=True,  # the engine's processes belong to the session, and are stopped with it
        )
        try:
            in_time = wait(process, out, time.monotonic() + limit)
        finally:
            stop(process)
    found = Findings.read(out) if out.exists() else Findings(name)
    if not in_time:
        found.error = f"stopped after its {limit:.0f} s"
    elif process.returncode != 0:
        found.error = found.error or f"exit code {process.returncode}"
    if found.error is not None or any(table.failed for table in found.tables.values()):
        found.log_tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return found


def wait(process: "subprocess.Popen[bytes]", out: Path, deadline: float) -> bool:
    """Wait for the process and report its progress; return whether it exited in time."""
    reported: set[str] = set()
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        if out.exists():
            found = Findings.read(out)
            started = found.engine_seconds
            news = {f"engine started in {started:.0f} s" if started else "starting the engine"}
            news |= {f"{name} done" for name, table in found.tables.items() if table.rows or table.notes}
            for text in sorted(news - reported):
                print_progress(f"{found.model}: {text}")
            reported |= news
        time.sleep(POLL_SECONDS)
    return True


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and everything in its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(options: Options, card: Card, found: Sequence[Findings]) -> str:
    """Write results.json, results.md and the pictures; return the Markdown."""
    facts, notes = about(card), list[str]()
    pictures: dict[tuple[str, str], str] = {}
    if options.dry:
        notes.append("**Dry run: a tiny model on a CPU. It shows that everything works; its figures mean nothing.**")
    for model in found:
        for table, timelines in model.timelines.items():
            name = f"{table}-{model.model}.png"
            try:
                if timelines:
                    draw(model.tables[table], timelines, options.out / name)
                    pictures[model.model, table] = name
            except ImportError:
                notes.append("Pictures were left out: matplotlib is not installed.")
    result = {"about": facts, "options": asdict(options), "models": [asdict(model) for model in found]}
    (options.out / "results.json").write_text(json.dumps(result, indent=1, default=str))
    text = markdown(facts, found, pictures, list(dict.fromkeys(notes)))
    (options.out / "results.md").write_text(text)
    return text


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
