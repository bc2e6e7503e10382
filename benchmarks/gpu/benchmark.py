"""Run the benchmark: measure the card, then one model after the other, and write the report."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from tempfile import TemporaryDirectory

from benchmarks.gpu.about import about
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.card import Card, probe
from benchmarks.gpu.child import GRACE_SECONDS, run_child
from benchmarks.gpu.cli import Options, arguments
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.one_model import Findings, Spec
from benchmarks.gpu.pictures import draw
from benchmarks.gpu.report import markdown

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
    weights = {name: 1 + time_weight(name) for name in options.models}
    shares = Budget(budget.remaining - REPORT_SECONDS).split(weights)
    found = [measure_model(name, options, card, share) for name, share in shares]
    print(report(options, card, found))
    complete = not any(model.error or any(table.failed for table in model.tables.values()) for model in found)
    return 0 if complete else 1


def time_weight(model: str) -> float:
    return SHAPES[model].parameters / DOUBLE_TIME_PARAMETERS if model in SHAPES else 0.0


def measure_model(name: str, options: Options, card: Card, budget: Budget) -> Findings:
    """Measure one model."""
    if name in SHAPES and SHAPES[name].weight_bytes > MAX_WEIGHTS_SHARE * card.memory:
        return Findings(name, error=f"its {SHAPES[name].weight_bytes / 1e9:.0f} GB of weights do not fit this card")
    limit = budget.remaining - GRACE_SECONDS
    print_progress(f"{name}: starting the engine, {limit:.0f} s for everything")
    # This process owns the folder: the child may be killed before it has removed gigabytes.
    with TemporaryDirectory(prefix="model-", dir=options.out.resolve(), ignore_cleanup_errors=True) as folder:
        spec = Spec(
            model=name,
            folder=folder,
            out=str(options.out / f"{name}.json"),
            seconds=limit - END_SECONDS,
            seed=options.seed,
            prompts=options.prompts,
            policies=options.policies,
            bandwidth=card.bandwidth,
            traces=tuple(map(str, options.traces)),
            parts=options.parts,
            logprobs=options.logprobs,
            dry=options.dry,
            flags=options.flags,
        )
        return run_child(spec, limit, options.out / f"{name}.log", print_progress)


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
