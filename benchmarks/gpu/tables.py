"""A table of results: numbers with their formats, so that the same rows make JSON and Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
        lines = [f"{heading} {self.title}", ""]
        if self.rows:
            lines += [_line(self.columns), _line("---" for _ in self.columns)]
            lines += [_line(_cell(row.get(name), form) for name, form in self.columns.items()) for row in self.rows]
            lines.append("")
        return "\n".join([*lines, *(f"{note}\n" for note in self.notes)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Value, form: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, form)
