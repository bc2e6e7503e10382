from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from hashlib import blake2b
from typing import Any

import numpy as np

from darts_server.estimates.checks import LARGEST, MIN_MEAN, check_count, check_length, check_number
from darts_server.estimates.latency import LatencyCurve, LatencyModel
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
from darts_server.estimates.pass_rates import Beta, PassCounts, RecentPassRates, count_answers
from darts_server.estimates.reward_stats import RewardStats, restore_stats
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.documents import Debounce, DocumentStore, Kind, StoredValues, json_kind
from darts_server.types import GONE, FinishReason, Outcome

STEP_GROUPS = 256
"""Groups of a step while the weight version does not change: a usual number of prompts."""
WRITE_DELAY_SECONDS = 0.3
"""The store buffers for another half second, so that a killed process loses at most the last second."""
LATENCY_DELAY_SECONDS = 2.0
"""A write has some 30 KB. A killed process loses two seconds of learning."""
KEY = "all"
ENGINE_KEY = "engine"
KEY_BYTES = 12
"""96 bits: the chance that any two of a million prompts share a key is below 1e-16."""
MIN_COHORT = 8
"""Smaller cohorts alone say too little."""
BIAS_GROUPS = 256
"""About one step."""

Step = list[tuple[int, LengthEstimate]]
"""Weight version and lengths of each group."""


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
PROMPT = Kind(KIND, PromptStats)
DATASET = json_kind("dataset", DatasetStats)
STEP = json_kind("step", _parse_step)
PROFILE = json_kind("profile", LengthProfile)
LATENCY = json_kind("latency", LatencyModel)
PROMPT_REWARDS = json_kind("prompt_rewards", restore_stats)
DATASET_REWARDS = json_kind("dataset_rewards", restore_stats)
PASS_COUNTS = json_kind("pass_counts", lambda value: PassCounts(*value))
RECENT_PASS_RATES = json_kind("recent_pass_rates", lambda value: RecentPassRates(*value))
KINDS: Sequence[Kind[Any]] = (
    PROMPT,
    DATASET,
    STEP,
    PROFILE,
    LATENCY,
    PROMPT_REWARDS,
    DATASET_REWARDS,
    PASS_COUNTS,
    RECENT_PASS_RATES,
)


def key_of(token_ids: Sequence[int], *other_inputs: str) -> str:
    """Hash a prompt, equally in every process and on every host."""
    numbers = list(token_ids)
    for text in other_inputs:
        # Negative numbers cannot be token ids, so no text hashes like tokens.
        numbers += [-1 - byte for byte in text.encode()]
    return blake2b(np.asarray(numbers, dtype="<i8").tobytes(), digest_size=KEY_BYTES).hexdigest()


def observations(record: GroupRecord, *, censor_truncated: bool = True) -> list[Observation]:
    """Return the lengths of a group's candidates. Stopped and cut candidates are censored."""
    uncensored_reasons = {FinishReason.STOP}
    if not censor_truncated:
        uncensored_reasons.add(FinishReason.LENGTH)
    observed = []
    for candidate in record.current_candidates:
        if candidate.tokens > 0:
            is_censored = candidate.cut or candidate.finish_reason not in uncensored_reasons
            observed.append(Observation(candidate.tokens, censored=is_censored))
    return observed


def length_limit(record: GroupRecord) -> int | None:
    """Return the length of truncated candidates, or ``max_tokens``; None if unknown."""
    candidates = record.current_candidates
    # The model's context may be shorter than the request's `max_tokens`.
    truncated_at = [c.tokens for c in candidates if c.finish_reason is FinishReason.LENGTH and not c.cut]
    limit = max(truncated_at, default=record.max_tokens)
    longest = max((c.tokens for c in candidates), default=0)
    if limit is None or limit < longest:
        # The longer candidate had another limit.
        return None
    return limit


class Dataset:
    """Lengths over all prompts. A step ends when the weight version changes, or after `STEP_GROUPS` groups."""

    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents
        self._stats = StoredValues(documents, DATASET)
        self._steps = StoredValues(documents, STEP)
        self._profiles = StoredValues(documents, PROFILE)
        # Groups that are not learned yet: generation of the documents, weight version, lengths, and ratios to the mean.
        # Each group fades the earlier ratios of the profile, so the ratios stay grouped.
        self._pending_groups: list[tuple[int, int, LengthEstimate, list[tuple[float, bool]]]] = []
        self._write_later = Debounce(WRITE_DELAY_SECONDS, self._write)
        self.flush = self._write_later.run_pending

    @property
    def stats(self) -> DatasetStats:
        """Standard deviation and mean of lengths over recent steps, in tokens."""
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
        """``earlier``: the prompt's statistics before this group."""
        ratios = ratios_to_mean(observed, estimate, earlier)
        self._pending_groups.append((self._documents.generation, version, estimate, ratios))
        self._write_later.request()

    def _write(self) -> None:
        # Drop groups that ended before a restore.
        generation = self._documents.generation
        groups = [group for group in self._pending_groups if group[0] == generation]
        self._pending_groups = []
        if not groups:
            return
        profile = self._profiles.load(KEY) or LengthProfile()
        step = self._steps.load(KEY) or []
        for _, version, estimate, ratios in groups:
            profile.observe(ratios)
            last_version = step[-1][0] if step else version
            # The group begins the next step.
            if version != last_version or len(step) >= STEP_GROUPS:
                stats = self._stats.load(KEY) or DatasetStats()
                self._stats.save(KEY, asdict(stats.with_step(lengths for _, lengths in step)))
                step = []
            step.append((version, estimate))
        self._profiles.save(KEY, profile.state)
        self._steps.save(KEY, [(version, estimate.mean, estimate.std) for version, estimate in step])


class Latency:
    """``capacity``: number of sequences that run at once on all ``engines``, or None if unknown."""

    def __init__(self, documents: DocumentStore, capacity: int | None = None, engines: int = 1) -> None:
        self.engines = engines
        self.capacity = capacity
        self._documents = documents
        self._states = StoredValues(documents, LATENCY)
        self._write_later = Debounce(LATENCY_DELAY_SECONDS, self._write)
        self.flush = self._write_later.run_pending
        self._generation = documents.generation
        self._model = self._states.load(ENGINE_KEY) or LatencyModel()

    @property
    def start_seconds(self) -> float | None:
        """Cost of a candidate's start, without decode steps."""
        return self._current_model().start_seconds

    def step_seconds(self, batch: int) -> float | None:
        """Return the time of a decode step of ``batch`` sequences on all engines, or None if unknown."""
        curve = self._curve()
        return None if curve is None else curve.step_seconds(batch)

    def completion_seconds(self, groups: Sequence[Sequence[int]]) -> list[float]:
        """Return the seconds until each group is complete if all start together; empty if unknown.

        ``groups``: lengths of trajectories in tokens, in queueing order.
        """
        curve = self._curve()
        if curve is None:
            return []
        lengths = [length for group in groups for length in group]
        end_seconds = curve.completion_seconds(lengths, self.capacity).tolist()
        seconds_by_group = []
        start = 0
        for group in groups:
            seconds_by_group.append(max(end_seconds[start : start + len(group)]))
            start += len(group)
        return seconds_by_group

    def observe(self, batch: int, seconds: float, started: int = 0) -> None:
        self._model.observe(batch, seconds, started)
        self._write_later.request()

    def _curve(self) -> LatencyCurve | None:
        # The model is of a single engine. All engines run a batch that is `engines` times as large.
        curve = self._current_model().curve
        return None if curve is None else curve.scaled(1 / self.engines)

    def _current_model(self) -> LatencyModel:
        # Steps between a restore and this call are forgotten: at most `LATENCY_DELAY_SECONDS`.
        if self._generation != self._documents.generation:
            self._generation = self._documents.generation
            self._model = self._states.load(ENGINE_KEY) or LatencyModel()
        return self._model

    def _write(self) -> None:
        # A restore may have replaced the model in the documents.
        model = self._model
        if self._current_model() is model:
            self._states.save(ENGINE_KEY, model.state)


class Rewards:
    """Reward statistics by prompt key and over all prompts."""

    def __init__(self, documents: DocumentStore) -> None:
        self.prompts = StoredValues(documents, PROMPT_REWARDS)
        self._dataset = StoredValues(documents, DATASET_REWARDS)

    @property
    def dataset(self) -> RewardStats:
        """Also of prompts without a key."""
        return self._dataset.load(KEY) or RewardStats()

    def mean_length(self, answer: str) -> float | None:
        """Return the mean length of all ``right`` or ``wrong`` trajectories in tokens."""
        lengths = {"right": self.dataset.right, "wrong": self.dataset.wrong}[answer]
        return lengths.mean if lengths.count else None

    def learn(
        self, new_stats: Mapping[str | None, RewardStats], old_stats: Mapping[str | None, RewardStats] | None = None
    ) -> None:
        """Add reward statistics by prompt key, and remove statistics that they replace.

        ``old_stats``: has no key that ``new_stats`` does not have.
        """
        old_stats = old_stats or {}
        for key, stats in new_stats.items():
            if key is not None:
                earlier = self.prompts.load(key) or RewardStats()
                self.prompts.save(key, (earlier + stats - old_stats.get(key, RewardStats())).state)
        if new_stats:
            dataset = self.dataset
            for stats in new_stats.values():
                dataset += stats
            for stats in old_stats.values():
                dataset -= stats
            self._dataset.save(KEY, dataset.state)


class PassRates:
    def __init__(self, documents: DocumentStore) -> None:
        self._prompts = StoredValues(documents, PASS_COUNTS)
        self._recent = StoredValues(documents, RECENT_PASS_RATES)
        # Newest engine version with rewards, or None since the start of this server.
        self._newest_engine_version: int | None = None

    def learn(self, record: GroupRecord, correct: Mapping[int, bool]) -> None:
        """Learn a completed group, once. ``correct``: by candidate index."""
        answers = rewarded_answers(record, correct)
        if not answers:
            return
        # The engine counts from 0 at each start of the server, while the stored version counts on.
        recent = self._recent.load(KEY) or RecentPassRates()
        version = recent.version
        engine_version = _last_weight_version(record)
        if self._newest_engine_version is not None and engine_version > self._newest_engine_version:
            version = min(version + 1, LARGEST)
        self._newest_engine_version = max(engine_version, self._newest_engine_version or 0)

        counted = count_answers(answers)
        self._recent.save(KEY, astuple(recent.with_group(counted, version)))
        if record.prompt_key is not None:
            counts = self._prompts.load(record.prompt_key) or PassCounts()
            self._prompts.save(record.prompt_key, astuple(counts.with_answers(counted, version)))

    def posteriors(self, keys: Sequence[str]) -> list[Beta]:
        recent = self._recent.load(KEY) or RecentPassRates()
        prior = recent.prior
        posteriors = []
        for key in keys:
            counts = self._prompts.load(key) or PassCounts()
            posteriors.append(counts.posterior(prior, recent.version))
        return posteriors


def _last_weight_version(record: GroupRecord) -> int:
    return max((candidate.weight_version_end or 0 for candidate in record.selected), default=0)


def rewarded_answers(record: GroupRecord, correct: Mapping[int, bool]) -> list[tuple[bool, float]]:
    """Return correctness and weight of an unbiased sample of the prompt's answers."""
    candidates = [c.index for c in record.current_candidates if c.reason not in GONE]
    rewarded = [index for index in candidates if index in correct]
    # If the group was selected by rewards, half of the returned trajectories are right at any pass rate, so all
    # candidates with a reward count.
    is_selected_by_rewards = record.num_rewarded is not None
    if is_selected_by_rewards or len(rewarded) == len(candidates):
        return [(correct[index], 1.0) for index in rewarded]
    # Rewards of other candidates are missing for reasons that may depend on the answers.
    return [(correct[c.index], c.weight or 1.0) for c in record.selected if c.index in correct]


def summarize_lengths(stats: PromptStats) -> dict[str, Any]:
    observed = stats.observations
    summary: dict[str, Any] = {
        "estimated_mean_tokens": stats.mean_ema,
        "estimated_std_tokens": stats.std_ema,
        "groups": stats.groups,
        "candidates": stats.candidates,
        "weight_version": stats.weight_version,
        "mean_generated_tokens": None,
        "finished": None,
        "truncated": None,
        "stopped": None,
        "max_tokens": stats.max_tokens,
        "prompt_tokens": stats.prompt_tokens,
    }
    if observed:
        finished = sum(not candidate.censored for candidate in observed)
        truncated = sum(stats.is_truncated(candidate) for candidate in observed)
        summary["mean_generated_tokens"] = sum(candidate.tokens for candidate in observed) / len(observed)
        summary["finished"] = finished
        summary["truncated"] = truncated
        summary["stopped"] = len(observed) - finished - truncated
    return summary


def summarize(stats: RewardStats | None) -> dict[str, Any] | None:
    if stats is None or stats.pass_rate is None:
        return None
    right_minus_wrong_tokens = stats.difference
    return {
        "rewarded": stats.rewarded,
        "right": stats.right.count,
        "pass_rate": stats.pass_rate,
        "zero_variance_groups": stats.zero_variance,
        "rewarded_groups": stats.groups,
        "difference": right_minus_wrong_tokens,
    }


class LengthBias:
    def __init__(self) -> None:
        self._generated: deque[list[tuple[float, float]]] = deque(maxlen=BIAS_GROUPS)
        self._returned: deque[Sequence[CandidateRecord]] = deque(maxlen=BIAS_GROUPS)

    def group_ended(self, record: GroupRecord) -> None:
        if record.outcome is Outcome.COMPLETED:
            sample = complete_sample(observations(record, censor_truncated=False))
            # A stopped candidate would have become longer, but not longer than its request allows.
            limit = length_limit(record)
            if limit is not None:
                sample = [(weight, min(length, limit)) for weight, length in sample]
            self._generated.append(sample)
            self._returned.append(record.selected)

    def mean(self, kind: str) -> float | None:
        """Return the mean of all ``generated`` or ``returned`` lengths in tokens."""
        weights, lengths = self._weights_and_lengths(kind)
        if not weights.sum() > 0:
            return None
        return float(np.average(lengths, weights=weights))

    def quantile(self, kind: str, share: float) -> float | None:
        """Return the length in tokens that a ``share`` of trajectories does not exceed."""
        weights, lengths = self._weights_and_lengths(kind)
        if not weights.sum() > 0:
            return None
        return float(np.quantile(lengths, share, weights=weights, method="inverted_cdf"))

    def _weights_and_lengths(self, kind: str) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
        if kind == "returned":
            pairs = [(1.0, float(c.tokens)) for group in self._returned for c in group]
        else:
            pairs = [pair for group in self._generated for pair in group]
        return np.array([weight for weight, _ in pairs]), np.array([length for _, length in pairs])


class Statistics:
    """``capacity``, ``engines``: see `Latency`."""

    def __init__(self, documents: DocumentStore, capacity: int | None = None, engines: int = 1) -> None:
        self.documents = documents
        self.prompts = StoredValues(documents, PROMPT)
        """Length statistics by prompt key."""
        self.dataset = Dataset(documents)
        self.latency = Latency(documents, capacity, engines)
        self.rewards = Rewards(documents)
        self.pass_rates = PassRates(documents)

    def group_ended(self, record: GroupRecord) -> None:
        observed = observations(record)
        # In incomplete groups, lengths depend on the time of the stop.
        if record.outcome is not Outcome.COMPLETED or not observed:
            return
        version = _last_weight_version(record)
        estimate = estimate_lengths(observed)
        earlier = None
        if record.prompt_key is not None:
            earlier = self.prompts.load(record.prompt_key)
            stats = update_stats(
                earlier,
                observed,
                estimate,
                version,
                length_limit(record),
                record.prompt_tokens,
            )
            # `StoredValues.save` would write JSON text, but these documents have the fields themselves.
            self.documents.put(KIND, record.prompt_key, asdict(stats))
        self.dataset.learn(observed, estimate, version, earlier)

    def flush(self) -> None:
        self.dataset.flush()
        self.latency.flush()
