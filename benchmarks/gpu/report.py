"""Format the report in Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks.gpu.one_model import Findings
from benchmarks.gpu.tables import Table


def markdown(
    about: Mapping[str, object],
    models: Sequence[Findings],
    pictures: Mapping[tuple[str, str], str],
    notes: Sequence[str],
) -> str:
    """Format the whole report. ``pictures``: file by model and table."""
    facts = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items() if value is not None)]
    parts = ["# Shaped rollouts on this machine", "\n".join(facts), *notes]
    if (overview := summary(models)).rows:
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


def summary(models: Sequence[Findings]) -> Table:
    """Return each policy's time relative to plain vLLM's, by model and number of prompts."""
    result = Table("Time until all groups are complete, relative to plain vLLM", {"model": "", "prompts": ""})
    for found in models:
        for name, table in found.tables.items():
            times = {str(row["policy"]): row["ratio to plain"] for row in table.rows if "ratio to plain" in row}
            if times:
                result.columns |= dict.fromkeys(times, ".2f")
                result.rows.append({"model": found.model, "prompts": name.removeprefix("rollouts-"), **times})
    result.note(
        "Below 1 is faster. Plain vLLM ran twice; its faster run is 1, and the difference between the two is noise."
    )
    return result
