"""What simulated steps come to: the figures of a policy, and the table of all."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from darts_server.group.candidate import Candidate
from darts_server.offline.simulation.training import Step
from darts_server.types import SelectedAs

COLUMNS = {
    "policy": ("policy", ""),
    "rollout_seconds": ("rollout s", ".1f"),
    "training_seconds": ("train s", ".1f"),
    "step_seconds": ("step s", ".1f"),
    "step_speedup": ("step x", ".2f"),
    "rollout_speedup": ("rollout x", ".2f"),
    "tokens_generated": ("generated", ".2f"),
    "tokens_returned": ("returned", ".2f"),
    "tokens_wasted": ("wasted", ".2f"),
    "idle_share": ("idle", ".0%"),
    "length_bias": ("length", "+.0%"),
    "effective_sample_size": ("ESS", ".2f"),
    "truncated_share": ("truncated", ".0%"),
    "stale_share": ("stale", ".0%"),
    "notes": ("", ""),
}
"""Title and format of each figure of a `Summary`; empty where it is ``None``."""
Summary = dict[str, Any]
"""What a policy comes to, over all steps, by the names in `COLUMNS`; shares are in [0, 1], biases relative."""
LEGEND = """\
step x, rollout x: times as fast as off. generated, returned, wasted: tokens over those that off generates. idle:
places of an engine that are empty, of the most it used. length: of what is returned, against off. ESS: effective sample
size of the weights over the group size; empty where some candidates can never be returned. stale: returned tokens that
older weights generated. N: prompts of a step; with start=1.25, 1.25 N are started, and the first N complete groups are
returned."""


def summarise(name: str, steps: Sequence[Step], size: int, notes: str = "") -> Summary:
    """Sum up steps. Seconds and token counts are means over steps, until `relative_to` divides them."""
    lengths = np.concatenate([step.rollout.lengths for step in steps])
    tokens = float(lengths.sum()) / len(steps)
    generated = float(np.mean([step.rollout.generated.sum() for step in steps]))
    return {
        "policy": name,
        "rollout_seconds": float(np.mean([step.rollout.seconds for step in steps])),
        "training_seconds": float(np.mean([step.training_seconds for step in steps])),
        "step_seconds": float(np.mean([step.seconds for step in steps])),
        "step_speedup": 1.0,
        "rollout_speedup": 1.0,
        "tokens_generated": generated,
        "tokens_returned": tokens,
        "tokens_wasted": max(0.0, generated - tokens),
        "idle_share": 1 - float(np.mean([step.rollout.busy for step in steps])),
        "length_bias": float(lengths.mean()),
        "effective_sample_size": _effective_sample_size(steps, size),
        "truncated_share": sum(int(step.rollout.truncated.sum()) for step in steps) / lengths.size,
        "stale_share": sum(step.stale_tokens for step in steps) / len(steps) / tokens,
        "notes": notes,
    }


def relative_to(off: Summary, summary: Summary) -> Summary:
    """Relate a summary of `summarise` to that of ``off``."""
    tokens = ("tokens_generated", "tokens_returned", "tokens_wasted")
    return (
        summary
        | {f"{of}_speedup": off[f"{of}_seconds"] / summary[f"{of}_seconds"] for of in ("step", "rollout")}
        | {name: summary[name] / off["tokens_generated"] for name in tokens}
        | {"length_bias": summary["length_bias"] / off["length_bias"] - 1}
    )


def _effective_sample_size(steps: Sequence[Step], size: int) -> float | None:
    """Return the mean over groups; ``None`` if one has no weights, see `SelectionRule.weights`."""
    sizes = []
    for step in steps:
        batch, rollout = step.batch, step.rollout
        ends = batch.ends if batch.done is None else batch.ends - batch.done
        for group in np.flatnonzero(np.isfinite(rollout.completed_at)).tolist():
            rule, count = step.plan.rule(group), step.plan.candidates[group]
            whole = np.flatnonzero((batch.valid[group] & (rollout.generated[group] == ends[group]))[:count])
            short = set(whole[np.argsort(batch.lengths[group][whole], kind="stable")][: rule.num_shortest].tolist())
            returned = np.flatnonzero(rollout.returned[group]).tolist()
            places = {i: SelectedAs.SHORT if i in short else SelectedAs.LONG for i in returned}
            found = rule.weights([Candidate(i, 0.0, selected_as=places.get(i)) for i in range(count)])
            if not found:
                return None
            weights = list(found.values())
            sizes.append(sum(weights) ** 2 / sum(weight * weight for weight in weights) / size)
    return float(np.mean(sizes))


def table(summaries: Sequence[Summary]) -> str:
    """Format summaries as lines of text."""
    rows = [[title for title, _ in COLUMNS.values()]]
    for summary in summaries:
        figures = [(summary[name], form) for name, (_, form) in COLUMNS.items()]
        rows.append(["" if figure is None else format(figure, form) for figure, form in figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *">" * (len(widths) - 2), "<"]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)
