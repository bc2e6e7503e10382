"""Join single requests to groups, for trainers that send each trajectory as a request of its own.

Every request starts a candidate at once and takes a seat. When all seats are taken, or no further request has arrived
for a while, the group is closed: the extra candidates start, and the group's rule selects. Each selected trajectory
answers a random waiting caller, so that the order of callers says nothing about lengths.

* A group that is closed early consists of the requests that arrived. A request alone is not shaped.
* A caller that disconnects leaves its seat in the draw, so that no length is favoured. While the group runs, the seat's
  trajectory is kept for a late caller. When no caller waits any more, all candidates are stopped.
* A late caller takes the seat of a disconnected caller, or begins a new group.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

from darts_server.engine.port import OutputT, RequestT
from darts_server.observers import GroupEvents
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.counted import CountedGroups
from darts_server.rollout.run import GroupRun, Trajectory
from darts_server.rollout.spec import GroupSpec, JoinRequest, OnAbort
from darts_server.serving.admission import Ticket

logger = logging.getLogger(__name__)

WINDOW = 64
"""Recent groups that are checked for missing requests."""
OFTEN = 0.25
"""Share of groups with missing requests that is logged, once."""


@dataclass(slots=True)
class _Seat(Generic[RequestT, OutputT]):
    request: RequestT
    request_id: str
    caller: asyncio.Future[OutputT] | None
    """None after the caller has left."""
    output: OutputT | None = None
    is_answered: bool = False
    has_aborted: bool = False
    """Whether the caller gets its own candidate's partial output, and leaves."""

    def assign(self, output: OutputT) -> None:
        self.output = output
        if self.caller is not None and not self.caller.done() and not self.has_aborted:
            self.caller.set_result(output)


class GroupJoiner(Generic[RequestT, OutputT]):
    """Finds a group for each single request.

    Args:
        timeout: seconds without a further request after which a group is closed early.
        named_timeout: for groups with a name. A pool may send a group's next request only when another trajectory has
        ended.
    """

    def __init__(
        self,
        create_run: Callable[[GroupSpec[RequestT], Callable[[], None], Ticket], GroupRun[RequestT, OutputT]],
        allocator: Allocator,
        observer: GroupEvents,
        timeout: float,
        named_timeout: float,
        weight_version: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.create_run = create_run
        self.allocator = allocator
        self.groups: dict[str, list[_JoinedGroup[RequestT, OutputT]]] = {}
        """Running groups, by join key."""
        self.draining = False
        """Whether groups neither wait for requests nor start extra candidates, because the server stops."""
        self._observer = observer
        self._timeout = timeout
        self._named_timeout = max(timeout, named_timeout)
        self._were_closed_early: deque[bool] = deque(maxlen=WINDOW)
        self._is_early_closing_logged = False
        self.counted = CountedGroups(
            observer,
            self.report_group_closed,
            weight_version,
            timeout,
            self._named_timeout,
            clock,
        )

    async def join(self, request: JoinRequest[RequestT], on_join: Callable[[str], None]) -> OutputT:
        """Return a trajectory of the request's group. ``on_join`` is called with the group's id.

        Raises:
            EngineError: error of the last failed candidate, if too few candidates could finish.
            GroupFailed, GroupAborted
        """
        group, seat = self._find_seat(request)
        assert seat.caller is not None
        try:
            on_join(group.group_id)
            output = await seat.caller
            seat.is_answered = not seat.has_aborted
        finally:
            # The caller has disconnected or has a partial output, so another caller may take the seat.
            if not seat.is_answered:
                seat.caller = None
                seat.has_aborted = False
            group.stop_if_no_caller_waits()
        return output

    def has_open_group(self, join_key: str) -> bool:
        return any(not group.closed.is_set() for group in self.groups.get(join_key, ()))

    def abort(self, request_id: str) -> None:
        """Answer a waiting request with its own candidate's partial output. A late caller may take its seat."""
        for group in self._all_groups():
            if group.run.has_ended:
                continue
            for seat in group.seats:
                if seat.request_id == request_id and seat.caller is not None and not seat.caller.done():
                    seat.has_aborted = True
                    group.run.runner.abort_request(seat.request, seat.caller)

    def drain(self) -> None:
        """Close all groups now, and later groups with their first request."""
        self.draining = True
        for group in self._all_groups():
            group.closed.set()
        self.counted.drain()

    def report_group_closed(self, *, is_full: bool, planned_size: int) -> None:
        """Report a closed group, and log once if many groups lack requests."""
        self._observer.group_closed(is_full)
        self._were_closed_early.append(not is_full)
        num_closed_early = sum(self._were_closed_early)
        if self._is_early_closing_logged or len(self._were_closed_early) < WINDOW:
            return
        if num_closed_early >= OFTEN * WINDOW:
            self._is_early_closing_logged = True
            logger.warning(
                "%d of the last %d groups of single requests were closed with fewer than %d requests, after "
                "--group-wait (--group-name-wait for groups with names): send all requests of a prompt at once, name "
                "groups (X-Darts-Group: id=NAME, or sessions that match --group-pattern), raise these times, or lower "
                "--group-size",
                num_closed_early,
                WINDOW,
                planned_size,
            )

    def _find_seat(
        self, request: JoinRequest[RequestT]
    ) -> tuple["_JoinedGroup[RequestT, OutputT]", _Seat[RequestT, OutputT]]:
        """Return a new seat in an open group, a vacant seat, or a seat in a new group."""
        groups = self.groups.get(request.join_key, [])
        for group in groups:
            if not group.closed.is_set():
                return group, group.add_seat(request)
        for group in groups:
            vacant_seat = group.take_vacant_seat(request)
            if vacant_seat is not None:
                return group, vacant_seat

        group = _JoinedGroup(self, request, self._timeout if request.name is None else self._named_timeout)
        self.groups.setdefault(request.join_key, []).append(group)
        seat = group.add_seat(request)
        if self.draining:
            group.closed.set()
        return group, seat

    def _all_groups(self) -> "list[_JoinedGroup[RequestT, OutputT]]":
        return [group for groups in self.groups.values() for group in groups]


class _JoinedGroup(Generic[RequestT, OutputT]):
    def __init__(
        self,
        joiner: GroupJoiner[RequestT, OutputT],
        first_request: JoinRequest[RequestT],
        timeout: float,
    ) -> None:
        self.group_id = f"group-{first_request.request_id}"
        self.seats: list[_Seat[RequestT, OutputT]] = []
        self.closed = asyncio.Event()
        """Set when no further request may join."""
        self._joiner = joiner
        self._first_request = first_request
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._is_removed = False
        spec = GroupSpec(
            first_request.plan,
            first_request.request,
            self.group_id,
            first_request.prompt_key,
            delivers_early=True,
            on_abort=OnAbort.ANSWER,
            request_tokens=first_request.tokens,
        )
        self._ticket = first_request.ticket.split(candidates=0)
        self.run = joiner.create_run(spec, self.closed.set, self._ticket)
        if first_request.name is not None:
            self.run.request_ids += (first_request.name,)
        self._task = asyncio.get_running_loop().create_task(self._answer_callers())

    def add_seat(self, request: JoinRequest[RequestT]) -> _Seat[RequestT, OutputT]:
        loop = asyncio.get_running_loop()
        seat: _Seat[RequestT, OutputT] = _Seat(request.request, request.request_id, loop.create_future())
        self.seats.append(seat)
        self.run.request_ids += (request.request_id,)
        self._ticket.merge(request.ticket)
        self.run.add_candidate(request.request)

        # Every request restarts the timeout.
        if self._timer is not None:
            self._timer.cancel()
        if len(self.seats) == self._first_request.plan.size:
            self.closed.set()
        else:
            self._timer = loop.call_later(self._timeout, self.closed.set)
        return seat

    def take_vacant_seat(self, request: JoinRequest[RequestT]) -> _Seat[RequestT, OutputT] | None:
        if self.run.has_ended:
            return None
        for seat in self.seats:
            if seat.caller is None and not seat.is_answered:
                seat.request_id = request.request_id
                seat.caller = asyncio.get_running_loop().create_future()
                if seat.output is not None:
                    seat.caller.set_result(seat.output)
                self.run.request_ids += (request.request_id,)
                return seat
        return None

    def stop_if_no_caller_waits(self) -> None:
        has_caller = any(seat.caller is not None and not seat.is_answered for seat in self.seats)
        if not has_caller and not self._is_removed:
            self._remove()
            self._task.cancel()

    # --- the group's own task -----------------------------------------------

    async def _answer_callers(self) -> None:
        """Give each trajectory to a random seat."""
        rng = random.Random()
        try:
            await self.closed.wait()
            # The group may have failed while requests joined it.
            if not self.run.has_ended:
                await self._start_extra_candidates()

            # Short trajectories come first, and must not all go to the first callers.
            async for trajectory in self.run.trajectories():
                seat = rng.choice(self._possible_seats(trajectory))
                seat.assign(trajectory.output)
            # An aborted group has no trajectory for some seats.
            for seat in self.seats:
                if seat.output is None and not seat.has_aborted:
                    seat.assign(self.run.engine.aborted_output(seat.request))
        except Exception as error:
            for seat in self.seats:
                if seat.caller is not None and not seat.caller.done():
                    seat.caller.set_exception(error)
        finally:
            self._remove()

    async def _start_extra_candidates(self) -> None:
        """Set the group's size to its seats, and start the extra candidates."""
        plan = self._first_request.plan
        is_full = len(self.seats) == plan.size
        if not is_full:
            plan = plan.shrink_to(len(self.seats))
        allocation = Allocation(plan.size)
        if not self._joiner.draining:
            self._joiner.report_group_closed(is_full=is_full, planned_size=self._first_request.plan.size)
            allocation = await self._joiner.allocator.allocate(plan, self._first_request.prompt_key)
            # The group may have failed meanwhile, and then its ticket is released.
            if not self.run.has_ended:
                allocation = replace(allocation, candidates=self._ticket.resize_within_limits(allocation.candidates))
        self.run.open(plan.rule_for(allocation.saturated), allocation)

    def _possible_seats(self, trajectory: Trajectory[OutputT]) -> list[_Seat[RequestT, OutputT]]:
        free_seats = [seat for seat in self.seats if seat.output is None]
        candidates = self.run.runner.candidates
        candidate = candidates[trajectory.index]
        if not candidate.aborted:
            return free_seats
        # An aborted trajectory answers its own candidate's caller, unless the caller already has a trajectory.
        if candidate.has_own_request:
            for seat in free_seats:
                if seat.request is candidate.request:
                    return [seat]
        # Otherwise it takes no seat whose own aborted candidate answers the caller.
        aborted_requests = [c.request for c in candidates if c.aborted or c.aborting_callers]
        other_seats = [seat for seat in free_seats if not any(seat.request is request for request in aborted_requests)]
        return other_seats or free_seats

    def _remove(self) -> None:
        # Called by the group's task, and by `stop_if_no_caller_waits`: a task that is cancelled before its first step
        # runs no cleanup.
        if self._is_removed:
            return
        self._is_removed = True
        if self._timer is not None:
            self._timer.cancel()
        groups = self._joiner.groups
        key = self._first_request.join_key
        groups[key].remove(self)
        if not groups[key]:
            del groups[key]
        self.run.cancel()
