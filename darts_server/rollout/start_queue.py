"""Start a few candidates in each turn of the event loop, and order them on an engine with priorities.

Long candidates start first, because a rollout ends with its last candidate. The order does not change which
trajectories are returned, and starves no request: a long request overtakes a shorter request only if it arrives soon
after it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

MAX_TURN_COST = 128
"""Cost of the starts in one turn of the event loop: some five milliseconds on a slow core."""
CANDIDATE_COST = 8
"""vLLM checks and encodes the parameters of a candidate in a quarter of a millisecond."""
CARRIED_TOKENS_PER_COST = 16
"""vLLM detokenizes carried tokens at the start."""
TOKEN_SECONDS = 0.03
"""Head start for each expected token: about a decode step of a full engine."""

StartingOrder = Callable[[int], float]
"""Returns a candidate's place by its number of tokens, the lowest first. A candidate that is longer than expected gets
ahead with every token."""


class FirstRound:
    """Lets the other candidates start when every group has started its first candidate.

    Drafts are made from answers to the same prompt. If all candidates of a group started together, no candidate would
    have an answer while the others need drafts.
    """

    def __init__(self, group_ids: Iterable[str]) -> None:
        self._unstarted_group_ids = set(group_ids)
        self._is_over = asyncio.Event()

    def mark_group_started(self, group_id: str) -> None:
        """Call this for groups that end before their first candidate, too."""
        self._unstarted_group_ids.discard(group_id)
        if not self._unstarted_group_ids:
            self._is_over.set()

    async def wait(self) -> None:
        await self._is_over.wait()


class StartQueue:
    """Lets candidates and groups start in order of arrival.

    A group starts only while no candidate waits, so that candidates reach the engine group by group.
    """

    def __init__(self) -> None:
        # A future that is set when the candidate or group may start, and the cost.
        self._waiting_candidates: deque[tuple[asyncio.Future[None], int]] = deque()
        self._waiting_groups: deque[tuple[asyncio.Future[None], int]] = deque()
        self._spent_in_turn = 0

    async def wait_for_candidate(self, carried_tokens: int) -> None:
        cost = CANDIDATE_COST + carried_tokens // CARRIED_TOKENS_PER_COST
        if self._waiting_candidates or not self._spend(cost):
            await self._wait(self._waiting_candidates, cost)

    async def wait_for_group(self, candidates: int) -> None:
        # One unit of cost for each candidate that the group will create.
        if self._waiting_candidates or self._waiting_groups or not self._spend(candidates):
            await self._wait(self._waiting_groups, candidates)

    async def _wait(self, queue: deque[tuple[asyncio.Future[None], int]], cost: int) -> None:
        may_start = asyncio.get_running_loop().create_future()
        queue.append((may_start, cost))
        await may_start

    def _spend(self, cost: int) -> bool:
        """Return whether the cost was spent: this turn may have spent `MAX_TURN_COST`."""
        if self._spent_in_turn >= MAX_TURN_COST:
            return False
        if self._spent_in_turn == 0:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._spent_in_turn += cost
        return True

    def _begin_turn(self) -> None:
        self._spent_in_turn = 0
        for queue in (self._waiting_candidates, self._waiting_groups):
            while queue:
                may_start, cost = queue[0]
                # The place of a task that was cancelled costs nothing.
                if not may_start.done():
                    if not self._spend(cost):
                        return
                    may_start.set_result(None)
                queue.popleft()
