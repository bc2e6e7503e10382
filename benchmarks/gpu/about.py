"""Describe the machine, the versions and the date that the figures belong to."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu.card import Card
from darts_server.vllm.compat import vllm_version

ROOT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 10.0


def about(card: Card) -> dict[str, object]:
    """Return facts by name, ``None`` where one is unknown."""
    return {
        "card": card.name,
        "memory": f"{card.memory / 2**30:.0f} GiB",
        "copy bandwidth": f"{card.bandwidth / 1e12:.3f} TB/s (read and written bytes)",
        "CUDA": card.cuda,
        "torch": card.torch,
        "vLLM": vllm_version(),
        "Python": platform.python_version(),
        "darts-server": _own_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _own_version() -> str | None:
    try:
        return version("darts-server")
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the checked-out commit; ``None`` without git or its data."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return f"{head} with local changes" if _git("status", "--porcelain") else head


def _git(*args: str) -> str | None:
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
