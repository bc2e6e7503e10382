"""The report: what was measured, in Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks.gpu.one_model import Findings
from benchmarks.gpu.tables import Table

NOT_BUILT = "Not built yet."
OUTLOOK = ("Probe overhead",)
"""What will be measured as soon as the project has it."""


def markdown(
    about: Mapping[str, object],
    models: Sequence[Findings],
    pictures: Mapping[tuple[str, str], str],
    notes: Sequence[str],
) -> str:
    """All of it. ``pictures``: file by model and table."""
    facts = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items() if value is not None)]
    parts = ["# What this machine says of shaped rollouts", "\n".join(facts), *notes]
    if (overview := summary(models)).rows:
        parts.append(overview.markdown("##"))
    for found in models:
        parts.append(f"## {found.model}")
        if found.engine_seconds is not None:
            parts.append(f"Weights were never trained. The engine took {found.engine_seconds:.0f} s to start.")
        if found.error is not None:
            parts.append(f"**Stopped: {found.error}**")
        if found.last_words:
            parts.append(f"The end of its log:\n\n```\n{found.last_words}\n```")
        for name, table in found.tables.items():
            if table.rows or table.notes:
                parts.append(table.markdown())
            if (found.model, name) in pictures:
                parts.append(f"![Sequences that run, under each policy]({pictures[found.model, name]})")
    parts += [f"## {title}\n\n{NOT_BUILT}" for title in OUTLOOK]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def summary(models: Sequence[Findings]) -> Table:
    """Each policy's time relative to plain vLLM's, by model and number of prompts."""
    result = Table("Time until all groups are decided, relative to plain vLLM", {"model": "", "prompts": ""})
    for found in models:
        for name, table in found.tables.items():
            times = {str(row["policy"]): row["ratio to plain"] for row in table.rows if "ratio to plain" in row}
            if times:
                result.columns |= dict.fromkeys(times, ".2f")
                result.rows.append({"model": found.model, "prompts": name.removeprefix("rollouts-"), **times})
    result.note("Below 1 is faster. vLLM itself ran twice, and its faster run is 1: how far the other is off is noise.")
    return result
