"""What is measured and what was found: the forms that the processes of the benchmark exchange, and its tables."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.cli import Options

Value = str | int | float | None


@dataclass
class Table:
    """A table, which ``Table(**json)`` restores.

    Attributes:
        columns: format of the numbers by column, as in f-strings; a row may lack some.
        failed: rows are missing because of a failure, which a note explains.
    """

    title: str
    columns: dict[str, str]
    rows: list[dict[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def add(self, **values: Value) -> None:
        """Add a row, by the columns' names with ``_`` for a blank."""
        names = {name.replace(" ", "_"): name for name in self.columns}
        self.rows.append({names[key]: value for key, value in values.items()})

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def fail(self, text: str) -> None:
        self.failed = True
        self.note(text)

    def markdown(self, heading: str = "###") -> str:
        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cells)} |"

        def cell(value: Value, form: str) -> str:
            return "" if value is None else value if isinstance(value, str) else format(value, form)

        lines = [f"{heading} {self.title}", ""]
        if self.rows:
            lines += [line(self.columns), line("---" for _ in self.columns)]
            lines += [line(cell(row.get(name), form) for name, form in self.columns.items()) for row in self.rows]
        return "\n".join([*lines, *[""] * bool(self.rows), *(f"{note}\n" for note in self.notes)])


@dataclass(frozen=True)
class Spec:
    """What to measure.

    Attributes:
        folder: an empty one for the model.
        seconds: for everything, including the engine's start.
        bandwidth: the card's, bytes/s.
    """

    model: str
    folder: str
    out: str
    seconds: float
    bandwidth: float
    options: Options

    def wants(self, table: str) -> bool:
        """Return whether this table is to be filled; without step times no other can be."""
        return self.options.parts is None or table in (*self.options.parts, "steps")


@dataclass
class Findings:
    """The results so far.

    Attributes:
        engine_seconds: how long the engine took to start.
        log_tail: the end of its log, if something went wrong.
        curve: batch sizes and step seconds.
        timelines: of each policy, by table.
    """

    model: str
    engine_seconds: float | None = None
    error: str | None = None
    log_tail: str | None = None
    capacity: int | None = None
    curve: dict[str, Any] | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    timelines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "Findings":
        value = json.loads(path.read_text())
        tables = {name: Table(**table) for name, table in value.pop("tables").items()}
        return Findings(**value, tables=tables)

    def write(self, path: Path) -> None:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(path)
