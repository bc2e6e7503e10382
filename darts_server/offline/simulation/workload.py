"""The lengths of a training run's rollouts: from a trace, with resampled candidates, or from a fitted preset."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.model.batch import Ints

NEIGHBOURS = 8
"""Prompts with a similar mean length whose samples also stand for a prompt's."""
OWN_SHARE = 0.5
"""Share of resampled candidates that come from the prompt's own samples."""


class Workload(Protocol):
    """Prompts of a training run, by number from 0. All of them are different, also if there are few in a trace."""

    @property
    def max_tokens(self) -> int: ...

    def prompt_tokens(self, number: int) -> int: ...

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        """Return how long ``count`` candidates of a prompt would become, in tokens; at ``max_tokens`` it is truncated.

        ``attempt``: above 0 for candidates that are started once more, in a later rollout.
        """
        ...


class TracedPrompt(NamedTuple):
    """One prompt of a trace: its tokens, and the lengths of its samples."""

    prompt_tokens: int
    lengths: tuple[int, ...]


class TracedWorkload:
    """Prompts of a trace in random order; as many times over as are needed.

    The first candidates of a prompt are its samples in the trace. All further ones are resampled: half of them from the
    prompt's own samples, half from those of the `NEIGHBOURS` prompts with the nearest mean length, scaled to the
    prompt's mean, all in logarithms. Each gets normal noise of variance s² / n, with s the std of the prompt's n
    samples: drawing n values with replacement loses just this share of their variance. What was drawn from truncated
    samples is truncated; noise that would truncate another one is left out.
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
        row, limit = self._order[number % len(self._order)], log(self.max_tokens)
        seen = self._prompts[row].lengths[:count] if number < len(self._prompts) and not attempt else ()
        own, count = self._logs[row], count - len(seen)
        distances = np.abs(self._means - self._means[row])
        distances[row] = np.inf
        near = np.argsort(distances, kind="stable")[: min(NEIGHBOURS, len(distances) - 1)]
        values = np.concatenate([own, *(self._logs[i] + (self._means[row] - self._means[i]) for i in near)])
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
"""A distribution of positive values: shares and the values there, linear in their logarithms between these."""


@dataclass(frozen=True, slots=True)
class FittedWorkload:
    """Prompts with ``medians`` of lengths, and candidates with ``ratios`` to their prompt's median.

    ``prompt_median``, ``prompt_spread``: median of prompts' tokens, and the std of their logarithm.
    """

    medians: Quantiles
    ratios: Quantiles
    max_tokens: int
    prompt_median: float
    prompt_spread: float

    def prompt_tokens(self, number: int) -> int:
        noise = np.random.default_rng([0, number, 1]).standard_normal()
        return max(1, round(float(self.prompt_median * np.exp(self.prompt_spread * noise))))

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        (medians, at_medians), (ratios, at_ratios) = self.medians, self.ratios
        median = np.exp(np.interp(np.random.default_rng([0, number, 2]).random(), medians, np.log(at_medians)))
        lengths = np.ceil(median * np.exp(np.interp(rng.random(count), ratios, np.log(at_ratios))))
        return np.asarray(np.clip(lengths, 1, self.max_tokens), dtype=np.int64)


# --- reading traces ---------------------------------------------------------


class Format(StrEnum):
    JSONL = "jsonl"
    """``{"step": 0, "prompt_tokens": 112, "lengths": [450, 396], "cap": 10112}``, a prompt a line; with several turns
    ``{"step": 0, "group": 7, "prompt_tokens": 317, "turns": [{"generated": 40}, …], "tools": [{"tokens": 1041}]}``, a
    sample a line."""
    POLYTRACE = "polytrace"
    """PolyTrace's ``packed_lengths_step_*.jsonl``, a prompt a line, ``multiturn_workload_step_*.jsonl``, a sample."""


NAMES = {
    Format.JSONL: "prompt_tokens lengths group prompt_tokens generated tools tokens",
    Format.POLYTRACE: "input output prompt_group_id prompt_len completion_tokens tool_calls append_len",
}
"""Names of the two fields of a prompt, of the next two of a sample with several turns, of what a turn generates, of the
tool calls, and of the tokens that one adds."""


def read_traces(paths: Sequence[Path], form: Format, max_tokens: int | None = None) -> tuple[list[TracedPrompt], int]:
    """Return the prompts of all files, and the longest that a trajectory may become.

    ``max_tokens``: if not what the traces say. Of several ``cap`` it is the smallest that a sample reaches, since what
    such a sample would have become is not known; without any, the longest trajectory.

    Raises:
        InvalidSetting: a file cannot be read, a line is not as it must be, or samples are truncated below
            ``max_tokens``.
    """
    found = [each for path in paths for each in _read(path, form)]
    if not found:
        raise InvalidSetting(f"--trace: there are no prompts in {', '.join(map(str, paths))}")
    reached = [cap for prompt, cap in found if cap is not None and max(prompt.lengths) >= cap]
    if max_tokens is not None and reached and max_tokens > min(reached):
        raise InvalidSetting(
            f"--max-tokens: samples are truncated at {min(reached)} tokens, and what they would have become is not "
            "known; lower it, or leave it out"
        )
    longest = max(max(*prompt.lengths, cap or 0) for prompt, cap in found)
    return [prompt for prompt, _ in found], max_tokens or min(reached, default=longest)


def describe(prompts: Sequence[TracedPrompt], max_tokens: int) -> str:
    """Say in a line what the lengths of a trace are where trajectories end at ``max_tokens``."""
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
            "drop the lines with smaller caps, if they are not what you train with"
        )
    return about


def _read(path: Path, form: Format) -> Iterator[tuple[TracedPrompt, int | None]]:
    """Yield the prompts of a file with their caps; those with samples of several turns last, in groups."""
    is_jsonl = form is Format.JSONL
    of_prompt, of_lengths, of_group, of_sample, of_turn, of_calls, of_call = NAMES[form].split()
    groups: dict[tuple[str, int], list[tuple[int, int, int | None]]] = {}
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
        # PolyTrace's max_response_len counts what tools return, too, and some samples generate more than that.
        cap = None if not is_jsonl or line.get("cap") is None else _count(line, "cap", place)
        if "turns" in line if is_jsonl else "output" not in line:
            # What tools add to a sample's context is prefilled, not generated.
            generated, added = _total(line, "turns", of_turn, place), _total(line, of_calls, of_call, place)
            prompt, group = _count(line, of_sample, place), (str(line.get("step")), _count(line, of_group, place, 0))
            groups.setdefault(group, []).append((prompt + added, max(1, generated), cap))
            continue
        tokens, lengths = _count(line, of_prompt, place), line.get(of_lengths)
        if not isinstance(lengths, list) or not lengths:
            raise InvalidSetting(f"--trace: {of_lengths} must be a list of token counts in {place}")
        found = tuple(_count({of_lengths: each}, of_lengths, place) for each in lengths)
        if cap is not None and max(found) > cap:
            raise InvalidSetting(f"--trace: {of_lengths} must be at most the cap, {cap}, in {place}; got {max(found)}")
        yield TracedPrompt(tokens, found), cap
    for samples in groups.values():
        contexts, tokens_generated, caps = zip(*samples, strict=True)
        cap = min((cap for cap in caps if cap is not None), default=None)
        yield TracedPrompt(round(sum(contexts) / len(contexts)), tokens_generated), cap


def _count(values: Mapping[str, Any], name: str, place: str, least: int = 1) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidSetting(f"--trace: {name} must be a whole number of at least {least} in {place}")
    return value


def _total(line: Mapping[str, Any], name: str, of_each: str, place: str) -> int:
    """Add up the token counts in a list of objects; 0 if it is missing."""
    values = line.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidSetting(f"--trace: {name} must be a list of objects in {place}")
    return sum(_count(value, of_each, place, 0) for value in values)
