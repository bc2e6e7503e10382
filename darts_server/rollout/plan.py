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
"""Starts exactly the requested trajectories."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Under `OFF` the group is only counted, see `CountedGroups`.

    Raises:
        InvalidRequest: the policy does not support the size.
    """

    policy: str
    shaping: Shaping
    size: int
    single: bool = False
    """Whether the group joins requests for one trajectory each."""
    auto: AutoLimits | None = None
    rule: SelectionRule = field(init=False, repr=False, compare=False)
    """Rule of a prompt that is not saturated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", self.shaping.selection_rule(self.size))

    def rule_for(self, saturated: bool) -> SelectionRule:
        if saturated:
            return self.shaping.selection_rule(self.size, saturated)
        return self.rule

    def candidates_without_statistics(self, redundancy_scale: float) -> int:
        """``redundancy_scale``: share of the redundancy to use, 0 to 1."""
        return reduce_candidates(self.shaping.candidates(self.size), self.size, redundancy_scale)

    def shrink_to(self, size: int) -> "Plan":
        if size == 1:
            return replace(
                self,
                shaping=UNSHAPED,
                size=1,
                auto=None,
            )
        try:
            return replace(self, size=size)
        except InvalidRequest:
            # The policy does not support this size.
            return replace(self, shaping=UNSHAPED, size=size)


@dataclass(frozen=True, slots=True)
class Limits:
    max_group_size: int = MAX_GROUP_SIZE
    group_size: int | None = None
    """The only size of shaped groups. None joins single requests only if they name a size."""
    joins_later_turns: bool = False
    """Whether requests that continue a trajectory are joined, too."""
    group_pattern: re.Pattern[str] | None = None
    """Matches session names. Its first capturing group is the group's name."""

    def group_name_of_session(self, session: str | None) -> str | None:
        if self.group_pattern is None or session is None:
            return None
        match = self.group_pattern.fullmatch(session)
        # An optional group of the pattern may be missing or empty.
        if match is None or not match[1]:
            return None
        return match[1]

    def should_join(self, kind: TurnKind) -> bool:
        if kind is TurnKind.OPENING:
            return True
        # Greedy and scored tokens are not trained on, so these requests never wait.
        return self.joins_later_turns and kind not in (TurnKind.GREEDY, TurnKind.SCORING)


class Planner:
    def __init__(
        self,
        policies: Mapping[str, Shaping],
        default_policy: str,
        limits: Limits,
        auto: AutoLimits | None = None,
    ) -> None:
        if auto is not None:
            policies = {**policies, AUTO: UNSHAPED}
        self.default_policy = default_policy
        self.limits = limits
        self._policies = policies
        self._auto = auto

    def plan(self, n: int, options: RequestOptions, *, in_batch: bool = False) -> Plan | None:
        """Plan a request for ``n`` trajectories. None: the engine serves the request without us.

        Only requests ``in_batch`` can run under `AUTO`. Others run as under `OFF`.

        Raises:
            InvalidRequest: the policy is unknown, or the policy or the limits do not allow the size.
        """
        name = self.default_policy if options.policy is None else options.policy
        if name != OFF and name not in self._policies:
            raise InvalidRequest("policy", f"{name!r} is unknown; choose one of {', '.join(self.policy_names())}")

        size = n
        is_single_request = n == 1
        field = "n"
        names_group = options.group_id is not None or options.group_size is not None
        if not is_single_request and names_group:
            raise InvalidRequest("n", f"must be 1 for a request that joins a group, got {n}; leave out the group, or n")
        if is_single_request:
            group_size = self.limits.group_size if options.group_size is None else options.group_size
            if group_size is None and names_group:
                raise InvalidRequest(
                    "group size",
                    f"is unknown for group {options.group_id!r}; add size=INT to X-Darts-Group "
                    f"(darts_group_size in vllm_xargs), or start the server with --group-size",
                )
            size = group_size or 1
            field = "group size"
        if size > self.limits.max_group_size:
            raise InvalidRequest(field, f"must be at most {self.limits.max_group_size}, got {size}; lower it")

        if name == OFF or (name == AUTO and not in_batch) or size <= 1:
            # A request that names `off` is not counted, because it may be of an evaluation.
            is_counted = size > 1 and is_single_request and options.policy != OFF and not in_batch
            return (
                Plan(
                    OFF,
                    UNSHAPED,
                    size,
                    single=True,
                )
                if is_counted
                else None
            )
        if self.limits.group_size not in (None, size):
            raise InvalidRequest(
                field,
                f"must be {self.limits.group_size}, the size of this server's groups (--group-size), got {size}; "
                f"request that many, or use policy 'off'",
            )
        auto = self._auto if name == AUTO else None
        return Plan(
            name,
            self._policies[name],
            size,
            single=is_single_request,
            auto=auto,
        )

    def shaping(self, policy: str) -> Shaping | None:
        return self._policies.get(policy)

    def policy_names(self) -> list[str]:
        return [OFF, *(name for name in self._policies if name != OFF)]
