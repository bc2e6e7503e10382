"""Read traces: lengths of the samples of each prompt, one JSON object a line."""

import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from darts_server.exceptions import InvalidSetting
from darts_server.simulation.workload import TracedPrompt


class Format(StrEnum):
    JSONL = "jsonl"
    """``{"step": 0, "prompt_tokens": 112, "lengths": [450, 396], "cap": 10112}``, a prompt a line."""
    POLYTRACE = "polytrace"
    """PolyTrace's ``packed_lengths_step_*.jsonl``, a prompt a line, ``multiturn_workload_step_*.jsonl``, a sample."""


def read_traces(paths: Sequence[Path], form: Format, max_tokens: int | None = None) -> tuple[list[TracedPrompt], int]:
    """Return the prompts of all files, and the longest that a trajectory may become.

    ``max_tokens``: if not what the traces say in ``cap`` or, where they do not, their longest trajectory.

    Raises:
        InvalidSetting: a file cannot be read, or a line is not as it must be.
    """
    read = _read_jsonl if form is Format.JSONL else _read_polytrace
    prompts, caps = [], []
    for path in paths:
        for prompt, cap in read(_lines(path)):
            prompts.append(prompt)
            caps.append(cap or max(prompt.lengths))
    if not prompts:
        raise InvalidSetting(f"--trace: there are no prompts in {', '.join(map(str, paths))}")
    return prompts, max_tokens or max(caps)


class _Line:
    """A line of a trace, and where it is."""

    def __init__(self, place: str, value: Any) -> None:
        self._place = place
        if not isinstance(value, dict):
            raise InvalidSetting(f"--trace: {place} is no JSON object")
        self.value: dict[str, Any] = value

    def count(self, name: str, value: Any, least: int = 1) -> int:
        """Return a whole number of at least ``least``."""
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidSetting(f"--trace: {name} must be a whole number of at least {least} in {self._place}")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers of at least 1."""
        values = self.value.get(name)
        if not isinstance(values, list) or not values:
            raise InvalidSetting(f"--trace: {name} must be a list of token counts in {self._place}")
        return tuple(self.count(name, value) for value in values)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return a list of objects; empty if it is missing."""
        values = self.value.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise InvalidSetting(f"--trace: {name} must be a list of objects in {self._place}")
        return values


def _lines(path: Path) -> Iterator[_Line]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    place = f"{path}, line {number}"
                    try:
                        value = json.loads(text)
                    except ValueError:
                        raise InvalidSetting(f"--trace: {place} is no JSON") from None
                    yield _Line(place, value)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"--trace: {path} cannot be read: {error}") from error


def _read_jsonl(lines: Iterable[_Line]) -> Iterator[tuple[TracedPrompt, int | None]]:
    for line in lines:
        cap = line.value.get("cap")
        prompt = TracedPrompt(line.count("prompt_tokens", line.value.get("prompt_tokens")), line.counts("lengths"))
        yield prompt, None if cap is None else line.count("cap", cap)


def _read_polytrace(lines: Iterable[_Line]) -> Iterator[tuple[TracedPrompt, int | None]]:
    samples: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
    cap: int | None = None
    for line in lines:
        if line.value.get("validate") is True:
            continue
        if "output" in line.value:
            yield TracedPrompt(line.count("input", line.value.get("input")), line.counts("output")), None
            continue
        # A sample with several turns. What tools add to its context is prefilled, not generated.
        generated = sum(
            line.count("completion_tokens", turn.get("completion_tokens"), 0) for turn in line.objects("turns")
        )
        added = sum(line.count("append_len", call.get("append_len"), 0) for call in line.objects("tool_calls"))
        prompt = line.count("prompt_len", line.value.get("prompt_len"))
        group = str(line.value.get("step")), line.count("prompt_group_id", line.value.get("prompt_group_id"), 0)
        samples.setdefault(group, []).append((prompt + added, max(1, generated)))
    for group_samples in samples.values():
        contexts, lengths = zip(*group_samples, strict=True)
        yield TracedPrompt(round(sum(contexts) / len(contexts)), tuple(lengths)), cap
