"""Read traces: lengths of the samples of each prompt, one JSON object a line."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from darts_server.exceptions import InvalidSetting
from darts_server.simulation.workload import TracedPrompt


class Format(StrEnum):
    JSONL = "jsonl"
    """``{"step": 0, "prompt_tokens": 112, "lengths": [450, 396], "cap": 10112}``, a prompt a line; with several turns
    ``{"step": 0, "group": 7, "prompt_tokens": 317, "turns": [{"generated": 40}, …], "tools": [{"tokens": 1041}]}``, a
    sample a line."""
    POLYTRACE = "polytrace"
    """PolyTrace's ``packed_lengths_step_*.jsonl``, a prompt a line, ``multiturn_workload_step_*.jsonl``, a sample."""


@dataclass(frozen=True, slots=True)
class _SampleNames:
    """Names of a sample's fields, and of those of its turns and tool calls."""

    group: str
    prompt: str
    generated: str
    calls: str
    added: str


JSONL_NAMES = _SampleNames("group", "prompt_tokens", "generated", "tools", "tokens")
POLYTRACE_NAMES = _SampleNames("prompt_group_id", "prompt_len", "completion_tokens", "tool_calls", "append_len")


def read_traces(paths: Sequence[Path], form: Format, max_tokens: int | None = None) -> tuple[list[TracedPrompt], int]:
    """Return the prompts of all files, and the longest that a trajectory may become.

    ``max_tokens``: if not what the traces say. Of several ``cap`` it is the smallest that a sample reaches, since what
    such a sample would have become is not known; without any, the longest trajectory.

    Raises:
        InvalidSetting: a file cannot be read, or a line is not as it must be.
    """
    read = _read_jsonl if form is Format.JSONL else _read_polytrace
    prompts, caps = [], []
    for path in paths:
        for prompt, cap in read(_lines(path)):
            prompts.append(prompt)
            caps.append(cap)
    if not prompts:
        raise InvalidSetting(f"--trace: there are no prompts in {', '.join(map(str, paths))}")
    return prompts, max_tokens or _limit(prompts, caps)


def _limit(prompts: Sequence[TracedPrompt], caps: Sequence[int | None]) -> int:
    longest = [max(prompt.lengths) for prompt in prompts]
    given = [(cap, tokens) for cap, tokens in zip(caps, longest, strict=True) if cap is not None]
    reached = [cap for cap, tokens in given if tokens >= cap]
    return min(reached) if reached else max(longest + [cap for cap, _ in given])


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
    samples = _Samples(JSONL_NAMES)
    for line in lines:
        cap = line.value.get("cap")
        cap = None if cap is None else line.count("cap", cap)
        if "turns" in line.value:
            samples.add(line, cap)
        else:
            yield (
                TracedPrompt(line.count("prompt_tokens", line.value.get("prompt_tokens")), line.counts("lengths")),
                cap,
            )
    yield from samples.prompts()


def _read_polytrace(lines: Iterable[_Line]) -> Iterator[tuple[TracedPrompt, int | None]]:
    samples = _Samples(POLYTRACE_NAMES)
    for line in lines:
        if line.value.get("validate") is True:
            continue
        if "output" in line.value:
            yield TracedPrompt(line.count("input", line.value.get("input")), line.counts("output")), None
        else:
            # Its max_response_len counts what tools return, too, and some samples generate more than that.
            samples.add(line, None)
    yield from samples.prompts()


class _Samples:
    """Samples with several turns, by step and group. What tools add to their contexts is prefilled, not generated."""

    def __init__(self, names: _SampleNames) -> None:
        self._names = names
        self._groups: dict[tuple[str, int], list[tuple[int, int, int | None]]] = {}

    def add(self, line: _Line, cap: int | None) -> None:
        """Add the sample of a line."""
        names = self._names
        generated = sum(line.count(names.generated, turn.get(names.generated), 0) for turn in line.objects("turns"))
        added = sum(line.count(names.added, call.get(names.added), 0) for call in line.objects(names.calls))
        prompt = line.count(names.prompt, line.value.get(names.prompt))
        group = str(line.value.get("step")), line.count(names.group, line.value.get(names.group), 0)
        self._groups.setdefault(group, []).append((prompt + added, max(1, generated), cap))

    def prompts(self) -> Iterator[tuple[TracedPrompt, int | None]]:
        """Yield a prompt for each group, with the smallest of its samples' caps."""
        for samples in self._groups.values():
            contexts, lengths, caps = zip(*samples, strict=True)
            cap = min((cap for cap in caps if cap is not None), default=None)
            yield TracedPrompt(round(sum(contexts) / len(contexts)), tuple(lengths)), cap
