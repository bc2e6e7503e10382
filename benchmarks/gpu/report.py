"""The report in Markdown, with the facts about the machine and a picture of each rollout."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.gpu.card import Card
from benchmarks.gpu.plan import PLAIN
from benchmarks.gpu.results import Findings, Table
from darts_server.vllm.compat import vllm_version

ROOT = Path(__file__).resolve().parents[2]
GIT_SECONDS = 10.0
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
COLUMNS = 3
SMALL = 9

Timeline = Sequence[tuple[float, int]]


def markdown(
    about: Mapping[str, object],
    models: Sequence[Findings],
    pictures: Mapping[tuple[str, str], str],
    notes: Sequence[str],
) -> str:
    """Format the whole report. ``pictures``: file by model and table."""
    facts = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items() if value is not None)]
    parts = ["# Shaped rollouts on this machine", "\n".join(facts), *notes]
    # Each policy's time relative to plain vLLM's, by model and number of prompts.
    overview = Table("Time until all groups are complete, relative to plain vLLM", {"model": "", "prompts": ""})
    overview.note(
        "Below 1 is faster. Plain vLLM ran twice; its faster run is 1, and the difference between the two is noise."
    )
    for found in models:
        for name, table in found.tables.items():
            times = {str(row["policy"]): row["ratio to plain"] for row in table.rows if "ratio to plain" in row}
            if times:
                overview.columns |= dict.fromkeys(times, ".2f")
                overview.rows.append({"model": found.model, "prompts": name.removeprefix("rollouts-"), **times})
    if overview.rows:
        parts.append(overview.markdown("##"))
    for found in models:
        parts.append(f"## {found.model}")
        if found.engine_seconds is not None:
            parts.append(f"Weights are random. The engine took {found.engine_seconds:.0f} s to start.")
        if found.error is not None:
            parts.append(f"**Stopped: {found.error}**")
        if found.log_tail:
            parts.append(f"The end of its log:\n\n```\n{found.log_tail}\n```")
        for name, table in found.tables.items():
            if table.rows or table.notes:
                parts.append(table.markdown())
            if (found.model, name) in pictures:
                parts.append(f"![Running sequences under each policy]({pictures[found.model, name]})")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def about(card: Card) -> dict[str, object]:
    """Return facts by name, ``None`` where one is unknown."""
    try:
        own = version("darts-server")
    except PackageNotFoundError:
        own = None
    commit = _git("rev-parse", "--short=12", "HEAD")
    return {
        "card": card.name,
        "memory": f"{card.memory / 2**30:.0f} GiB",
        "copy bandwidth": f"{card.bandwidth / 1e12:.3f} TB/s (read and written bytes)",
        "CUDA": card.cuda,
        "torch": card.torch,
        "vLLM": vllm_version(),
        "Python": platform.python_version(),
        "darts-server": own,
        "commit": commit and f"{commit}{' with local changes' if _git('status', '--porcelain') else ''}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _git(*args: str) -> str | None:
    """Return what git prints; ``None`` without git or its data."""
    command = ["git", "-C", str(ROOT), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and (ROOT / ".git").exists() else None


def draw(table: Table, timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw the number of running sequences over the rollouts of a table, one panel for each policy.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    rows: dict[str, Any] = {str(row["policy"]): row for row in table.rows}
    shown = [policy for policy in rows if timelines.get(policy)]
    count = ceil(len(shown) / COLUMNS)
    figure = Figure(figsize=(10.5, 1.2 + 2.5 * count), dpi=110, layout="constrained")
    panels = figure.subplots(count, COLUMNS, squeeze=False)
    longest = max(rows[policy]["seconds"] for policy in shown)
    largest = max(batch for policy in shown for _, batch in timelines[policy])
    stairs = {}
    for policy in shown:  # the corners of a staircase, from 0 to the end
        timeline = timelines[policy]
        points = [(0.0, timeline[0][1]), *timeline, (rows[policy]["seconds"], 0)]
        stairs[policy] = [at for at, _ in points], [batch for _, batch in points]
    for axes in list(panels.flat)[len(shown) :]:
        axes.set_visible(False)
    for axes, policy in zip(panels.flat, shown, strict=False):
        row = rows[policy]
        if policy != PLAIN and PLAIN in stairs:
            axes.step(*stairs[PLAIN], where="post", color=GREY, linewidth=1.1)
        axes.fill_between(*stairs[policy], step="post", color=BLUE, alpha=0.75, linewidth=0)
        axes.axvline(row["seconds"], color=ORANGE, linewidth=1.4)
        ratio = row["ratio to plain"]
        relative = "" if ratio is None or policy == PLAIN else f" ({ratio:.2f} x plain)"
        wasted = f"{row['wasted'] / max(1, row['generated']):.0%} of the tokens wasted"
        axes.set_title(f"{row['seconds']:.2f} s{relative}, {wasted}", loc="left", fontsize=SMALL, color=GREY)
        axes.annotate(
            policy, (0, 1), (0, 18), "axes fraction", textcoords="offset points", fontsize=11, fontweight="bold"
        )
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
        axes.set(xlim=(0, 1.02 * longest), ylim=(0, 1.05 * largest))
    figure.supxlabel("seconds (orange: all groups are complete; grey line: plain vLLM)", fontsize=10)
    figure.supylabel("running sequences", fontsize=10)
    figure.savefig(path)
