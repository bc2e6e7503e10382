"""What the settings make of shaping, and how it changes while the server runs."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from darts_server.policy.deadline import Deadline
from darts_server.policy.named_policies import build_policies
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import BudgetKind, Shaping, Tail
from darts_server.rollout.plan import OFF, Limits, Planner
from darts_server.settings import Settings, apply_patch, runtime_schema, runtime_values


class Configuration(NamedTuple):
    """What the rollout room is told of shaping."""

    policies: Mapping[str, Shaping]
    default_policy: str
    limits: Limits


class Configurable(Protocol):
    """The part of the rollout room that is used here."""

    def configure(self, policies: Mapping[str, Shaping], default_policy: str, limits: Limits) -> None: ...


class Control:
    """The settings in force. Implements :class:`darts_server.http.resources.policy.PolicyControl`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._configuration = configuration(settings)
        self._rollouts: Configurable | None = None

    def drive(self, rollouts: Configurable) -> None:
        """Tell these of every change."""
        self._rollouts = rollouts

    def configuration(self) -> Configuration:
        return self._configuration

    def prunes(self, policy: str) -> bool:
        """Whether the policy of that name prunes by quality."""
        shaping = self._configuration.policies.get(policy)
        return shaping is not None and shaping.prunes

    def current(self) -> dict[str, object]:
        """The settings that can change, and under ``policies`` the names that a request may give."""
        names = [OFF, *self.configuration().policies]
        return {**runtime_values(self.settings), "policies": names}

    def schema(self) -> dict[str, object]:
        return runtime_schema()

    def change(self, patch: Mapping[str, object]) -> dict[str, object]:
        """Put all of the patch in force for groups to come, or nothing; what is in force then.

        Raises:
            InvalidRequest: names the key that cannot be changed so.
        """
        settings = apply_patch(self.settings, patch)
        configured = configuration(settings)
        if self._rollouts is not None:
            self._rollouts.configure(*configured)
        self.settings, self._configuration = settings, configured
        return self.current()

    def planner(self, overrides: Mapping[str, object]) -> Planner:
        """What policies do for one caller: under ``name`` which one, and other settings than those in force.

        Raises:
            InvalidRequest: names the key that cannot be changed so.
        """
        patch = {("policy" if key == "name" else key): value for key, value in overrides.items()}
        return Planner(*configuration(apply_patch(self.settings, patch)))


def configuration(settings: Settings) -> Configuration:
    """The policies that the settings describe."""
    uniform = Shaping(
        redundancy=settings.redundancy,
        num_shortest=settings.num_shortest,
        num_longest=settings.num_longest,
        tail=Tail(settings.tail),
        max_redundancy=settings.max_redundancy,
        budget=BudgetKind(settings.budget),
        budget_aversion=settings.budget_aversion,
    )
    deadline = Deadline(
        quantile=settings.deadline_quantile,
        floor=settings.deadline_floor,
        ceiling=settings.deadline_ceiling,
        exploration=settings.exploration,
        max_lost_share=settings.max_lost_share,
    )
    pruning = Pruning(
        keep_ratio=settings.keep_ratio,
        target_positive_ratio=settings.target_positive_ratio,
        balance_strength=settings.balance_strength,
        min_survival=settings.min_survival,
        max_survival=settings.max_survival,
        aimed=settings.survival == "aimed",
    )
    return Configuration(
        policies=build_policies(uniform, deadline, pruning, settings.refill),
        default_policy=settings.policy,
        limits=Limits(settings.max_group_size, settings.group_size),
    )
