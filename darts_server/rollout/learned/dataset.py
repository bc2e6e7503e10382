"""What is known of the lengths of the whole data set."""

from dataclasses import asdict

from darts_server.policy.lengths.estimate import LengthEstimate, estimate_lengths
from darts_server.policy.lengths.profile import LengthProfile, ProfileState
from darts_server.policy.lengths.stats import DatasetStats, PromptStats
from darts_server.rollout.debounce import Debounce
from darts_server.rollout.learned.documents import DocumentStore, StoredValues
from darts_server.rollout.learned.prompts import observations
from darts_server.types import GroupRecord, Outcome

STEP_GROUPS = 256
"""Groups that make a step where the weights never change: a usual number of prompts."""
KEEP_SECONDS = 0.3
"""From what is learned to the store, which takes half a second more: a killed process loses the last second at most."""
KEY = "all"


class Dataset:
    """Aggregates over all prompts, kept in ``documents``.

    A step ends when the weight version changes, as the trainer's does, or after `STEP_GROUPS` groups.
    """

    def __init__(self, documents: DocumentStore) -> None:
        self._stats = StoredValues(documents, "dataset", lambda value: DatasetStats(**value))
        self._steps = StoredValues(
            documents, "step", lambda value: [(int(v), LengthEstimate(m, s)) for v, m, s in value]
        )
        self._profiles = StoredValues(documents, "profile", lambda value: ProfileState(**value))
        self._ratios: list[tuple[float, bool]] = []
        self._groups: list[tuple[int, LengthEstimate]] = []
        self._keep = Debounce(KEEP_SECONDS, self._write)

    @property
    def stats(self) -> DatasetStats:
        """Spread and mean of lengths, over the last steps."""
        self._keep.run_pending()
        return self._known()

    @property
    def profile(self) -> LengthProfile:
        """How lengths are spread around their prompt's mean."""
        self._keep.run_pending()
        return LengthProfile(self._profiles.load(KEY))

    def learn(self, record: GroupRecord, prompt: PromptStats | None) -> None:
        """Take in a completed group. ``prompt``: what is known of its prompt, this group included."""
        seen = observations(record)
        if record.outcome is not Outcome.COMPLETED or not seen:
            return
        version = max((c.weight_version_end or 0 for c in record.selected), default=0)
        now = estimate_lengths(seen)
        mean = now.mean if prompt is None else prompt.mean_ema
        self._groups.append((version, now))
        self._ratios += [(o.tokens / mean, o.censored) for o in seen]
        self._keep.request()

    def flush(self) -> None:
        """Hand what is pending to ``documents``."""
        self._keep.run_pending()

    def _known(self) -> DatasetStats:
        return self._stats.load(KEY) or DatasetStats()

    def _write(self) -> None:
        profile = LengthProfile(self._profiles.load(KEY))
        profile.observe(self._ratios)
        self._profiles.save(KEY, asdict(profile.state))
        step: list[tuple[int, LengthEstimate]] = self._steps.load(KEY) or []
        for version, now in self._groups:
            if step and (version != step[-1][0] or len(step) >= STEP_GROUPS):
                self._stats.save(KEY, asdict(self._known().with_step(known for _, known in step)))
                step = []
            step.append((version, now))
        self._steps.save(KEY, [(version, now.mean, now.std) for version, now in step])
        self._ratios, self._groups = [], []
