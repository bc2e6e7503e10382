"""Run the process of one model, and stop it when its time is over."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.one_model import Findings, Spec

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


def run_child(spec: Spec, limit: float, log: Path, progress: Callable[[str], None]) -> Findings:
    """Run the process for at most ``limit`` seconds; return what it found until then."""
    out = Path(spec.out)
    out.unlink(missing_ok=True)
    environment = ENVIRONMENT | (DRY_ENVIRONMENT if spec.dry else {}) | os.environ
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.one_model", json.dumps(asdict(spec))],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the engine's processes belong to the session, and are stopped with it
        )
        try:
            timed_out = not _wait(process, out, time.monotonic() + limit, progress)
        finally:
            stop(process)
    found = Findings.read(out) if out.exists() else Findings(spec.model)
    if timed_out:
        found.error = f"stopped after its {limit:.0f} s"
    elif process.returncode != 0:
        found.error = found.error or f"exit code {process.returncode}"
    if found.error is not None or any(table.failed for table in found.tables.values()):
        found.log_tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return found


def _wait(process: "subprocess.Popen[bytes]", out: Path, deadline: float, progress: Callable[[str], None]) -> bool:
    """Wait for the process and report its progress; return whether it exited in time."""
    reported: set[str] = set()
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        if out.exists():
            found = Findings.read(out)
            news = {
                f"engine started in {found.engine_seconds:.0f} s" if found.engine_seconds else "starting the engine"
            }
            news |= {f"{name} done" for name, table in found.tables.items() if table.rows or table.notes}
            for text in sorted(news - reported):
                progress(f"{found.model}: {text}")
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
