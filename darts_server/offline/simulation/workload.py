"""Lengths of a training run's rollouts, from a trace with resampled candidates or from a fitted preset."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np

from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.model.batch import Ints
from darts_server.offline.simulation.model.sessions import Session, Turn

NEIGHBOURS = 8
"""Prompts with the nearest mean length, whose samples stand for a prompt's too."""
OWN_SHARE = 0.5
"""Share of resampled candidates that come from the prompt's own samples."""


class Workload(Protocol):
    """Prompts of a training run, by number from 0."""

    @property
    def max_tokens(self) -> int: ...

    def prompt_tokens(self, number: int) -> int: ...

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        """Return the lengths of ``count`` candidates in tokens. A length of ``max_tokens`` is truncated.

        ``attempt``: above 0 for candidates that start again in a later rollout.
        """
        ...


class TracedPrompt(NamedTuple):
    prompt_tokens: int
    lengths: tuple[int, ...]
    sessions: tuple[Session, ...] = ()
    """The samples with their turns, if each sample is a line of its own."""


class TracedWorkload:
    """Prompts of a trace in random order, repeated as often as needed.

    The first candidates of a prompt are its samples in the trace. All other candidates are resampled: half of them from
    the prompt's own samples, and half from the samples of the `NEIGHBOURS` prompts with the nearest mean length, scaled
    to the prompt's mean. All of this is in logarithms. Each gets normal noise of variance s² / n, where s is the std of
    the prompt's n samples: n values that are drawn with replacement lose exactly this share of their variance. A draw
    from a truncated sample is truncated. Noise that would truncate another draw is left out.
    """

    def __init__(self, prompts: Sequence[TracedPrompt], max_tokens: int, seed: int) -> None:
        self.max_tokens = max_tokens
        self._prompts = prompts
        self._logs = [np.log(np.asarray(prompt.lengths, dtype=np.float64)) for prompt in prompts]
        self._means = np.asarray([float(logs.mean()) for logs in self._logs])
        self._order: list[int] = np.random.default_rng(seed).permutation(len(prompts)).tolist()

    def prompt_tokens(self, number: int) -> int:
        return self._prompts[self._order[number % len(self._order)]].prompt_tokens

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        row = self._order[number % len(self._order)]
        seen: Sequence[int] = ()
        if number < len(self._prompts) and not attempt:
            seen = self._prompts[row].lengths[:count]
        count -= len(seen)

        # The values to draw from, and the probability of each.
        own = self._logs[row]
        distances = np.abs(self._means - self._means[row])
        distances[row] = np.inf
        near = np.argsort(distances, kind="stable")[: min(NEIGHBOURS, len(distances) - 1)]
        values = np.concatenate([own, *(self._logs[i] + (self._means[row] - self._means[i]) for i in near)])
        limit = log(self.max_tokens)
        truncated = np.concatenate([own, *(self._logs[i] for i in near)]) >= limit
        shares = np.full(values.size, (1 - OWN_SHARE) / max(1, values.size - own.size))
        shares[: own.size] = (OWN_SHARE if near.size else 1.0) / own.size

        chosen = rng.choice(values.size, count, p=shares)
        spread = own.std(ddof=1) / np.sqrt(own.size) if own.size > 1 else 0.0
        drawn = values[chosen]
        noisy = drawn + spread * rng.standard_normal(count)
        ends = np.minimum(np.where(noisy < limit, noisy, drawn), limit)
        resampled = np.clip(np.round(np.exp(ends)), 1, self.max_tokens - 1)
        resampled = np.where(truncated[chosen], self.max_tokens, resampled)
        return np.asarray(np.concatenate([seen, resampled]), dtype=np.int64)


Quantiles = tuple[Sequence[float], Sequence[float]]
"""A distribution of positive values: cumulative probabilities, and their quantiles. Between them, the logarithm of the
value is interpolated linearly."""


@dataclass(frozen=True, slots=True)
class FittedWorkload:
    """Prompts and lengths from fitted distributions."""

    medians: Quantiles
    """Medians of prompts' lengths."""
    ratios: Quantiles
    """Ratios of lengths to their prompt's median."""
    max_tokens: int
    prompt_median: float
    """Median of prompts' tokens."""
    prompt_spread: float
    """Std of the logarithm of prompts' tokens."""

    def prompt_tokens(self, number: int) -> int:
        # Every run has the same prompts.
        noise = np.random.default_rng([0, number, 1]).standard_normal()
        return max(1, round(float(self.prompt_median * np.exp(self.prompt_spread * noise))))

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        median_probabilities, medians = self.medians
        ratio_probabilities, ratios = self.ratios
        # The seed does not depend on the run, so a prompt has the same median in every run. 2 is the stream of medians;
        # `prompt_tokens` uses stream 1. All attempts have the same distribution, so ``attempt`` is not used.
        probability = np.random.default_rng([0, number, 2]).random()
        median = np.exp(np.interp(probability, median_probabilities, np.log(medians)))
        lengths = np.ceil(median * np.exp(np.interp(rng.random(count), ratio_probabilities, np.log(ratios))))
        return np.asarray(np.clip(lengths, 1, self.max_tokens), dtype=np.int64)


# --- reading traces ---------------------------------------------------------


class Format(StrEnum):
    JSONL = "jsonl"
    """A prompt a line: ``{"step": 0, "prompt_tokens": 112, "lengths": [450, 396], "cap": 10112}``. Or a sample with
    several turns a line: ``{"step": 0, "group": 7, "prompt_tokens": 317, "turns": [{"generated": 40}, {"generated":
    131, "end": "stop"}], "tools": [{"turn": 0, "seconds": 0.07, "tokens": 1041}]}``. Without ``turn`` there is a tool
    after each turn."""
    POLYTRACE = "polytrace"
    """PolyTrace's ``packed_lengths_step_*.jsonl``, a prompt a line, or ``multiturn_workload_step_*.jsonl``, a sample a
    line."""


class _Fields(NamedTuple):
    """Names of a format's fields. A sample with several turns is a line of its own."""

    prompt_tokens: str
    lengths: str
    group: str
    """Number of a sample's prompt."""
    sample_prompt_tokens: str
    generated: str
    """Tokens that a turn generated."""
    tools: str
    """Tool calls."""
    added: str
    """Tokens that a tool call adds."""


_FIELDS = {
    Format.JSONL: _Fields(
        "prompt_tokens",
        "lengths",
        "group",
        "prompt_tokens",
        "generated",
        "tools",
        "tokens",
    ),
    Format.POLYTRACE: _Fields(
        "input",
        "output",
        "prompt_group_id",
        "prompt_len",
        "completion_tokens",
        "tool_calls",
        "append_len",
    ),
}


def read_traces(paths: Sequence[Path], form: Format, max_tokens: int | None = None) -> tuple[list[TracedPrompt], int]:
    """Return the prompts of all files, and the length limit of a trajectory.

    Without ``max_tokens`` the limit is the smallest cap that a sample reaches, because it is not known how long such a
    sample would have become. If no sample reaches its cap, the limit is the longest trajectory or cap.

    Raises:
        InvalidSetting: a file cannot be read, a line is invalid, or samples are truncated below ``max_tokens``.
    """
    found = [prompt for path in paths for prompt in _read(path, form)]
    if not found:
        raise InvalidSetting(f"--trace: there are no prompts in {', '.join(map(str, paths))}")
    reached = [cap for prompt, cap in found if cap is not None and max(prompt.lengths) >= cap]
    if max_tokens is not None and reached and max_tokens > min(reached):
        raise InvalidSetting(
            f"--max-tokens: samples are truncated at {min(reached)} tokens, and it is not known how long they would "
            "have become; lower --max-tokens, or leave it out"
        )
    longest = max(max(*prompt.lengths, cap or 0) for prompt, cap in found)
    return [prompt for prompt, _ in found], max_tokens or min(reached, default=longest)


def describe(prompts: Sequence[TracedPrompt], max_tokens: int) -> str:
    """Describe the lengths of a trace in a line, if trajectories end at ``max_tokens``."""
    traced = np.concatenate([prompt.lengths for prompt in prompts])
    lengths = np.minimum(traced, max_tokens)
    truncated = float((lengths == max_tokens).mean())
    about = (
        f"The trace has {lengths.size} lengths of {len(prompts)} prompts: mean {lengths.mean():.1f} tokens, longest "
        f"{lengths.max()}, {truncated:.0%} at the limit"
    )
    cut = float((traced > max_tokens).mean())
    if cut:
        about += (
            f". {cut:.0%} were longer than the limit, which is --max-tokens or the smallest cap that a sample reaches: "
            "drop the lines with smaller caps than the cap of your training"
        )
    return about


def _read(path: Path, form: Format) -> Iterator[tuple[TracedPrompt, int | None]]:
    """Yield the prompts of a file with their caps. Prompts whose samples have several turns come last."""
    fields = _FIELDS[form]
    is_jsonl = form is Format.JSONL
    # Samples with several turns and their caps, by step and prompt.
    groups: dict[tuple[str, int], list[tuple[Session, int | None]]] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"--trace: {path} cannot be read: {error}") from error
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        place = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except ValueError:
            raise InvalidSetting(f"--trace: {place} is no JSON") from None
        if not isinstance(line, dict):
            raise InvalidSetting(f"--trace: {place} is no JSON object")
        if not is_jsonl and line.get("validate") is True:
            continue

        # PolyTrace's max_response_len is no cap: it also counts the tokens of tools, and some samples generate more.
        cap = None
        if is_jsonl and line.get("cap") is not None:
            cap = _count(line, "cap", place)
        has_turns = "turns" in line if is_jsonl else "output" not in line
        if has_turns:
            group = (str(line.get("step")), _count(line, fields.group, place, 0))
            groups.setdefault(group, []).append((_read_session(line, fields, place), cap))
            continue

        prompt_tokens = _count(line, fields.prompt_tokens, place)
        values = line.get(fields.lengths)
        if not isinstance(values, list) or not values:
            raise InvalidSetting(f"--trace: {fields.lengths} must be a list of token counts in {place}")
        lengths = tuple(_count({fields.lengths: value}, fields.lengths, place) for value in values)
        if cap is not None and max(lengths) > cap:
            raise InvalidSetting(
                f"--trace: {fields.lengths} must be at most the cap, {cap}, in {place}; got {max(lengths)}"
            )
        yield TracedPrompt(prompt_tokens, lengths), cap

    for samples in groups.values():
        sessions, caps = zip(*samples, strict=True)
        cap = min((cap for cap in caps if cap is not None), default=None)
        # An engine prefills the tokens that tools add, and does not generate them.
        added = fmean(sum(turn.added for turn in session.turns) for session in sessions)
        yield TracedPrompt(round(added), tuple(session.tokens for session in sessions), sessions), cap


def _read_session(line: Mapping[str, Any], fields: _Fields, place: str) -> Session:
    """Read a sample with several turns. Tools of a turn run one after the other."""
    tools = _objects(line, fields.tools, place)
    added = _count(line, fields.sample_prompt_tokens, place)
    seconds = 0.0
    turns = []
    for number, turn in enumerate(_objects(line, "turns", place) or [{}]):
        generated = max(1, _count(turn, fields.generated, place, 0))
        turns.append(Turn(added, generated, seconds))
        after = [tool for position, tool in enumerate(tools) if tool.get("turn", position) == number]
        added = sum(_count(tool, fields.added, place, 0) for tool in after)
        took = [tool.get("seconds", 0.0) for tool in after]
        if not all(isinstance(value, float | int) and 0 <= value < inf for value in took):
            raise InvalidSetting(f"--trace: seconds must be numbers of at least 0 in {place}")
        seconds = float(sum(took))
    # A session that ends otherwise was ended at a limit.
    return Session(tuple(turns), turn.get("end", "stop") == "stop")


def _count(values: Mapping[str, Any], name: str, place: str, least: int = 1) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidSetting(f"--trace: {name} must be a whole number of at least {least} in {place}")
    return value


def _objects(line: Mapping[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    values = line.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidSetting(f"--trace: {name} must be a list of objects in {place}")
    return values
