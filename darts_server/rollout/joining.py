"""Join single requests to groups, for trainers that send each trajectory as a request of its own.

Every request starts a candidate at once and takes a seat. When all seats are taken, or when no further request has
arrived for a while, the group is closed: the extra candidates start, and the group's rule selects. Each selected
trajectory answers a random waiting caller, so that the order of callers says nothing about lengths.

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
"""Number of recent groups that are checked for missing requests."""
OFTEN = 0.25
"""Share of groups with missing requests at which a warning is logged, once."""


@dataclass(slots=True)
class _Seat(Generic[RequestT, OutputT]):
    request: RequestT
    request_id: str
    caller: asyncio.Future[OutputT] | None
    """Waiting caller, or None after it has left."""
    output: OutputT | None = None
    answered: bool = False
    aborted: bool = False
    """Whether the caller gets the partial output of its own candidate, and leaves."""

    def give(self, output: OutputT) -> None:
        """Keep a trajectory for the seat, and answer the caller if it waits."""
        self.output = output
        if self.caller is not None and not self.caller.done() and not self.aborted:
            self.caller.set_result(output)


class GroupJoiner(Generic[RequestT, OutputT]):
    """Finds a group for each single request.

    Args:
        create_run: `Rollouts.create_run`.
        timeout: seconds without a further request after which a group is closed early.
        named_timeout: the same for groups with a name. A pool of trajectories may send the next request of a group only
            when another trajectory has ended.
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
        """Whether the server stops, so that groups neither wait for requests nor start extra candidates."""
        self._observer = observer
        self._timeout = timeout
        self._named_timeout = max(timeout, named_timeout)
        # Whether the group was closed early, for each of the newest groups.
        self._closed_early: deque[bool] = deque(maxlen=WINDOW)
        self._early_is_logged = False
        self.counted = CountedGroups(
            observer,
            self.report_group_closed,
            weight_version,
            timeout,
            self._named_timeout,
            clock,
        )

    async def join(self, request: JoinRequest[RequestT], on_join: Callable[[str], None]) -> OutputT:
        """Join a request to a group, and return its trajectory. ``on_join`` is called with the group's id.

        Raises:
            EngineError: error of the last failed candidate, if too few candidates could finish.
            GroupFailed, GroupAborted
        """
        group, seat = self._find_seat(request)
        assert seat.caller is not None
        try:
            on_join(group.group_id)
            output = await seat.caller
            seat.answered = not seat.aborted
        finally:
            # The caller has disconnected, or has the partial output of its own candidate.
            if not seat.answered:
                seat.caller = None
                seat.aborted = False
            group.stop_if_no_caller_waits()
        return output

    def has_open_group(self, join_key: str) -> bool:
        """Return whether a group waits for further requests."""
        return any(not group.closed.is_set() for group in self.groups.get(join_key, ()))

    def abort(self, request_id: str) -> None:
        """Answer a waiting request with the partial output of its own candidate.

        Its seat may still get a trajectory, for a late caller.
        """
        for group in self._all_groups():
            if group.run.has_ended:
                continue
            for seat in group.seats:
                if seat.request_id == request_id and seat.caller is not None and not seat.caller.done():
                    seat.aborted = True
                    group.run.runner.abort_request(seat.request, seat.caller)

    def drain(self) -> None:
        """Close all groups now, and later groups with their first request."""
        self.draining = True
        for group in self._all_groups():
            group.closed.set()
        self.counted.drain()

    def report_group_closed(self, *, full: bool, planned: int) -> None:
        """Report a closed group, and log once if many lack some of their ``planned`` requests."""
        self._observer.group_closed(full)
        self._closed_early.append(not full)
        count = sum(self._closed_early)
        if not self._early_is_logged and len(self._closed_early) == WINDOW and count >= OFTEN * WINDOW:
            self._early_is_logged = True
            logger.warning(
                "%d of the last %d groups of single requests were closed with fewer than %d requests, after "
                "--group-wait (--group-name-wait for groups with names): send all requests of a prompt at once, name "
                "groups (X-Darts-Group: id=NAME, or sessions that match --group-pattern), raise these times, or lower "
                "--group-size",
                count,
                WINDOW,
                planned,
            )

    def _find_seat(
        self, request: JoinRequest[RequestT]
    ) -> tuple["_JoinedGroup[RequestT, OutputT]", _Seat[RequestT, OutputT]]:
        """Return a group and a seat: a new seat in an open group, a vacant seat, or a seat in a new group."""
        groups = self.groups.get(request.join_key, [])
        for group in groups:
            if not group.closed.is_set():
                return group, group.add(request)
        for group in groups:
            vacant = group.take_vacant(request)
            if vacant is not None:
                return group, vacant

        group = _JoinedGroup(self, request, self._timeout if request.name is None else self._named_timeout)
        self.groups.setdefault(request.join_key, []).append(group)
        seat = group.add(request)
        if self.draining:
            group.closed.set()
        return group, seat

    def _all_groups(self) -> "list[_JoinedGroup[RequestT, OutputT]]":
        return [group for groups in self.groups.values() for group in groups]


class _JoinedGroup(Generic[RequestT, OutputT]):
    """A group of single requests. A task waits until the group is closed, and answers its callers."""

    def __init__(self, joiner: GroupJoiner[RequestT, OutputT], first: JoinRequest[RequestT], timeout: float) -> None:
        self.group_id = f"group-{first.request_id}"
        self.seats: list[_Seat[RequestT, OutputT]] = []
        self.closed = asyncio.Event()
        """Set when no further request may join."""
        self._joiner = joiner
        self._first = first
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        spec = GroupSpec(
            first.plan,
            first.request,
            self.group_id,
            first.prompt_key,
            delivers_early=True,
            on_abort=OnAbort.ANSWER,
            request_tokens=first.tokens,
        )
        self._ticket = first.ticket.split(candidates=0)
        self.run = joiner.create_run(spec, self.closed.set, self._ticket)
        if first.name is not None:
            self.run.request_ids += (first.name,)
        self._task = asyncio.get_running_loop().create_task(self._answer_callers())

    def add(self, request: JoinRequest[RequestT]) -> _Seat[RequestT, OutputT]:
        loop = asyncio.get_running_loop()
        seat: _Seat[RequestT, OutputT] = _Seat(request.request, request.request_id, loop.create_future())
        self.seats.append(seat)
        self.run.request_ids += (request.request_id,)
        self._ticket.merge(request.ticket)
        self.run.add_candidate(request.request)

        if self._timer is not None:
            self._timer.cancel()
        if len(self.seats) == self._first.plan.size:
            self.closed.set()
        else:
            self._timer = loop.call_later(self._timeout, self.closed.set)
        return seat

    def take_vacant(self, request: JoinRequest[RequestT]) -> _Seat[RequestT, OutputT] | None:
        """Give a late caller the seat of a disconnected caller, if there is one."""
        if self.run.has_ended:
            return None
        seat = next((seat for seat in self.seats if seat.caller is None and not seat.answered), None)
        if seat is None:
            return None
        seat.request_id = request.request_id
        seat.caller = asyncio.get_running_loop().create_future()
        if seat.output is not None:
            seat.caller.set_result(seat.output)
        self.run.request_ids += (request.request_id,)
        return seat

    def stop_if_no_caller_waits(self) -> None:
        if not self._ended and not any(seat.caller is not None and not seat.answered for seat in self.seats):
            self._end()
            self._task.cancel()

    # --- the group's own task -----------------------------------------------

    async def _answer_callers(self) -> None:
        """Wait until the group is closed, and give each trajectory to a random seat."""
        rng = random.Random()
        try:
            await self.closed.wait()
            # The group may have failed while requests joined it.
            if not self.run.has_ended:
                await self._start_extra_candidates()

            # Short trajectories come first. With random seats, the order of callers says nothing about lengths.
            async for trajectory in self.run.trajectories():
                seat = rng.choice(self._possible_seats(trajectory))
                seat.give(trajectory.output)
            # An aborted group has no trajectory for some seats.
            for seat in self.seats:
                if seat.output is None and not seat.aborted:
                    seat.give(self.run.engine.aborted_output(seat.request))
        except Exception as error:
            # Every caller that still waits gets the error.
            for seat in self.seats:
                if seat.caller is not None and not seat.caller.done():
                    seat.caller.set_exception(error)
        finally:
            self._end()

    async def _start_extra_candidates(self) -> None:
        """Set the group's size to the number of its seats, and start the extra candidates."""
        plan = self._first.plan
        full = len(self.seats) == plan.size
        if not full:
            plan = plan.shrink_to(len(self.seats))
        allocation = Allocation(plan.size)
        if not self._joiner.draining:
            self._joiner.report_group_closed(full=full, planned=self._first.plan.size)
            allocation = await self._joiner.allocator.allocate(plan, self._first.prompt_key)
            # The group may have failed meanwhile, and then its ticket is released.
            if not self.run.has_ended:
                allocation = replace(allocation, candidates=self._ticket.resize_within_limits(allocation.candidates))
        self.run.open(plan.rule_for(allocation.saturated), allocation)

    def _possible_seats(self, trajectory: Trajectory[OutputT]) -> list[_Seat[RequestT, OutputT]]:
        free = [seat for seat in self.seats if seat.output is None]
        candidates = self.run.runner.candidates
        candidate = candidates[trajectory.index]
        if not candidate.aborted:
            return free
        # An aborted trajectory answers the caller whose candidate it was, or a caller whose candidate was not aborted.
        own = [seat for seat in free if seat.request is candidate.request and candidate.has_own_request]
        if own:
            return own[:1]
        requests = [c.request for c in candidates if c.aborted or c.aborting_callers]
        others = [seat for seat in free if not any(seat.request is request for request in requests)]
        return others or free

    def _end(self) -> None:
        """Remove the group and stop its candidates, once."""
        # The group's task calls this when it ends. A task that is cancelled before its first step does not, so
        # `stop_if_no_caller_waits` calls it, too.
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        groups = self._joiner.groups
        key = self._first.join_key
        groups[key].remove(self)
        if not groups[key]:
            del groups[key]
        self.run.cancel()
