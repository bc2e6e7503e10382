"""Everything that is learned from rollouts, as one value, and of it the length statistics of the whole data set."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np

from darts_server.engine.port import RequestTokens
from darts_server.policy.checks import MIN_MEAN, check_count, check_length, check_number
from darts_server.policy.length_profile import LengthProfile, ProfileState, ratios_to_mean
from darts_server.policy.lengths import DatasetStats, LengthEstimate, PromptStats, estimate_lengths
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.forecast import Expectation, predict_seconds
from darts_server.records import GroupRecord
from darts_server.rollout.learned.documents import Debounce, DocumentStore, Parse, Restores, StoredValues
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts, observations
from darts_server.rollout.learned.rewards import Rewards
from darts_server.types import Outcome

STEP_GROUPS = 256
"""Groups that count as a step while the weight version does not change: a usual number of prompts."""
WRITE_DELAY_SECONDS = 0.3
"""The store buffers for another half second, so that a killed process loses at most the last second."""
KEY = "all"
MIN_COHORT = 8
"""Number of prompts below which the cohort alone says too little."""
PREDICTION_SEED, PREDICTION_RATIOS = 0, 512
"""The same statistics give the same prediction, and so many quantiles represent the distribution of lengths for it."""


def _parse_step(value: Any) -> list[tuple[int, LengthEstimate]]:
    check_length("groups", value, STEP_GROUPS)
    for version, mean, std in value:
        check_count("version", version)
        check_number("mean", mean, MIN_MEAN)
        if std is not None:
            check_number("std", std)
    return [(version, LengthEstimate(mean, std)) for version, mean, std in value]


PARSERS: dict[str, Parse] = {
    "dataset": lambda value: DatasetStats(**value),
    "step": _parse_step,
    "profile": lambda value: ProfileState(**value),
}
"""How values are parsed, by kind."""


class Dataset:
    """Aggregate lengths over all prompts and keep the result in ``documents``.

    A step ends when the weight version changes, or after `STEP_GROUPS` groups.
    """

    def __init__(self, documents: DocumentStore) -> None:
        self._stats = StoredValues(documents, "dataset", PARSERS["dataset"])
        self._steps = StoredValues(documents, "step", PARSERS["step"])
        self._profiles = StoredValues(documents, "profile", PARSERS["profile"])
        self._ratios: list[list[tuple[float, bool]]] = []  # by group: one fades all before it
        self._groups: list[tuple[int, LengthEstimate]] = []
        self._write_later = Debounce(WRITE_DELAY_SECONDS, self._write)
        self._restores = Restores(documents)

    @property
    def stats(self) -> DatasetStats:
        """Standard deviation and mean of lengths over the last steps."""
        self.flush()
        return self._stats.load(KEY) or DatasetStats()

    @property
    def profile(self) -> LengthProfile:
        """Distribution of lengths relative to the mean of their prompt."""
        self.flush()
        return LengthProfile(self._profiles.load(KEY))

    def learn(self, record: GroupRecord, earlier: PromptStats | None) -> None:
        """Learn from a completed group. ``earlier``: statistics of its prompt before this group."""
        observed = observations(record)
        if record.outcome is not Outcome.COMPLETED or not observed:
            return
        self._forget_replaced()
        version = max((c.weight_version_end or 0 for c in record.selected), default=0)
        self._groups.append((version, estimate_lengths(observed)))
        self._ratios.append(ratios_to_mean(observed, earlier))
        self._write_later.request()

    def flush(self) -> None:
        """Write everything that is pending to ``documents``."""
        self._write_later.run_pending()

    def _forget_replaced(self) -> None:
        """Forget groups that ended before learned state was restored."""
        if self._restores.noticed():
            self._ratios, self._groups = [], []

    def _write(self) -> None:
        self._forget_replaced()
        if not self._groups:
            return
        ratios, groups = self._ratios, self._groups
        self._ratios, self._groups = [], []
        profile = LengthProfile(self._profiles.load(KEY))
        for group in ratios:
            profile.observe(group)
        self._profiles.save(KEY, asdict(profile.state))
        step: list[tuple[int, LengthEstimate]] = self._steps.load(KEY) or []
        for version, estimate in groups:
            if step and (version != step[-1][0] or len(step) >= STEP_GROUPS):
                stats: DatasetStats = self._stats.load(KEY) or DatasetStats()
                self._stats.save(KEY, asdict(stats.with_step(group for _, group in step)))
                step = []
            step.append((version, estimate))
        self._steps.save(KEY, [(version, estimate.mean, estimate.std) for version, estimate in step])


class Statistics:
    """Keep statistics of lengths, step times and rewards in ``documents``.

    ``capacity``, ``kv_tokens``, ``engines``: see `Latency`.
    """

    def __init__(
        self, documents: DocumentStore, capacity: int | None = None, kv_tokens: int | None = None, engines: int = 1
    ) -> None:
        self.documents = documents
        self.prompts = Prompts(documents)
        self.dataset = Dataset(documents)
        self.latency = Latency(documents, capacity, kv_tokens, engines)
        self.rewards = Rewards(documents)

    def group_ended(self, record: GroupRecord) -> None:
        """Learn the group's lengths."""
        self.dataset.learn(record, self.prompts.learn(record))

    def expect(
        self,
        keys: Sequence[str],
        tokens: Sequence[RequestTokens],
        recent: Sequence[float],
        ratios: int,
        rng: np.random.Generator,
        max_tokens: int | None = None,
    ) -> Expectation | None:
        """Describe a cohort to the model of a rollout; ``None`` while too little was learned.

        ``keys``: of its prompts. ``tokens``: of its requests, as far as they are known. Those of prompts take room in
        the KV caches as what is generated does. ``recent``: mean lengths of which prompts that were never seen have
        one. ``ratios``: quantiles that represent the distribution of lengths. ``max_tokens``: at which trajectories are
        truncated where requests do not say.
        """
        limits = [one.most for one in tokens if one.most is not None]
        return Expectation.of(
            [self.prompts.mean(key) for key in keys],
            [self.prompts.std(key) for key in keys],
            self.dataset.profile.quantiles(ratios),
            recent,
            rng,
            max(1, round(fmean(one.prompt for one in tokens))) if tokens else 1,
            max(limits) if limits and len(limits) == len(tokens) else max_tokens,
        )

    def predict_seconds(
        self, mean: float, shaping: Shaping, size: int, keys: Sequence[str], tokens: Sequence[RequestTokens] = ()
    ) -> float | None:
        """Predict the seconds until a cohort is complete that gets ``mean`` candidates; ``None`` if unknown.

        Of fewer than `MIN_COHORT` prompts it is unknown.
        """
        if len(keys) < MIN_COHORT:
            return None
        machine, rng = self.latency.machine(), np.random.default_rng(PREDICTION_SEED)
        means, usual = [self.prompts.mean(key) for key in keys], self.dataset.stats.mean
        # Prompts that were never seen are like the others.
        seen = [mean for mean in means if mean is not None] or ([usual] if usual else [])
        expectation = self.expect(keys, tokens, seen, PREDICTION_RATIOS, rng)
        if expectation is None or machine is None:
            return None
        return predict_seconds(mean, shaping, size, expectation, machine, rng)

    def flush(self) -> None:
        """Write everything that is pending to ``documents``."""
        self.dataset.flush()
        self.latency.flush()
