"""Plan how a request is served, before anything starts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from darts_server.exceptions import InvalidRequest
from darts_server.group.selection import SelectionRule
from darts_server.policy.allocation import reduce_candidates
from darts_server.policy.auto import AutoLimits
from darts_server.policy.shaping import Shaping
from darts_server.types import AUTO, MAX_GROUP_SIZE, OFF, RequestOptions, TurnKind

UNSHAPED = Shaping(redundancy=1.0, max_redundancy=1.0, num_longest=0)
"""Starts and returns exactly the requested trajectories."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The policy of a group of ``size``. ``single``: the group joins requests for one trajectory each. Under `OFF` the
    group is only counted, see `CountedGroups`.

    ``auto``: limits of `AUTO`; ``None`` under other policies.

    Raises:
        InvalidRequest: the policy does not support the size.
    """

    policy: str
    shaping: Shaping
    size: int
    single: bool = False
    auto: AutoLimits | None = None
    rule: SelectionRule = field(init=False, repr=False, compare=False)
    """Selection rule of the group, unless its prompt is saturated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", self.shaping.selection_rule(self.size))

    def rule_for(self, saturated: bool) -> SelectionRule:
        """Return the selection rule of the group. ``saturated``: see `Shaping.is_saturated`."""
        if saturated:
            return self.shaping.selection_rule(self.size, saturated)
        return self.rule

    def candidates(self, scale: float) -> int:
        """Return the number of candidates before anything is known of the prompt.

        ``scale``: share of the redundancy that there is room for, 0 to 1.
        """
        return reduce_candidates(self.shaping.candidates(self.size), self.size, scale)

    def shrunk(self, size: int) -> "Plan":
        """Adapt the plan to a group that got fewer requests than planned.

        A single request is not shaped, nor is a size that the policy does not support.
        """
        if size == 1:
            return replace(self, shaping=UNSHAPED, size=1, auto=None)
        try:
            return replace(self, size=size)
        except InvalidRequest:
            return replace(self, shaping=UNSHAPED, size=size)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of group sizes.

    ``group_size``: the only size that shaped requests may have, and the size of groups joined from single requests;
    ``None``: any size, and single requests are joined only if they name a size. ``joins_later_turns``: whether requests
    that continue a trajectory are joined, too. ``group_pattern``: matches sessions that name their group, which is what
    its first group matches.
    """

    max_group_size: int = MAX_GROUP_SIZE
    group_size: int | None = None
    joins_later_turns: bool = False
    group_pattern: re.Pattern[str] | None = None

    def group_name(self, session: str | None) -> str | None:
        """The name of the group that a session's name has in it, if any."""
        if self.group_pattern is None or session is None or (match := self.group_pattern.fullmatch(session)) is None:
            return None
        return match[1] or None

    def joins(self, kind: TurnKind) -> bool:
        """Whether a single request is joined to a group. One that is not sampled to be trained on never waits."""
        is_sampled = kind not in (TurnKind.GREEDY, TurnKind.SCORING)
        return kind is TurnKind.OPENING or (self.joins_later_turns and is_sampled)


class Planner:
    """Choose the policy of each request."""

    def __init__(
        self, policies: Mapping[str, Shaping], default_policy: str, limits: Limits, auto: AutoLimits | None = None
    ) -> None:
        """``auto``: limits of `AUTO`; ``None`` where there is no such policy."""
        self.default_policy = default_policy
        self.limits = limits
        self._policies = policies if auto is None else {**policies, AUTO: UNSHAPED}
        self._auto = auto

    def plan(self, n: int, options: RequestOptions, *, in_batch: bool = False) -> Plan | None:
        """Plan a request for ``n`` trajectories of one prompt; ``None``: unshaped, by the engine alone.

        ``in_batch``: whether it is one of a batch. Other requests run under `AUTO` as under `OFF`.

        Raises:
            InvalidRequest: unknown policy, or a size that the policy or the limits do not allow.
        """
        name = self.default_policy if options.policy is None else options.policy
        if name != OFF and name not in self._policies:
            raise InvalidRequest("policy", f"{name!r} is unknown; choose one of {', '.join(self.names())}")
        limits, field, size = self.limits, "n", n
        named = options.group_id is not None or options.group_size is not None
        if n > 1 and named:
            raise InvalidRequest("n", f"must be 1 for a request that joins a group, got {n}; leave out the group, or n")
        if n <= 1:
            group_size = limits.group_size if options.group_size is None else options.group_size
            if group_size is None and named:
                raise InvalidRequest(
                    "group size",
                    f"is unknown for group {options.group_id!r}; add size=INT to X-Darts-Group "
                    f"(darts_group_size in vllm_xargs), or start the server with --group-size",
                )
            field, size = "group size", group_size or 1
        if size > limits.max_group_size:
            raise InvalidRequest(field, f"must be at most {limits.max_group_size}, got {size}; lower it")
        is_idle = name == AUTO and not in_batch
        if name == OFF or is_idle or size <= 1:
            if size > 1 and n <= 1 and options.policy != OFF and not in_batch:
                return Plan(OFF, UNSHAPED, size, single=True)
            return None
        if limits.group_size not in (None, size):
            raise InvalidRequest(
                field,
                f"this server shapes groups of {limits.group_size} (--group-size), got {size}; "
                f"ask for that many, or use policy 'off'",
            )
        auto = self._auto if name == AUTO else None
        return Plan(name, self._policies[name], size, single=n == 1, auto=auto)

    def shaping(self, policy: str) -> Shaping | None:
        """The shaping of a policy; ``None`` for ``off`` and for unknown names."""
        return self._policies.get(policy)

    def names(self) -> list[str]:
        """Names that a request may use."""
        return [OFF, *(name for name in self._policies if name != OFF)]
