"""Figures of a policy over its simulated steps, and their table."""

from collections.abc import Mapping, Sequence
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
"""Title and format of each figure. A figure that is None stays empty."""
Summary = dict[str, Any]
"""Figures of a policy over all steps, by the names in `COLUMNS`. Shares are in [0, 1], biases are relative."""
LEGEND = """\
step x, rollout x            times as fast as off
generated, returned, wasted  tokens, divided by the tokens that off generates
idle                         share of an engine's places that are empty, of the most places that it uses
length                       mean length of the returned trajectories, compared with off
ESS                          effective sample size of the weights, divided by the group size; empty if the policy can
                             never return some candidates
truncated                    share of the returned trajectories
stale                        share of the returned tokens that older weights generated
start=1.25                   for a step of N prompts 1.25 N are started, and the first N complete groups are returned"""


def summarise(
    name: str,
    steps: Sequence[Step],
    size: int,
    notes: str = "",
) -> Summary:
    """Seconds and tokens are means over steps."""
    lengths = np.concatenate([step.rollout.lengths for step in steps])
    returned = float(lengths.sum()) / len(steps)
    generated = float(np.mean([step.rollout.generated.sum() for step in steps]))
    # `relative_to` divides tokens by those of `off`, sets the speedups, and turns the mean length into a bias.
    return {
        "policy": name,
        "rollout_seconds": float(np.mean([step.rollout.seconds for step in steps])),
        "training_seconds": float(np.mean([step.training_seconds for step in steps])),
        "step_seconds": float(np.mean([step.seconds for step in steps])),
        "step_speedup": 1.0,
        "rollout_speedup": 1.0,
        "tokens_generated": generated,
        "tokens_returned": returned,
        "tokens_wasted": max(0.0, generated - returned),
        "idle_share": 1 - float(np.mean([step.rollout.busy_share for step in steps])),
        "length_bias": float(lengths.mean()),
        "effective_sample_size": _effective_sample_share(steps, size),
        "truncated_share": sum(int(step.rollout.truncated.sum()) for step in steps) / lengths.size,
        "stale_share": sum(step.stale_tokens for step in steps) / len(steps) / returned,
        "notes": notes,
    }


def relative_to(off: Summary, summary: Summary) -> Summary:
    """Return figures of `summarise` or of `sessions`, compared with ``off``."""
    relative = dict(summary)
    for name in ("step", "rollout"):
        relative[f"{name}_speedup"] = off[f"{name}_seconds"] / summary[f"{name}_seconds"]
    for name in summary:
        if name.startswith("tokens_"):
            relative[name] = summary[name] / off["tokens_generated"]
    # Summaries of sessions have another bias already.
    if "length_bias" in summary:
        relative["length_bias"] = summary["length_bias"] / off["length_bias"] - 1
    return relative


def _effective_sample_share(steps: Sequence[Step], size: int) -> float | None:
    """Return the mean of (sum w)² / sum w² / size over groups with weights w, or None without weights."""
    shares_of_groups = []
    for step in steps:
        batch = step.batch
        rollout = step.rollout
        has_ended_by_itself = batch.valid & (rollout.generated == batch.capped_lengths - batch.generated_before)
        complete_groups = np.flatnonzero(np.isfinite(rollout.completed_at)).tolist()
        for group in complete_groups:
            # A rule needs the trajectories that were selected as the shortest to compute weights. A simulated rollout
            # does not record them.
            rule = step.plan.rule(group)
            count = step.plan.candidates[group]
            ended = np.flatnonzero(has_ended_by_itself[group][:count])
            shortest_first = ended[np.argsort(batch.lengths[group][ended], kind="stable")].tolist()
            shortest = shortest_first[: rule.num_shortest]
            candidates = [Candidate(index, tail_draw=0.0) for index in range(count)]
            for index in np.flatnonzero(rollout.returned[group]).tolist():
                candidates[index].selected_as = SelectedAs.SHORT if index in shortest else SelectedAs.LONG

            weights = list(rule.weights(candidates).values())
            if not weights:
                # The rule can never return some candidates, and has no weights for any group.
                return None
            shares_of_groups.append(sum(weights) ** 2 / sum(weight * weight for weight in weights) / size)
    return float(np.mean(shares_of_groups))


def format_table(summaries: Sequence[Summary], columns: Mapping[str, tuple[str, str]] = COLUMNS) -> str:
    rows = [[title for title, _ in columns.values()]]
    for summary in summaries:
        row = []
        for name, (_, form) in columns.items():
            figure = summary[name]
            row.append("" if figure is None else format(figure, form))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    alignments = ["<", *">" * (len(widths) - 2), "<"]
    line = "  ".join(f"{{:{alignment}{width}}}" for alignment, width in zip(alignments, widths, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)
