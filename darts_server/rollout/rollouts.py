"""The room's front door: which policy a request gets, and groups that run under it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from darts_server.engine.port import Engine, OutputT, RequestT
from darts_server.exceptions import InvalidRequest
from darts_server.policy.group import Group
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocator import Allocator
from darts_server.rollout.ledger import Ledger
from darts_server.rollout.observer import GroupObserver
from darts_server.rollout.prompts import Prompts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.watch import Watch
from darts_server.types import GroupRecord

OFF = "off"
"""The policy that shapes nothing: the engine serves the request as it always did."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Under which policy a group of ``size`` will be made."""

    policy: str
    shaping: Shaping
    size: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be asked for. ``group_size``: the only size that shaped requests may have, ``None`` for any."""

    max_group_size: int
    group_size: int | None = None


class Rollouts(Generic[RequestT, OutputT]):
    """Runs groups on one engine.

    Args:
        engine: where candidates run.
        policies: what each named policy does; ``off`` need not be named.
        default_policy: for requests that name none.
        limits: what may be asked for.
        prompts: what is known of prompts' lengths; every completed group adds to it.
        observers: hear of every group.
        peek_interval: seconds between two looks at token counts.
        batch_window: seconds within which groups that come together are allocated together.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine[RequestT, OutputT],
        policies: Mapping[str, Shaping],
        default_policy: str,
        limits: Limits,
        prompts: Prompts,
        observers: Sequence[GroupObserver] = (),
        peek_interval: float = 0.02,
        batch_window: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._policies = policies
        self._default = default_policy
        self._limits = limits
        self._prompts = prompts
        self._allocator = Allocator(prompts, batch_window)
        self._observers = tuple(observers)
        self._clock = clock
        self._watch = Watch(peek_interval)
        self._runs: dict[str, GroupRun[RequestT, OutputT]] = {}

    @property
    def running(self) -> int:
        """Groups that run now."""
        return len(self._runs)

    def plan(self, size: int, policy: str | None = None) -> Plan | None:
        """How a request for ``size`` trajectories of one prompt is served; ``None``: unshaped, by the engine alone.

        Raises:
            InvalidRequest: unknown policy, or a size that the policy or the limits do not allow.
        """
        name = self._default if policy is None else policy
        if name != OFF and name not in self._policies:
            raise InvalidRequest("policy", f"{name!r} is unknown; choose one of {', '.join(self.names())}")
        if size > self._limits.max_group_size:
            raise InvalidRequest(
                "n", f"at most {self._limits.max_group_size}, got {size}; lower n, or raise --max-group-size"
            )
        if name == OFF or size <= 1:
            return None
        if self._limits.group_size not in (None, size):
            raise InvalidRequest(
                "n",
                f"this server shapes groups of {self._limits.group_size} (--group-size), got {size}; "
                f"ask for that many, or use policy 'off'",
            )
        shaping = self._policies[name]
        shaping.rule(size)  # refuses sizes that do not fit
        return Plan(name, shaping, size)

    def names(self) -> Iterator[str]:
        """The policies that a request may name."""
        yield OFF
        yield from (name for name in self._policies if name != OFF)

    async def allocate(self, plan: Plan, prompt_key: str) -> int:
        """How many candidates the group gets. Adaptive policies wait a moment for others to allocate with."""
        return await self._allocator.candidates(plan.policy, plan.shaping, plan.size, prompt_key)

    def run(
        self,
        request: RequestT,
        plan: Plan,
        candidates: int,
        *,
        group_id: str,
        prompt_key: str | None = None,
        lots: Sequence[int] | None = None,
        early: bool = False,
    ) -> GroupRun[RequestT, OutputT]:
        """A group that starts when its trajectories are first asked for.

        Args:
            candidates: how many to start, at least the group size.
            prompt_key: under which its lengths are remembered; ``None`` for not at all.
            lots: seed of the tail's lottery; ``None`` for a fresh one.
            early: give trajectories as soon as they are known to belong.
        """
        rule = plan.shaping.rule(plan.size, candidates)
        group = Group(
            rule=rule,
            candidates=candidates,
            rng=np.random.default_rng(lots),
            # Every seat may be filled anew once; an engine that fails more often than that is not worth waiting for.
            spare=rule.size,
            early=early,
        )
        ledger = Ledger(group_id, plan.policy, rule.num_shortest, self._clock, prompt_key)
        run = GroupRun(self._engine, request, group, ledger, self, lambda: self._forget(group_id, run))
        self._runs[group_id] = run
        self._watch.add(run)
        return run

    def candidates_started(self, count: int) -> None:
        """Implements the observer for this room's own groups."""
        for observer in self._observers:
            observer.candidates_started(count)

    def group_ended(self, record: GroupRecord) -> None:
        """Implements the observer for this room's own groups."""
        self._prompts.learn(record)
        for observer in self._observers:
            observer.group_ended(record)

    def abort(self, group_id: str) -> None:
        """End the group of that id, if it runs, with an error for its caller."""
        if run := self._runs.get(group_id):
            run.abort()

    def _forget(self, group_id: str, run: GroupRun[RequestT, OutputT]) -> None:
        self._watch.remove(run)
        if self._runs.get(group_id) is run:
            del self._runs[group_id]
