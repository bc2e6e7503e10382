"""Runs the process of one model, and ends it when its time is over."""

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
"""Nothing is looked for elsewhere: the machine may reach nothing, and would wait for that."""
DRY_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
LOOK_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Between asking a process that took too long to end and ending it."""
LOG_LINES = 25


def measured(spec: Spec, limit: float, log: Path, say: Callable[[str], None]) -> Findings:
    """What the process found in ``limit`` seconds; it is ended then, with what it has."""
    out = Path(spec.out)
    out.unlink(missing_ok=True)
    environment = ENVIRONMENT | (DRY_ENVIRONMENT if spec.dry else {}) | os.environ
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.one_model", json.dumps(asdict(spec))],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the engine's processes belong to it, and end with it
        )
        try:
            late = not _ended(process, out, time.monotonic() + limit, say)
        finally:
            end(process)
    found = Findings.read(out) if out.exists() else Findings(spec.model)
    if late:
        found.error = f"the {limit:.0f} s that it had were over"
    elif process.returncode != 0:
        found.error = found.error or f"exit code {process.returncode}"
    if found.error is not None or any(table.failed for table in found.tables.values()):
        found.last_words = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return found


def _ended(process: "subprocess.Popen[bytes]", out: Path, deadline: float, say: Callable[[str], None]) -> bool:
    """Wait for its end, and say how far it is; whether it ended in time."""
    said: set[str] = set()
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        if out.exists():
            found = Findings.read(out)
            news = {f"engine started in {found.engine_seconds:.0f} s" if found.engine_seconds else "engine starts"}
            news |= {f"{name} done" for name, table in found.tables.items() if table.rows or table.notes}
            for text in sorted(news - said):
                say(f"{found.model}: {text}")
            said |= news
        time.sleep(LOOK_SECONDS)
    return True


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all of its session, if any of it is left."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
