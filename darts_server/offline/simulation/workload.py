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
OWN_SHARE = 0.5


class Workload(Protocol):
    """Prompts of a training run, by number from 0."""

    @property
    def max_tokens(self) -> int: ...

    def prompt_tokens(self, number: int) -> int: ...

    def lengths(
        self,
        number: int,
        count: int,
        rng: np.random.Generator,
        attempt: int = 0,
    ) -> Ints:
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

    The first candidates of a prompt are its samples in the trace. Other candidates are resampled: half of them from the
    prompt's own samples, and half from the samples of the `NEIGHBOURS` prompts with the nearest mean length, scaled to
    the prompt's mean. Each gets normal noise of variance s² / n, where s is the std of the prompt's n samples. A draw
    from a truncated sample is truncated.
    """

    def __init__(self, prompts: Sequence[TracedPrompt], max_tokens: int, seed: int) -> None:
        self.max_tokens = max_tokens
        self._prompts = prompts
        self._log_lengths = [np.log(np.asarray(prompt.lengths, dtype=np.float64)) for prompt in prompts]
        self._log_means = np.asarray([float(logs.mean()) for logs in self._log_lengths])
        self._order: list[int] = np.random.default_rng(seed).permutation(len(prompts)).tolist()

    def prompt_tokens(self, number: int) -> int:
        return self._prompts[self._order[number % len(self._order)]].prompt_tokens

    def lengths(
        self,
        number: int,
        count: int,
        rng: np.random.Generator,
        attempt: int = 0,
    ) -> Ints:
        row = self._order[number % len(self._order)]
        # In the first epoch, the first candidates are the samples of the trace.
        samples: Sequence[int] = ()
        if number < len(self._prompts) and not attempt:
            samples = self._prompts[row].lengths[:count]
        num_drawn = count - len(samples)

        # The values to draw from, in logarithms, and the probability of each.
        own_logs = self._log_lengths[row]
        own_mean = self._log_means[row]
        distances = np.abs(self._log_means - own_mean)
        distances[row] = np.inf
        neighbours = np.argsort(distances, kind="stable")[: min(NEIGHBOURS, len(distances) - 1)]
        scaled_logs = [self._log_lengths[i] + (own_mean - self._log_means[i]) for i in neighbours]
        values = np.concatenate([own_logs, *scaled_logs])
        limit = log(self.max_tokens)
        is_truncated = np.concatenate([own_logs, *(self._log_lengths[i] for i in neighbours)]) >= limit
        probabilities = np.full(values.size, (1 - OWN_SHARE) / max(1, values.size - own_logs.size))
        probabilities[: own_logs.size] = (OWN_SHARE if neighbours.size else 1.0) / own_logs.size

        chosen = rng.choice(values.size, num_drawn, p=probabilities)
        # A draw with replacement from n values loses the share 1 / n of their variance.
        noise_std = own_logs.std(ddof=1) / np.sqrt(own_logs.size) if own_logs.size > 1 else 0.0
        drawn = values[chosen]
        noisy = drawn + noise_std * rng.standard_normal(num_drawn)
        # Noise must not truncate a draw.
        logs = np.minimum(np.where(noisy < limit, noisy, drawn), limit)
        lengths = np.clip(np.round(np.exp(logs)), 1, self.max_tokens - 1)
        lengths = np.where(is_truncated[chosen], self.max_tokens, lengths)
        return np.asarray(np.concatenate([samples, lengths]), dtype=np.int64)


Quantiles = tuple[Sequence[float], Sequence[float]]
"""Cumulative probabilities and their quantiles. Between them, the logarithm of the value is interpolated linearly."""


@dataclass(frozen=True, slots=True)
class FittedWorkload:
    medians: Quantiles
    ratios: Quantiles
    max_tokens: int
    prompt_median: float
    prompt_spread: float
    """Std of the logarithm of prompts' tokens."""

    def prompt_tokens(self, number: int) -> int:
        # Every run has the same prompts.
        noise = np.random.default_rng([0, number, 1]).standard_normal()
        return max(1, round(float(self.prompt_median * np.exp(self.prompt_spread * noise))))

    def lengths(
        self,
        number: int,
        count: int,
        rng: np.random.Generator,
        attempt: int = 0,
    ) -> Ints:
        median_probabilities, medians = self.medians
        ratio_probabilities, ratios = self.ratios
        # A prompt has the same median in every run. 2 is the stream of medians; `prompt_tokens` uses stream 1. All
        # attempts have the same distribution, so ``attempt`` is not used.
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
    prompt_tokens: str
    lengths: str
    group: str
    """Number of a sample's prompt."""
    sample_prompt_tokens: str
    generated: str
    tools: str
    added: str


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
    prompts_with_caps = [prompt_with_cap for path in paths for prompt_with_cap in _read_trace(path, form)]
    if not prompts_with_caps:
        raise InvalidSetting(f"--trace: there are no prompts in {', '.join(map(str, paths))}")
    reached_caps = [cap for prompt, cap in prompts_with_caps if cap is not None and max(prompt.lengths) >= cap]
    if max_tokens is not None and reached_caps and max_tokens > min(reached_caps):
        raise InvalidSetting(
            f"--max-tokens: samples are truncated at {min(reached_caps)} tokens, and it is not known how long they "
            "would have become; lower --max-tokens, or leave it out"
        )
    longest = max(max(*prompt.lengths, cap or 0) for prompt, cap in prompts_with_caps)
    return [prompt for prompt, _ in prompts_with_caps], max_tokens or min(reached_caps, default=longest)


def describe_trace(prompts: Sequence[TracedPrompt], max_tokens: int) -> str:
    traced_lengths = np.concatenate([prompt.lengths for prompt in prompts])
    lengths = np.minimum(traced_lengths, max_tokens)
    truncated_share = float((lengths == max_tokens).mean())
    description = (
        f"The trace has {lengths.size} lengths of {len(prompts)} prompts: mean {lengths.mean():.1f} tokens, longest "
        f"{lengths.max()}, {truncated_share:.0%} at the limit"
    )
    cut_share = float((traced_lengths > max_tokens).mean())
    if cut_share:
        description += (
            f". {cut_share:.0%} were longer than the limit, which is --max-tokens or the smallest cap that a sample "
            "reaches: drop the lines with smaller caps than the cap of your training"
        )
    return description


def _read_trace(path: Path, form: Format) -> Iterator[tuple[TracedPrompt, int | None]]:
    """Yield the prompts of a file with their caps. Prompts whose samples have several turns come last."""
    fields = _FIELDS[form]
    is_jsonl = form is Format.JSONL
    # Samples with several turns and their caps, by step and prompt.
    sessions_of_prompts: dict[tuple[str, int], list[tuple[Session, int | None]]] = {}
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
            cap = _read_count(line, "cap", place)
        # In PolyTrace, a line without `output` is one sample with turns.
        has_turns = "turns" in line if is_jsonl else "output" not in line
        if has_turns:
            step_and_prompt = (str(line.get("step")), _read_count(line, fields.group, place, 0))
            session = _read_session(line, fields, place)
            sessions_of_prompts.setdefault(step_and_prompt, []).append((session, cap))
            continue

        prompt_tokens = _read_count(line, fields.prompt_tokens, place)
        values = line.get(fields.lengths)
        if not isinstance(values, list) or not values:
            raise InvalidSetting(f"--trace: {fields.lengths} must be a list of token counts in {place}")
        lengths = tuple(_read_count({fields.lengths: value}, fields.lengths, place) for value in values)
        if cap is not None and max(lengths) > cap:
            raise InvalidSetting(
                f"--trace: {fields.lengths} must be at most the cap, {cap}, in {place}; got {max(lengths)}"
            )
        yield TracedPrompt(prompt_tokens, lengths), cap

    for sessions_with_caps in sessions_of_prompts.values():
        sessions, caps = zip(*sessions_with_caps, strict=True)
        cap = min((cap for cap in caps if cap is not None), default=None)
        # An engine prefills the tokens that tools add, and does not generate them.
        prefilled_tokens = fmean(sum(turn.added for turn in session.turns) for session in sessions)
        yield TracedPrompt(round(prefilled_tokens), tuple(session.tokens for session in sessions), sessions), cap


def _read_session(line: Mapping[str, Any], fields: _Fields, place: str) -> Session:
    tools = _read_objects(line, fields.tools, place)
    added_tokens = _read_count(line, fields.sample_prompt_tokens, place)
    tool_seconds = 0.0
    turns = []
    for number, turn in enumerate(_read_objects(line, "turns", place) or [{}]):
        generated = max(1, _read_count(turn, fields.generated, place, 0))
        turns.append(Turn(added_tokens, generated, tool_seconds))
        # The tools after this turn belong to the next turn. They run one after the other.
        tools_after_turn = [tool for position, tool in enumerate(tools) if tool.get("turn", position) == number]
        added_tokens = sum(_read_count(tool, fields.added, place, 0) for tool in tools_after_turn)
        seconds_of_tools = [tool.get("seconds", 0.0) for tool in tools_after_turn]
        if not all(isinstance(seconds, float | int) and 0 <= seconds < inf for seconds in seconds_of_tools):
            raise InvalidSetting(f"--trace: seconds must be numbers of at least 0 in {place}")
        tool_seconds = float(sum(seconds_of_tools))
    # A session that ends otherwise was ended at a limit.
    return Session(tuple(turns), turn.get("end", "stop") == "stop")


def _read_count(
    values: Mapping[str, Any],
    name: str,
    place: str,
    least: int = 1,
) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidSetting(f"--trace: {name} must be a whole number of at least {least} in {place}")
    return value


def _read_objects(line: Mapping[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    values = line.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidSetting(f"--trace: {name} must be a list of objects in {place}")
    return values
