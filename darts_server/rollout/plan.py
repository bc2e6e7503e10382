"""How a request will be served, decided before anything starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from darts_server.exceptions import InvalidRequest
from darts_server.policy.shaping import Shaping
from darts_server.types import RequestOptions

OFF = "off"
"""The policy that shapes nothing: the engine serves the request as it always did."""

UNSHAPED = Shaping(redundancy=1.0, max_redundancy=1.0, num_longest=0)
"""Every candidate is returned, and none is added."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Under which policy a group of ``size`` will be made. ``single``: of requests for one trajectory each."""

    policy: str
    shaping: Shaping
    size: int
    single: bool = False

    def shrunk(self, size: int) -> "Plan":
        """The plan for a group that got fewer requests than it should.

        One request alone is not shaped, nor is a size that the policy cannot do.
        """
        try:
            self.shaping.selection_rule(size)
        except InvalidRequest:
            return replace(self, shaping=UNSHAPED, size=size)
        return replace(self, shaping=self.shaping if size > 1 else UNSHAPED, size=size)


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be asked for.

    ``group_size``: the only size that shaped requests may have, and that of groups put together from single requests;
    ``None`` for any, and no such groups unless a request names a size.
    """

    max_group_size: int
    group_size: int | None = None


class Planner:
    """What each named policy does, and which one a request gets."""

    def __init__(self, policies: Mapping[str, Shaping], default_policy: str, limits: Limits) -> None:
        self._policies = policies
        self._default = default_policy
        self._limits = limits

    def plan(self, n: int, options: RequestOptions) -> Plan | None:
        """How a request for ``n`` trajectories of one prompt is served; ``None``: unshaped, by the engine alone.

        Raises:
            InvalidRequest: unknown policy, or a size that the policy or the limits do not allow.
        """
        name = self._default if options.policy is None else options.policy
        if name != OFF and name not in self._policies:
            raise InvalidRequest("policy", f"{name!r} is unknown; choose one of {', '.join(self.names())}")
        self._check_size("n", n)
        size = self._size(n, options)
        if name == OFF or size <= 1:
            return None
        if self._limits.group_size not in (None, size):
            raise InvalidRequest(
                "n" if n > 1 else "group size",
                f"this server shapes groups of {self._limits.group_size} (--group-size), got {size}; "
                f"ask for that many, or use policy 'off'",
            )
        shaping = self._policies[name]
        shaping.selection_rule(size)  # refuses sizes that do not fit
        return Plan(name, shaping, size, single=n == 1)

    def shaping(self, policy: str) -> Shaping | None:
        """What the named policy does; ``None`` for one that does nothing or is not known (any more)."""
        return self._policies.get(policy)

    def names(self) -> Iterator[str]:
        """The policies that a request may name."""
        yield OFF
        yield from (name for name in self._policies if name != OFF)

    def _size(self, n: int, options: RequestOptions) -> int:
        named = options.group_id is not None or options.group_size is not None
        if n > 1 and named:
            raise InvalidRequest(
                "n", f"a request that is part of a group asks for one trajectory, got {n}; leave the group out, or n"
            )
        if n > 1:
            return n
        size = self._limits.group_size if options.group_size is None else options.group_size
        if size is None and named:
            raise InvalidRequest(
                "group size",
                f"nobody says how many requests group {options.group_id!r} has; add size=INT to X-Darts-Group "
                f"(darts_group_size in vllm_xargs), or start the server with --group-size",
            )
        if size is not None:
            self._check_size("group size", size)
        return size or 1

    def _check_size(self, field: str, size: int) -> None:
        if size > self._limits.max_group_size:
            raise InvalidRequest(
                field, f"at most {self._limits.max_group_size}, got {size}; lower it, or raise --max-group-size"
            )
