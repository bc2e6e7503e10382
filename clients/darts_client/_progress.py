"""A progress bar for a batch. It imports rich only when a bar is drawn."""

from types import TracebackType
from typing import Self

from ._models import Event, GroupEvent


class ProgressBar:
    """A bar of the groups that are complete, and of the tokens per second that were generated for them."""

    def __init__(self, total: int) -> None:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError as exc:
            raise ImportError("progress=True needs rich: pip install 'darts-client[progress]'") from exc
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tokens]}"),
        )
        self._tokens = 0
        self._task = self._progress.add_task("rollouts", total=total, tokens="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, event: Event) -> None:
        """Count the group that the event completes, if any."""
        if not isinstance(event, GroupEvent):
            return
        self._tokens += sum(event.group.lengths)
        self._tokens += sum(candidate.length for candidate in event.group.discarded)
        seconds = self._progress.tasks[self._task].elapsed or 0
        speed = f"{self._tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        self._progress.update(self._task, advance=1, tokens=speed)
