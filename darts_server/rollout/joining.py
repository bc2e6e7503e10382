"""Groups put together from single requests, for trainers that ask for each trajectory by itself.

Every request starts a candidate at once and takes a seat. When the group has as many seats as its size, or when no
further request has come for a while, it is sealed: the extra candidates start, and the group's rule decides. Callers
are interchangeable: each trajectory that is known to belong answers one of those who wait, drawn by lot, so that
nobody's place in the queue tells how long its trajectory is.

* Missing callers: a group that is sealed short is a group of those who came. One caller alone gets its own candidate,
  which is what an unshaped request would have got.
* A caller that hangs up leaves its seat in the lottery, so that no length is favoured; what falls to the seat is kept
  while the group runs, for a late caller. When nobody waits any more, what still runs is stopped.
* A late caller takes the seat of one that hung up, if there is one. Others begin a group of their own.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol

from darts_server.engine.port import OutputT, RequestT
from darts_server.exceptions import GroupAborted
from darts_server.policy.pruning.survival import Pruning
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import Plan
from darts_server.rollout.run import GroupRun


class Host(Protocol[RequestT, OutputT]):
    """Where groups run."""

    def gathering(
        self,
        request: RequestT,
        policy: str,
        *,
        group_id: str,
        prompt_key: str | None = None,
        on_end: Callable[[], None],
        pruning: Pruning | None = None,
    ) -> GroupRun[RequestT, OutputT]:
        """A group that is not open yet. ``on_end`` is called when it has ended, whichever way."""
        ...

    async def allocate(self, plan: Plan, prompt_key: str) -> Allocation:
        """How many candidates it gets."""
        ...


@dataclass(frozen=True, slots=True)
class Joining(Generic[RequestT]):
    """One request that is to be part of a group.

    ``same``: equal for requests that belong together. ``name``: the caller's name for the group, if it has one.
    """

    request: RequestT
    request_id: str
    plan: Plan
    prompt_key: str
    same: str
    name: str | None = None


@dataclass(slots=True)
class _Seat(Generic[OutputT]):
    """``caller`` is ``None`` when it hung up; ``output`` is what fell to the seat."""

    request_id: str
    caller: asyncio.Future[OutputT] | None
    output: OutputT | None = None
    taken: bool = False

    @property
    def waits(self) -> bool:
        return self.caller is not None and not self.taken


class Assembly(Generic[RequestT, OutputT]):
    """Finds each single request its group.

    ``quiet``: seconds without a further request after which a group is sealed short.
    """

    def __init__(self, host: Host[RequestT, OutputT], quiet: float) -> None:
        self._host = host
        self._quiet = quiet
        self._groups: dict[str, list[_Assembled[RequestT, OutputT]]] = {}
        self._hurrying = False

    def hurry(self) -> None:
        """Seal all groups with those who are there, and from now on every group with its first caller."""
        self._hurrying = True
        for groups in self._groups.values():
            for group in groups:
                group.seal()

    async def join(self, joining: Joining[RequestT], told: Callable[[str], None]) -> OutputT:
        """The trajectory of one request; ``told`` hears its group's id.

        Leaving early, by cancellation, gives up the seat.

        Raises:
            EngineError: of the last candidate that failed, if too few could finish.
            GroupFailed, GroupAborted
        """
        group, seat = self._seat(joining)
        assert seat.caller is not None
        try:
            told(group.group_id)
            output = await seat.caller
        except BaseException:
            group.vacate(seat)
            raise
        group.take(seat)
        return output

    def awaits(self, same: str) -> bool:
        """Whether a group is not complete without more such requests."""
        return any(not group.sealed for group in self._groups.get(same, ()))

    def abort(self, request_id: str) -> None:
        """End the wait of the caller with that request, with an error."""
        for groups in self._groups.values():
            for group in groups:
                group.abort(request_id)

    def _seat(self, joining: Joining[RequestT]) -> tuple["_Assembled[RequestT, OutputT]", _Seat[OutputT]]:
        groups = self._groups.setdefault(joining.same, [])
        for group in groups:
            if not group.sealed:
                return group, group.add(joining)
        for group in groups:
            if (vacant := group.vacant(joining.request_id)) is not None:
                return group, vacant
        group = _Assembled(self._host, joining, self._quiet, lambda: self._forget(joining.same, group))
        groups.append(group)
        seat = group.add(joining)
        if self._hurrying:
            group.seal()
        return group, seat

    def _forget(self, same: str, group: "_Assembled[RequestT, OutputT]") -> None:
        self._groups[same].remove(group)
        if not self._groups[same]:
            del self._groups[same]


class _Assembled(Generic[RequestT, OutputT]):
    """One group and those who wait for its trajectories."""

    def __init__(
        self, host: Host[RequestT, OutputT], first: Joining[RequestT], quiet: float, on_end: Callable[[], None]
    ) -> None:
        self.group_id = f"group-{first.request_id}"
        self._host = host
        self._plan = first.plan
        self._prompt_key = first.prompt_key
        self._quiet = quiet
        self._on_end = on_end
        self._seats: list[_Seat[OutputT]] = []
        self._ended = False
        self._extras = True
        self._sealing = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._lottery = random.Random()
        self._run: GroupRun[RequestT, OutputT] = host.gathering(
            first.request,
            first.plan.policy,
            group_id=self.group_id,
            prompt_key=first.prompt_key,
            on_end=self._sealing.set,
            pruning=first.plan.shaping.pruning if first.plan.shaping.prunes else None,
        )
        if first.name is not None:
            self._run.answers(first.name)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def sealed(self) -> bool:
        return self._sealing.is_set()

    def add(self, joining: Joining[RequestT]) -> _Seat[OutputT]:
        """A seat for one more request, with a candidate of its own."""
        seat: _Seat[OutputT] = _Seat(joining.request_id, asyncio.get_running_loop().create_future())
        self._seats.append(seat)
        self._run.answers(joining.request_id)
        self._run.gather(joining.request)
        if self._timer is not None:
            self._timer.cancel()
        if len(self._seats) == self._plan.size:
            self._sealing.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._quiet, self._sealing.set)
        return seat

    def seal(self) -> None:
        """Wait for no other caller, and start nothing more. Harmless if no caller is waited for."""
        self._extras = self.sealed
        self._sealing.set()

    def vacant(self, request_id: str) -> _Seat[OutputT] | None:
        """The seat of a caller that hung up, for a late one, while the group runs."""
        for seat in self._seats:
            if seat.caller is None and not seat.taken and not self._run.ended:
                seat.request_id = request_id
                seat.caller = asyncio.get_running_loop().create_future()
                if seat.output is not None:
                    seat.caller.set_result(seat.output)
                self._run.answers(request_id)
                return seat
        return None

    def take(self, seat: _Seat[OutputT]) -> None:
        """The caller has its trajectory."""
        seat.taken = True
        self._stop_if_nobody_waits()

    def vacate(self, seat: _Seat[OutputT]) -> None:
        """The caller hung up."""
        seat.caller = None
        self._stop_if_nobody_waits()

    def _stop_if_nobody_waits(self) -> None:
        if not self._ended and not any(s.waits for s in self._seats):
            self._end()
            self._task.cancel()

    def abort(self, request_id: str) -> None:
        for seat in self._seats:
            if seat.request_id == request_id and seat.caller is not None and not seat.caller.done():
                seat.caller.set_exception(GroupAborted("the request was aborted while its group was running"))

    # --- the group's own task -----------------------------------------------

    async def _serve(self) -> None:
        try:
            await self._sealing.wait()
            if not self._run.ended:
                await self._open()
            async for trajectory in self._run.trajectories():
                self._give(trajectory.output)
        except Exception as error:
            self._fail(error)
        finally:
            self._end()

    async def _open(self) -> None:
        plan = self._sealed_plan()
        grant = await self._host.allocate(plan, self._prompt_key) if self._extras else Allocation(plan.size)
        most = plan.shaping.max_candidates(plan.size) if self._extras else 0
        self._run.open(plan.shaping.selection_rule(plan.size, grant.candidates), grant, most)

    def _end(self) -> None:
        """From now on nobody is seated here. Synchronous: the task may be cancelled before its first turn."""
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_end()
        self._run.leave()

    def _sealed_plan(self) -> Plan:
        return self._plan if len(self._seats) == self._plan.size else self._plan.shrunk(len(self._seats))

    def _give(self, output: OutputT) -> None:
        seat = self._lottery.choice([s for s in self._seats if s.output is None])
        seat.output = output
        if seat.caller is not None and not seat.caller.done():
            seat.caller.set_result(output)

    def _fail(self, error: Exception) -> None:
        for seat in self._seats:
            if seat.caller is not None and not seat.caller.done():
                seat.caller.set_exception(error)
