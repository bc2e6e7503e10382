"""What is known of a prompt before its group starts, for survival by roulette."""

from collections.abc import Callable

from darts_server.policy.pruning.roulette import RATIOS, Floats, PromptForecast
from darts_server.rollout.learned.dataset import Dataset
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.learned.rewards import Rewards

CACHE_SECONDS = 1.0
"""How long the distribution of lengths is cached: computing it takes half a millisecond, and a step starts hundreds of
groups at once."""
PRIOR_TRAJECTORIES = 4.0
"""So many trajectories with the data set's pass rate are added to those of a prompt: with fewer of its own, its rate is
mostly chance."""


class Forecasts:
    """``clock``: monotonic seconds."""

    def __init__(self, prompts: Prompts, dataset: Dataset, rewards: Rewards, clock: Callable[[], float]) -> None:
        self._prompts = prompts
        self._dataset = dataset
        self._rewards = rewards
        self._clock = clock
        self._ratios: Floats | None = None
        self._ratios_until = -CACHE_SECONDS

    def of_prompt(self, key: str | None) -> PromptForecast:
        """Return what is known of the prompt with that key; nothing for ``None``."""
        if key is None:
            return PromptForecast()
        return PromptForecast(self._prompts.mean(key), self._cached_ratios(), self._pass_rate(key))

    def _cached_ratios(self) -> Floats | None:
        now = self._clock()
        if now >= self._ratios_until:
            self._ratios, self._ratios_until = self._dataset.profile.quantiles(RATIOS), now + CACHE_SECONDS
        return self._ratios

    def _pass_rate(self, key: str) -> float | None:
        """The prompt's pass rate, drawn towards the data set's while it is from few trajectories."""
        stats = self._rewards.of_prompt(key)
        overall = self._rewards.dataset.pass_rate
        if stats is None or stats.pass_rate is None or overall is None:
            return None
        own = stats.rewarded
        return (own * stats.pass_rate + PRIOR_TRAJECTORIES * overall) / (own + PRIOR_TRAJECTORIES)
