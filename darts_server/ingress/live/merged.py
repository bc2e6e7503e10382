"""The feeds of several servers as one: their groups, on one clock."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from darts_server.ingress.replicas.replica import ReplicaFailure

ROOM = 1024
"""Groups, or changes of groups, that wait for a viewer. Servers skip states if it is slow."""
GROUP_TIMES = ("began", "ended")
CANDIDATE_TIMES = ("start", "stop")


class NotUnderstood(ReplicaFailure):
    """A server sends other events: it is of another version."""


class MergedFeeds:
    """What a viewer gets of several servers; see `MonitorAnswer`.

    ``clock``: that of the merged feed. Each server has its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: dict[str, Mapping[str, Any]] = {}
        self._offsets: dict[str, float] = {}
        self._running: dict[str, set[str]] = {}
        self._groups: list[dict[str, Any]] = []
        self._left: list[str] = []
        self._health: dict[str, Any] | None = None
        self._taken = asyncio.Event()

    @property
    def names(self) -> set[str]:
        """The servers whose state is known."""
        return set(self._latest)

    @property
    def has_news(self) -> bool:
        """Whether anything has changed since the previous event."""
        return bool(self._groups or self._left) or (bool(self._latest) and self._health != _health(self._latest))

    def add(self, server: str, event: Mapping[str, Any], *, is_whole: bool) -> None:
        """Add an event of a server. ``is_whole``: whether it has the whole state of that.

        Raises:
            NotUnderstood
        """
        if is_whole:
            self.remove(server)
        try:
            self._add(server, event, is_whole)
        except (KeyError, TypeError, AttributeError) as error:
            raise NotUnderstood(f"the feed of {server} is not understood: {error!r}") from error

    def _add(self, server: str, event: Mapping[str, Any], is_whole: bool) -> None:
        if is_whole:
            self._offsets[server] = self._clock() - event["now"]
        running = self._running.setdefault(server, set())
        self._drop(server, set(event["left"]))  # a viewer reads `left` before `groups`
        for group in event["groups"]:
            self._groups.append(self._placed(server, group))
            if "ended" in group:
                running.discard(group["group_id"])
            elif "began" in group:
                running.add(group["group_id"])
        running.difference_update(event["left"])
        self._left += event["left"]
        self._latest[server] = {name: event[name] for name in ("running", "candidates", "health")}

    def remove(self, server: str) -> None:
        """Remove a server, and what ran on it. Groups that had ended stay."""
        self._latest.pop(server, None)
        gone = self._running.pop(server, set())
        self._left += sorted(gone)
        self._drop(server, gone)

    def _drop(self, server: str, gone: set[str]) -> None:
        """Forget states of groups that a viewer does not have yet."""
        if gone:
            self._groups = [each for each in self._groups if each["server"] != server or each["group_id"] not in gone]

    async def wait_for_room(self) -> None:
        """Wait while much waits for the viewer."""
        while len(self._groups) > ROOM:
            self._taken.clear()
            await self._taken.wait()

    def take(self) -> dict[str, Any]:
        """Return everything since the previous event, as an event. The state of a server must be known."""
        self._health = _health(self._latest)
        event = {
            "now": self._clock(),
            "running": sum(each["running"] for each in self._latest.values()),
            "candidates": sum(each["candidates"] for each in self._latest.values()),
            "groups": self._groups,
            "left": self._left,
            "health": self._health,
        }
        self._groups, self._left = [], []
        self._taken.set()
        return event

    def _placed(self, server: str, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with its server, and its times on the common clock."""
        offset = self._offsets[server]
        placed = {**_shifted(group, GROUP_TIMES, offset), "server": server}
        placed["candidates"] = [_shifted(each, CANDIDATE_TIMES, offset) for each in group["candidates"]]
        return placed


def _shifted(fields: Mapping[str, Any], times: tuple[str, ...], offset: float) -> dict[str, Any]:
    return {name: value + offset if name in times else value for name, value in fields.items()}


def _health(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the oldest weights, the rewards of the server that knows the most, and all faults."""
    healths = {name: each["health"] for name, each in servers.items()}
    weights = min(
        (each["weights"] for each in healths.values()), key=lambda each: (each["version"], each["state"] == "serving")
    )
    rewards = [each["rewards"] for each in healths.values() if each["rewards"] is not None]
    faults = [f"{name}: {each['store_fault']}" for name, each in healths.items() if each["store_fault"] is not None]
    return {
        "weights": weights,
        "rewards": max(rewards, key=lambda each: each["rewarded"], default=None),
        "store_fault": "; ".join(faults) or None,
    }
