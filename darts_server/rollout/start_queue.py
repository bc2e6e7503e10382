"""Start a few candidates in each turn of the event loop, and order them on an engine with priorities.

Long candidates start first, because a rollout ends with its last candidate. The order does not change which
trajectories are returned. It starves no request: a long request overtakes a shorter request only if it arrives soon
after it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

TURN = 128
"""Cost that starts in one turn of the event loop: some five milliseconds on a slow core."""
CANDIDATE_COST = 8
"""vLLM checks and encodes the parameters of a candidate in a quarter of a millisecond."""
CARRIED_TOKENS = 16
"""Carried tokens for one unit of cost: vLLM detokenizes them at the start."""
TOKEN_SECONDS = 0.03
"""Head start for each expected token: about a decode step of a full engine."""

StartingOrder = Callable[[int], float]
"""Returns the place of a candidate by its number of tokens, the lowest first. A candidate that is longer than expected
gets ahead with every token."""


class FirstRound:
    """Lets the other candidates of a batch start when every group has started its first candidate.

    Drafts are made from answers to the same prompt. If all candidates of a group started together, no candidate would
    have an answer while the others need drafts.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        self._missing = set(groups)
        self._is_over = asyncio.Event()

    def arrive(self, group_id: str, _: object = None) -> None:
        """Record that a group has started its first candidate, or has ended."""
        self._missing.discard(group_id)
        if not self._missing:
            self._is_over.set()

    async def wait(self) -> None:
        await self._is_over.wait()


class StartQueue:
    """Lets candidates and groups start in order of arrival, a few in each turn of the event loop.

    A group starts only while no candidate waits, so that candidates reach the engine group by group.
    """

    def __init__(self) -> None:
        self._candidates: deque[tuple[asyncio.Future[None], int]] = deque()
        self._groups: deque[tuple[asyncio.Future[None], int]] = deque()
        self._spent = 0

    async def wait(self, *, carried_tokens: int = 0, group: int | None = None) -> None:
        """Wait until a candidate may start, or a ``group`` of that many candidates."""
        if group is None:
            waiting = self._candidates
            cost = CANDIDATE_COST + carried_tokens // CARRIED_TOKENS
        else:
            waiting = self._groups
            cost = group
        # A group waits while any candidate waits. Candidates keep their order, and groups theirs.
        if self._candidates or waiting or not self._spend(cost):
            turn = asyncio.get_running_loop().create_future()
            waiting.append((turn, cost))
            await turn

    def _spend(self, cost: int) -> bool:
        """Spend the cost unless this turn has spent `TURN`; return whether it was spent."""
        if self._spent >= TURN:
            return False
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._spent += cost
        return True

    def _next_turn(self) -> None:
        """Begin a turn: let waiting candidates start, and then groups."""
        self._spent = 0
        for waiting in (self._candidates, self._groups):
            while waiting:
                turn, cost = waiting[0]
                # The place of a task that was cancelled costs nothing.
                if not turn.done():
                    if not self._spend(cost):
                        return
                    turn.set_result(None)
                waiting.popleft()
