"""Turns settings into policies, at the start and when settings change."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from darts_server.exceptions import InvalidRequest
from darts_server.group.informative import Select
from darts_server.policy.auto import AutoLimits
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import (
    INFORMATIVE_REDUNDANCY,
    INFORMATIVE_SPREAD,
    REDUNDANCY,
    BudgetKind,
    Shaping,
    Tail,
    build_policies,
)
from darts_server.policy.survival import Pruning
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.settings import Settings, apply_patch
from darts_server.settings.sources import RUNTIME_NAMES
from darts_server.types import NO_LIMIT, MaxLost


class Control:
    """The settings in force. Implements `darts_server.http.resources.policy.PolicyControl`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.planner = make_planner(settings)
        self._rollouts: Rollouts[Any, Any] | None = None
        self._has_drafter = settings.speculate == "auto"
        self._switch_drafts: Callable[[bool], Awaitable[None]] | None = None

    def connect(
        self, rollouts: Rollouts[Any, Any], switch_drafts: Callable[[bool], Awaitable[None]] | None = None
    ) -> None:
        """Let `change` replace the planner of ``rollouts``, and switch drafts on or off."""
        self._rollouts = rollouts
        self._switch_drafts = switch_drafts

    def current_settings(self) -> dict[str, object]:
        runtime_settings = self.settings.model_dump(mode="json", include=set(RUNTIME_NAMES))
        policies = list(self.planner.policy_names())
        # This policy needs rewards while groups run.
        if not self.settings.verifier:
            policies.remove("informative")
        return {**runtime_settings, "policies": policies}

    def schema(self) -> dict[str, object]:
        properties = Settings.model_json_schema()["properties"]
        return {
            "type": "object",
            "properties": {name: properties[name] for name in RUNTIME_NAMES},
            "additionalProperties": False,
        }

    async def change(self, patch: Mapping[str, object]) -> dict[str, object]:
        settings = apply_patch(self.settings, patch)
        if settings.speculate == "auto" and not self._has_drafter:
            raise InvalidRequest("speculate", "cannot be auto: start the server with --speculate auto")
        planner = make_planner(settings)
        if self._rollouts is not None:
            self._rollouts.planner = planner
        changes_drafts = settings.speculate != self.settings.speculate
        self.settings = settings
        self.planner = planner
        if changes_drafts and self._switch_drafts is not None:
            await self._switch_drafts(settings.speculate == "auto")
        return self.current_settings()

    def new_planner(self, overrides: Mapping[str, object]) -> Planner:
        """Create the planner of a batch. The key ``name`` overrides the policy, other keys override settings.

        Raises:
            InvalidRequest: names the invalid key.
        """
        if "speculate" in overrides:
            raise InvalidRequest(
                "speculate", "is the same for all requests; change it for the server with PATCH /darts/v1/policy"
            )
        patch = dict(overrides)
        if "name" in patch:
            if "policy" in patch:
                raise InvalidRequest("policy", "has both 'name' and 'policy', which are the same; omit either")
            patch["policy"] = patch.pop("name")
        return make_planner(apply_patch(self.settings, patch))


def make_planner(settings: Settings) -> Planner:
    if settings.redundancy == "auto":
        # This redundancy applies until the spread of lengths is known.
        redundancy = min(REDUNDANCY, settings.max_redundancy)
        budget = BudgetKind.CV_LOG
    else:
        redundancy = settings.redundancy
        budget = BudgetKind.FIXED
    uniform = Shaping(
        redundancy=redundancy,
        num_longest=settings.num_longest,
        tail=Tail(settings.tail),
        max_redundancy=settings.max_redundancy,
        budget=budget,
    )
    # The other policies stop long candidates. Their default redundancy does not suit ``informative``.
    informative_redundancy = INFORMATIVE_REDUNDANCY
    if "redundancy" in settings.model_fields_set and budget is BudgetKind.FIXED:
        informative_redundancy = redundancy
    # Prompts get different numbers of candidates. `informative_redundancy` sets the mean.
    informative_maximum = INFORMATIVE_SPREAD * informative_redundancy
    if "max_redundancy" in settings.model_fields_set:
        informative_maximum = max(settings.max_redundancy, informative_redundancy)
    informative = Shaping(
        redundancy=informative_redundancy,
        max_redundancy=informative_maximum,
        adapts_to_signal=True,
        skip_floor=settings.skip_floor,
        select=Select(settings.select),
        advantage_std=settings.advantage_std,
    )
    max_lost = MaxLost(answers=settings.max_lost_share)
    if settings.max_lost_share == 1:
        # Also without the default limit of groups that lose all right answers.
        max_lost = NO_LIMIT
    deadline = Deadline(
        quantile=settings.deadline_quantile,
        exploration=settings.exploration,
        max_lost=max_lost,
    )
    return Planner(
        build_policies(uniform, deadline, Pruning(settings.keep_ratio), informative),
        settings.policy,
        Limits(
            group_size=settings.group_size,
            joins_later_turns=settings.later_turns == "join",
            group_pattern=re.compile(settings.group_pattern) if settings.group_pattern else None,
        ),
        AutoLimits(settings.most_stale, settings.exploration),
    )
