"""Everything that is learned from rollouts: lengths of prompts and data set, rewards, and the latency of the engine."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from hashlib import blake2b
from itertools import islice
from operator import add
from typing import Any

import numpy as np

from darts_server.estimates.checks import MIN_MEAN, check_count, check_length, check_number
from darts_server.estimates.latency import LatencyModel
from darts_server.estimates.length_profile import LengthProfile, ratios_to_mean
from darts_server.estimates.lengths import (
    DatasetStats,
    LengthEstimate,
    Observation,
    PromptStats,
    complete_sample,
    estimate_lengths,
    update_stats,
)
from darts_server.estimates.reward_stats import RewardStats, restore_stats
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.documents import Debounce, DocumentStore, Kind, StoredValues, json_kind
from darts_server.types import FinishReason, Outcome

STEP_GROUPS = 256
"""Groups that count as a step while the weight version does not change: a usual number of prompts."""
WRITE_DELAY_SECONDS = 0.3
"""The store buffers for another half second, so that a killed process loses at most the last second."""
LATENCY_DELAY_SECONDS = 2.0
"""A write has some 30 KB, and what a killed process loses is learned again in as many seconds."""
KEY, ENGINE_KEY = "all", "engine"
KEY_BYTES = 12
"""96 bits: the chance that any two of a million prompts share a key is below 1e-16."""
MIN_COHORT = 8
"""Number of prompts below which the cohort alone says too little."""
BIAS_GROUPS = 256
"""Number of groups that the length bias covers: one step or a few."""

Step = list[tuple[int, LengthEstimate]]
"""Weight version and lengths of each group of a step."""


def _parse_step(value: Any) -> Step:
    check_length("groups", value, STEP_GROUPS)
    step: Step = []
    for version, mean, std in value:
        check_count("version", version)
        check_number("mean", mean, MIN_MEAN)
        if std is not None:
            check_number("std", std)
        step.append((version, LengthEstimate(mean, std)))
    return step


KIND = "prompt"
PROMPT = Kind(KIND, PromptStats)  # it checks the types itself
DATASET = json_kind("dataset", DatasetStats)
STEP = json_kind("step", _parse_step)
PROFILE = json_kind("profile", LengthProfile)
LATENCY = json_kind("latency", LatencyModel)
PROMPT_REWARDS, DATASET_REWARDS = (json_kind(name, restore_stats) for name in ("prompt_rewards", "dataset_rewards"))
KINDS: Sequence[Kind[Any]] = (PROMPT, DATASET, STEP, PROFILE, LATENCY, PROMPT_REWARDS, DATASET_REWARDS)


def key_of(token_ids: Sequence[int], *other_inputs: str) -> str:
    """The key of a prompt without a key of its caller's: a hash of its tokens and its other inputs.

    It is the same in every process and on every host.
    """
    numbers = list(token_ids)
    for text in other_inputs:
        # Token ids are not negative, so negative numbers cannot be mistaken for more of them.
        numbers += [-1 - byte for byte in text.encode()]
    return blake2b(np.asarray(numbers, dtype="<i8").tobytes(), digest_size=KEY_BYTES).hexdigest()


def observations(record: GroupRecord, *, beyond_limit: bool = True) -> list[Observation]:
    """Lengths of the group's candidates; censored for those that were stopped or cut, as they would be longer.

    ``beyond_limit``: whether the length of a truncated candidate is censored too.
    """
    complete = {FinishReason.STOP} if beyond_limit else {FinishReason.STOP, FinishReason.LENGTH}
    observed = []
    for c in record.candidates[record.restarted_from :]:
        if c.tokens > 0:
            observed.append(Observation(c.tokens, censored=c.cut or c.finish_reason not in complete))
    return observed


def length_limit(record: GroupRecord) -> int | None:
    """Return the limit of a candidate's tokens in a group; ``None`` if it is not known.

    The limit is the length at which candidates were truncated, which the model's context may have made shorter than the
    request's ``max_tokens``. It is ``max_tokens`` if no candidate was truncated.
    """
    reached = []
    longest = 0
    for c in record.candidates[record.restarted_from :]:
        longest = max(longest, c.tokens)
        if c.finish_reason is FinishReason.LENGTH and not c.cut:
            reached.append(c.tokens)
    limit = max(reached, default=record.max_tokens)
    return None if limit is None or limit < longest else limit


class Dataset:
    """Aggregate lengths over all prompts and keep the result in ``documents``.

    A step ends when the weight version changes, or after `STEP_GROUPS` groups.
    """

    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents
        self._stats = StoredValues(documents, DATASET)
        self._steps = StoredValues(documents, STEP)
        self._profiles = StoredValues(documents, PROFILE)
        # Groups that are not written yet: generation of documents, weight version, lengths, and ratios to the mean, of
        # which those of one group fade all before.
        self._groups: list[tuple[int, int, LengthEstimate, list[tuple[float, bool]]]] = []
        self._write_later = Debounce(WRITE_DELAY_SECONDS, self._write)
        self.flush = self._write_later.run_pending
        """Write everything that is pending to ``documents``."""

    @property
    def stats(self) -> DatasetStats:
        """Standard deviation and mean of lengths over the last steps."""
        self.flush()
        return self._stats.load(KEY) or DatasetStats()

    @property
    def profile(self) -> LengthProfile:
        """Distribution of lengths relative to the mean of their prompt."""
        self.flush()
        return self._profiles.load(KEY) or LengthProfile()

    def learn(
        self,
        observed: Sequence[Observation],
        estimate: LengthEstimate,
        version: int,
        earlier: PromptStats | None,
    ) -> None:
        """Learn the lengths of a completed group. ``earlier``: statistics of its prompt before this group."""
        ratios = ratios_to_mean(observed, estimate, earlier)
        self._groups.append((self._documents.generation, version, estimate, ratios))
        self._write_later.request()

    def _write(self) -> None:
        # Not those that ended before learned state was restored.
        generation = self._documents.generation
        groups, self._groups = [group for group in self._groups if group[0] == generation], []
        if not groups:
            return
        profile, step = self._profiles.load(KEY) or LengthProfile(), self._steps.load(KEY) or []
        for _, version, estimate, ratios in groups:
            profile.observe(ratios)
            if step and (version != step[-1][0] or len(step) >= STEP_GROUPS):
                stats = self._stats.load(KEY) or DatasetStats()
                self._stats.save(KEY, asdict(stats.with_step(lengths for _, lengths in step)))
                step = []
            step.append((version, estimate))
        self._profiles.save(KEY, profile.state)
        self._steps.save(KEY, [(version, estimate.mean, estimate.std) for version, estimate in step])


class Latency:
    """Learn the engine's latency curve and keep it in ``documents``.

    ``capacity``: most sequences that run at once on all ``engines``; ``None`` if unknown.
    """

    def __init__(self, documents: DocumentStore, capacity: int | None = None, engines: int = 1) -> None:
        self.engines = engines
        self.capacity = capacity
        self._documents = documents
        self._states = StoredValues(documents, LATENCY)
        self._write_later = Debounce(LATENCY_DELAY_SECONDS, self._write)
        self.flush = self._write_later.run_pending
        """Write everything that is pending to ``documents``."""
        self._generation = documents.generation
        self._model = self._states.load(ENGINE_KEY) or LatencyModel()

    @property
    def start_seconds(self) -> float | None:
        """Seconds that a candidate costs when it starts, besides its decode steps; ``None`` until it is known."""
        return self._learned().start_seconds

    def step_seconds(self, batch: int) -> float | None:
        """Seconds of a decode step while ``batch`` sequences run on all engines; ``None`` until they are known."""
        curve = self._learned().curve
        return None if curve is None else curve.scaled(1 / self.engines).step_seconds(batch)

    def completion_seconds(self, groups: Sequence[Sequence[int]]) -> list[float]:
        """Return the seconds until each group is complete if all start together and nothing else runs.

        ``groups``: lengths in tokens of each group's trajectories, which queue in this order. Empty while the curve is
        unknown.
        """
        curve = self._learned().curve
        if curve is None:
            return []
        lengths = [length for group in groups for length in group]
        ends = iter(curve.scaled(1 / self.engines).completion_seconds(lengths, self.capacity).tolist())
        return [max(islice(ends, len(group))) for group in groups]

    def observe(self, batch: int, seconds: float, started: int = 0) -> None:
        """Learn that a step of ``batch`` sequences took ``seconds``, in which so many of them ``started``."""
        self._model.observe(batch, seconds, started)
        self._write_later.request()

    def _learned(self) -> LatencyModel:
        """Return the model, from restored state if there is any.

        Steps after the restore are forgotten too if this comes later, which it does within `LATENCY_DELAY_SECONDS`.
        """
        if self._generation != (generation := self._documents.generation):
            self._generation, self._model = generation, self._states.load(ENGINE_KEY) or LatencyModel()
        return self._model

    def _write(self) -> None:
        before = self._model
        if self._learned() is before:
            self._states.save(ENGINE_KEY, before.state)


class Rewards:
    """Keep reward statistics in ``documents``, by prompt key and over all prompts."""

    def __init__(self, documents: DocumentStore) -> None:
        self.prompts = StoredValues(documents, PROMPT_REWARDS)
        """By prompt key; none where none of its trajectories has a reward."""
        self._dataset = StoredValues(documents, DATASET_REWARDS)

    @property
    def dataset(self) -> RewardStats:
        """Statistics over all prompts, including those without a key."""
        return self._dataset.load(KEY) or RewardStats()

    def mean_length(self, answer: str) -> float | None:
        """Mean length in tokens of all ``right`` or all ``wrong`` trajectories; ``None`` if there are none."""
        lengths = {"right": self.dataset.right, "wrong": self.dataset.wrong}[answer]
        return lengths.mean if lengths.count else None

    def learn(self, new_stats: Mapping[str | None, RewardStats]) -> None:
        """Add statistics of newly rewarded trajectories, by prompt key."""
        for key, stats in new_stats.items():
            if key is not None:
                self.prompts.save(key, ((self.prompts.load(key) or RewardStats()) + stats).state)
        if new_stats:
            self._dataset.save(KEY, reduce(add, new_stats.values(), self.dataset).state)


def summarize_lengths(stats: PromptStats) -> dict[str, Any]:
    """Summarize a prompt's lengths as JSON values, in tokens. What was not seen of the last group is ``None``."""
    seen = stats.observations
    mean = None
    finished = None
    truncated = None
    stopped = None
    if seen:
        mean = sum(o.tokens for o in seen) / len(seen)
        finished = sum(not o.censored for o in seen)
        truncated = sum(stats.is_truncated(o) for o in seen)
        stopped = len(seen) - finished - truncated
    return {
        "estimated_mean_tokens": stats.mean_ema,
        "estimated_std_tokens": stats.std_ema,
        "groups": stats.groups,
        "candidates": stats.candidates,
        "weight_version": stats.weight_version,
        "mean_generated_tokens": mean,
        "finished": finished,
        "truncated": truncated,
        "stopped": stopped,
        "max_tokens": stats.max_tokens,
        "prompt_tokens": stats.prompt_tokens,
    }


def summarize(stats: RewardStats | None) -> dict[str, Any] | None:
    """Summarize statistics as JSON values, with the difference in tokens; ``None`` without any reward."""
    if stats is None or stats.pass_rate is None:
        return None
    return {
        "rewarded": stats.rewarded,
        "right": stats.right.count,
        "pass_rate": stats.pass_rate,
        "zero_variance_groups": stats.zero_variance,
        "rewarded_groups": stats.groups,
        "difference": stats.difference,
    }


class LengthBias:
    """Compare generated and returned lengths over the last groups. Lengths of stopped candidates are estimated."""

    def __init__(self) -> None:
        self._generated: deque[list[tuple[float, float]]] = deque(maxlen=BIAS_GROUPS)
        self._returned: deque[Sequence[CandidateRecord]] = deque(maxlen=BIAS_GROUPS)

    def group_ended(self, record: GroupRecord) -> None:
        if record.outcome is Outcome.COMPLETED:
            sample = complete_sample(observations(record, beyond_limit=False))
            # A stopped candidate is expected to become longer, but not longer than its request allows.
            limit = length_limit(record)
            if limit is not None:
                sample = [(weight, min(length, limit)) for weight, length in sample]
            self._generated.append(sample)
            self._returned.append(record.selected)

    def mean(self, kind: str) -> float | None:
        """Mean length in tokens; ``kind`` is ``generated`` or ``returned``. ``None`` before a group was completed."""
        weights, lengths = self._pool(kind)
        return float(np.average(lengths, weights=weights)) if weights.sum() > 0 else None

    def quantile(self, kind: str, share: float) -> float | None:
        """The length that a ``share`` of trajectories does not exceed, in tokens."""
        weights, lengths = self._pool(kind)
        if not weights.sum() > 0:
            return None
        return float(np.quantile(lengths, share, weights=weights, method="inverted_cdf"))

    def _pool(self, kind: str) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
        pairs = [pair for group in self._generated for pair in group]
        if kind == "returned":
            pairs = [(1.0, float(c.tokens)) for group in self._returned for c in group]
        return np.array([w for w, _ in pairs]), np.array([x for _, x in pairs])


class Statistics:
    """Keep statistics of lengths, step times and rewards in ``documents``.

    ``capacity``, ``engines``: see `Latency`.
    """

    def __init__(self, documents: DocumentStore, capacity: int | None = None, engines: int = 1) -> None:
        self.documents = documents
        self.prompts = StoredValues(documents, PROMPT)
        """Length statistics by prompt key; saved as documents, not as JSON in them."""
        self.dataset = Dataset(documents)
        self.latency = Latency(documents, capacity, engines)
        self.rewards = Rewards(documents)

    def group_ended(self, record: GroupRecord) -> None:
        """Learn the lengths of a completed group, those of stopped candidates as censored.

        Failed and cancelled groups are ignored: their lengths depend on when they were stopped.
        """
        observed = observations(record)
        if record.outcome is not Outcome.COMPLETED or not observed:
            return
        version = max((c.weight_version_end or 0 for c in record.selected), default=0)
        estimate = estimate_lengths(observed)
        earlier = None
        if (key := record.prompt_key) is not None:
            earlier = self.prompts.load(key)
            limit = length_limit(record)
            stats = update_stats(earlier, observed, estimate, version, limit, record.prompt_tokens)
            self.documents.put(KIND, key, asdict(stats))
        self.dataset.learn(observed, estimate, version, earlier)

    def flush(self) -> None:
        """Write everything that is pending to ``documents``."""
        self.dataset.flush()
        self.latency.flush()
