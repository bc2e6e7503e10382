"""Join single requests to groups, for trainers that send each trajectory as a request of its own.

Every request starts a candidate at once and takes a seat. When the group has as many seats as its size, or when no
further request has arrived for a while, it is closed to new requests: the extra candidates start, and the group's rule
selects. Callers are interchangeable: each trajectory that is known to belong to the group answers a random waiting
caller, so that the order of callers says nothing about lengths.

* Missing requests: a group that is closed short is a group of the requests that arrived. A single request gets its own
  candidate, as it would if it were not shaped.
* A caller that disconnects leaves its seat in the draw, so that no length is favoured; the seat's trajectory is kept
  while the group runs, for a late caller. When no caller waits any more, all running candidates are stopped.
* A late caller takes the seat of a disconnected one, if there is one. Otherwise it begins a new group.

Where the policy does not shape groups they are only counted, see `CountedGroups`: each caller gets its own candidate's
answer as soon as it is there.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

from darts_server.engine.port import OutputT, RequestT
from darts_server.observers import GroupEvents
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.counted import CountedGroups
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec, JoinRequest, OnAbort
from darts_server.serving.admission import Ticket

logger = logging.getLogger(__name__)

WINDOW = 64
"""Groups of which the log says how many were sealed short."""
OFTEN = 0.25
"""Share of these from which it does, once."""


@dataclass(slots=True)
class _Seat(Generic[RequestT, OutputT]):
    """``caller``: ``None`` after it has disconnected. ``output``: the trajectory that was drawn for the seat.

    ``aborted``: its caller gets what its own candidate has generated, and leaves the seat as if it had disconnected.
    """

    request: RequestT
    request_id: str
    caller: asyncio.Future[OutputT] | None
    output: OutputT | None = None
    answered: bool = False
    aborted: bool = False

    def give(self, output: OutputT) -> None:
        """Give it its trajectory, and its caller too if one waits."""
        self.output = output
        if self.caller is not None and not self.caller.done() and not self.aborted:
            self.caller.set_result(output)


class GroupJoiner(Generic[RequestT, OutputT]):
    """Find a group for each single request.

    Args:
        collect: creates a group to which candidates are added one by one before it is opened: with its spec, what is
            called when it has ended, and the ticket that holds its candidates until then.
        allocator: of the extra candidates.
        observer: what happens to groups is reported here.
        timeout: seconds without a further request of the group after which it is closed short.
        named_timeout: the same for a group that has a name. In a pool of trajectories a request of it may come only
            when another trajectory has ended, and no server knows of trajectories that are in their environments:
            silence does not mean that none is.
        weight_version: of the weights that are served now.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        collect: Callable[[GroupSpec[RequestT], Callable[[], None], Ticket], GroupRun[RequestT, OutputT]],
        allocator: Allocator,
        observer: GroupEvents,
        timeout: float,
        named_timeout: float,
        weight_version: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.collect, self.allocator = collect, allocator
        self._observer = observer
        self._timeout = timeout
        self._named_timeout = max(timeout, named_timeout)
        self.groups: dict[str, list[_JoinedGroup[RequestT, OutputT]]] = {}
        """Those that run, by join key."""
        self.draining = False
        """Whether the server stops: no group waits for further requests, or starts extra candidates."""
        self._sealed_short: deque[bool] = deque(maxlen=WINDOW)  # of the newest groups
        self._short_is_logged = False
        self.counted = CountedGroups(observer, self.report_sealed, weight_version, timeout, self._named_timeout, clock)
        """Groups whose requests the engine serves by itself."""

    async def join(self, request: JoinRequest[RequestT], on_join: Callable[[str], None]) -> OutputT:
        """Wait for the trajectory of one request; ``on_join`` is called with its group's id.

        Cancelling gives up the seat.

        Raises:
            EngineError: of the last candidate that failed, if too few could finish.
            GroupFailed, GroupAborted
        """
        group, seat = self._find_seat(request)
        assert seat.caller is not None
        try:
            on_join(group.group_id)
            output = await seat.caller
            seat.answered = not seat.aborted
        finally:
            if not seat.answered:  # its caller has disconnected, or has what its own candidate had generated
                seat.caller, seat.aborted = None, False
            group.stop_if_unattended()
        return output

    def expects(self, join_key: str) -> bool:
        """Whether a group with this key waits for further requests."""
        return any(not group.closed.is_set() for group in self.groups.get(join_key, ()))

    def abort(self, request_id: str) -> None:
        """Answer the request with that id, if it waits, with what its own candidate has generated so far.

        Its seat stays in the draw.
        """
        for group in [group for groups in self.groups.values() for group in groups]:
            for seat in [] if group.run.has_ended else group.seats:
                if seat.request_id == request_id and seat.caller is not None and not seat.caller.done():
                    seat.aborted = True
                    group.run.runner.abort_request(seat.request, seat.caller)

    def drain(self) -> None:
        """Close all groups with the requests that have arrived, and from now on every group with its first one."""
        self.draining = True
        for group in [group for groups in self.groups.values() for group in groups]:
            group.closed.set()
        self.counted.drain()

    def _find_seat(
        self, request: JoinRequest[RequestT]
    ) -> tuple["_JoinedGroup[RequestT, OutputT]", _Seat[RequestT, OutputT]]:
        groups = self.groups.get(request.join_key, [])
        for group in groups:
            if not group.closed.is_set():
                return group, group.add(request)
        for group in groups:
            if (vacant := group.take_vacant(request)) is not None:
                return group, vacant
        group = _JoinedGroup(self, request, self._timeout if request.name is None else self._named_timeout)
        self.groups.setdefault(request.join_key, []).append(group)
        seat = group.add(request)
        if self.draining:
            group.closed.set()
        return group, seat

    def report_sealed(self, *, full: bool, planned: int) -> None:
        """Report a group that takes no more requests, and log once when many are sealed with fewer than planned."""
        self._observer.group_sealed(full)
        self._sealed_short.append(not full)
        count = sum(self._sealed_short)
        if not self._short_is_logged and len(self._sealed_short) == WINDOW and count >= OFTEN * WINDOW:
            self._short_is_logged = True
            logger.warning(
                "%d of the last %d groups of single requests were sealed with fewer than %d, after --group-wait, or "
                "--group-name-wait for those with names: send all requests of a prompt at once, name groups "
                "(X-Darts-Group: id=NAME, or sessions that match --group-pattern), raise these, or lower --group-size",
                count,
                WINDOW,
                planned,
            )


class _JoinedGroup(Generic[RequestT, OutputT]):
    """One group and the callers that wait for its trajectories."""

    def __init__(self, joiner: GroupJoiner[RequestT, OutputT], first: JoinRequest[RequestT], timeout: float) -> None:
        self.group_id = f"group-{first.request_id}"
        self._joiner = joiner
        self._first = first
        self._timeout = timeout
        self.seats: list[_Seat[RequestT, OutputT]] = []
        self._ended = False
        self.closed = asyncio.Event()
        """Whether no further request may join."""
        self._timer: asyncio.TimerHandle | None = None
        spec = GroupSpec(
            first.plan,
            first.request,
            self.group_id,
            first.prompt_key,
            early=True,
            on_abort=OnAbort.ANSWER,
            tokens=first.tokens,
        )
        self._ticket = first.ticket.split(0)
        self.run = joiner.collect(spec, self.closed.set, self._ticket)
        if first.name is not None:
            self.run.request_ids += (first.name,)
        self._task = asyncio.get_running_loop().create_task(self._answer_callers())

    def add(self, request: JoinRequest[RequestT]) -> _Seat[RequestT, OutputT]:
        """Add a seat for one more request, and start a candidate for it."""
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
        """Give the seat of a disconnected caller to a late one, while the group runs."""
        for seat in self.seats:
            if seat.caller is None and not seat.answered and not self.run.has_ended:
                seat.request_id = request.request_id
                seat.caller = asyncio.get_running_loop().create_future()
                if seat.output is not None:
                    seat.caller.set_result(seat.output)
                self.run.request_ids += (request.request_id,)
                return seat
        return None

    def stop_if_unattended(self) -> None:
        """Stop everything once no caller waits any more."""
        if not self._ended and not any(seat.caller is not None and not seat.answered for seat in self.seats):
            self._end()
            self._task.cancel()

    # --- the group's own task -----------------------------------------------

    async def _answer_callers(self) -> None:
        """Open the group once its callers are there, and answer a random one with each trajectory."""
        first, run, joiner, rng = self._first, self.run, self._joiner, random.Random()
        try:
            await self.closed.wait()
            if not run.has_ended:
                full = len(self.seats) == first.plan.size
                plan = first.plan if full else first.plan.shrunk(len(self.seats))
                allocation = Allocation(plan.size)
                if not joiner.draining:
                    joiner.report_sealed(full=full, planned=first.plan.size)
                    allocation = await joiner.allocator.allocate(plan, first.prompt_key)
                    if not run.has_ended:
                        allocation = replace(allocation, candidates=self._ticket.fit(allocation.candidates))
                run.open(plan.rule_for(allocation.saturated), allocation)
            async for trajectory in run.trajectories():
                free = [seat for seat in self.seats if seat.output is None]
                candidate = run.runner.candidates[trajectory.index]
                if candidate.aborted:  # it goes to the caller that it was started for
                    own = [seat for seat in free if seat.request is candidate.request and candidate.has_own_request]
                    owners = [c.request for c in run.runner.candidates if c.aborted or c.aborting]
                    others = [seat for seat in free if not any(seat.request is request for request in owners)]
                    free = own[:1] or others or free
                rng.choice(free).give(trajectory.output)
            for seat in self.seats:
                if seat.output is None and not seat.aborted:  # the group was aborted, and has nothing for it
                    seat.give(run.engine.aborted_output(seat.request))
        except Exception as error:
            for seat in self.seats:
                if seat.caller is not None and not seat.caller.done():
                    seat.caller.set_exception(error)
        finally:
            self._end()

    def _end(self) -> None:
        """Accept no further caller. Synchronous: the task may be cancelled before it has run at all."""
        if self._ended:
            return
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        groups, key = self._joiner.groups, self._first.join_key
        groups[key].remove(self)
        if not groups[key]:
            del groups[key]
        self.run.cancel()
