"""The table of `darts-server simulate`, and the same for programs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from darts_server.policy.simulation.machine import Machine
from darts_server.simulation.training import Setting, Summary


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "policy": ("policy", str),
    "rollout_seconds": ("rollout s", _number(1)),
    "training_seconds": ("train s", _number(1)),
    "step_seconds": ("step s", _number(1)),
    "step_speedup": ("step x", _number(2)),
    "rollout_speedup": ("rollout x", _number(2)),
    "tokens_generated": ("generated", _number(2)),
    "tokens_returned": ("returned", _number(2)),
    "tokens_wasted": ("wasted", _number(2)),
    "idle_share": ("idle", _share),
    "length_bias": ("length", _signed),
    "effective_sample_size": ("ESS", _number(2)),
    "truncated_share": ("truncated", _share),
    "stale_share": ("stale", _share),
    "notes": ("", str),
}
LEGEND = """\
step x, rollout x: times as fast as off. generated, returned, wasted: tokens over those that off generates. idle:
places of an engine that are empty, of the most it used. length: of what is returned, against off. ESS: effective sample
size of the weights over the group size; empty where some candidates can never be returned. stale: returned tokens that
older weights generated. N: prompts of a step; with start=1.25, 1.25 N are started, and the first N complete groups are
returned."""


def table(summaries: Sequence[Summary]) -> str:
    """Format summaries as lines of text."""
    rows = [[title for title, _ in COLUMNS.values()]]
    rows += [[form(getattr(summary, name)) for name, (_, form) in COLUMNS.items()] for summary in summaries]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def document(workload: str, setting: Setting, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Build what ``--json`` writes."""
    return {
        "workload": workload,
        "group_size": setting.size,
        "prompts": setting.prompts,
        "steps": setting.steps,
        "replicas": setting.machine.replicas,
        "machine": _machine(setting.machine),
        "policies": [asdict(summary) for summary in summaries],
    }


def _machine(machine: Machine) -> dict[str, Any]:
    return asdict(machine)
