"""When candidates start: a few at a time, so that the event loop serves others in between, and the longest first.

An engine with priorities starts those first that are expected to be longest: a rollout ends with its last candidate, so
a long one that starts late holds all of it up. The order changes nothing of what is returned. It bounds how long
anything waits: a request goes before shorter ones that have come as long before it as it is expected to take longer,
and not before others, however long it is.
"""

import asyncio
from collections import deque
from collections.abc import Callable

TURN = 128
"""Cost that starts in one turn of the event loop: some five milliseconds on a slow core."""
CANDIDATE_COST = 8
"""Handing a candidate to vLLM takes a quarter of a millisecond: its parameters are checked and encoded."""
CARRIED_TOKENS = 16
"""Tokens that a candidate goes on from, for each unit of cost: they are detokenized when it starts."""
TOKEN_SECONDS = 0.03
"""How long a request waits for one that is expected to have one more token: about a decode step of a full engine."""


class StartQueue:
    """Let candidates and groups start in the order in which they come, a few in each turn of the event loop.

    The first ones start at once, so that groups of usual sizes do not wait. A group starts when no candidate waits:
    candidates reach the engine group by group, and those of a large batch are made no sooner than the engine gets them.
    """

    def __init__(self) -> None:
        self._candidates: deque[tuple[asyncio.Future[None], int]] = deque()
        self._groups: deque[tuple[asyncio.Future[None], int]] = deque()
        self._spent = 0  # in this turn

    async def wait(self, *, carried_tokens: int = 0, group: int | None = None) -> None:
        """Wait until a candidate may start, or a ``group`` with so many. ``carried_tokens``: that it goes on from."""
        waiting, cost = self._candidates, CANDIDATE_COST + carried_tokens // CARRIED_TOKENS
        if group is not None:
            waiting, cost = self._groups, group
        if self._candidates or waiting or not self._spend(cost):
            turn = asyncio.get_running_loop().create_future()
            waiting.append((turn, cost))
            await turn

    def _spend(self, cost: int) -> bool:
        """Spend it in this turn, if anything is left of it."""
        if self._spent >= TURN:
            return False
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._spent += cost
        return True

    def _next_turn(self) -> None:
        self._spent = 0
        for waiting in (self._candidates, self._groups):
            while waiting and (waiting[0][0].done() or self._spend(waiting[0][1])):
                turn, _ = waiting.popleft()
                if not turn.done():  # whoever waited may have been cancelled
                    turn.set_result(None)
            if waiting:
                return


StartingOrder = Callable[[int], float]
"""Returns the place of a candidate of one group among others, by the tokens that it has generated already: the lowest
start first. One that has become longer than was expected is a straggler, and will not be shorter."""
