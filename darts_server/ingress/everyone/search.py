"""Send a request to several replicas, and pass on the answer of the one that accepts it, while it arrives."""

import asyncio
from collections.abc import Sequence

from darts_server.exceptions import ReplicaLost
from darts_server.ingress.everyone.broadcast import SUCCESS, BroadcastResult
from darts_server.ingress.forwarding.reply import Reply
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing, ReplicaFailure
from darts_server.ingress.replicas.whole import WholeAnswer, opened


class Search:
    """One request to several replicas."""

    def __init__(self, outgoing: Outgoing, reply: Reply) -> None:
        self._outgoing = outgoing
        self._reply = reply
        self._accepting: Member | None = None
        self._accepted = asyncio.Event()
        self._refused: dict[str, WholeAnswer] = {}
        self._failures: dict[str, str] = {}

    async def run(self, members: Sequence[Member], seconds: float) -> BroadcastResult | None:
        """Pass on the first answer that is a success; return the answers of all if there is none.

        ``seconds``: for the answers of all but one. The last one may take any time: the replica that has a running
        batch answers when that has ended. If it is lost, its request ends.

        Raises:
            ReplicaLost: the replica whose answer was passed on was lost before its caller got a part of it.
        """
        tasks = {asyncio.create_task(self._try(member)): member for member in members}
        accepting = asyncio.create_task(self._accepted.wait())
        try:
            await self._wait(set(tasks), accepting, seconds)
            if self._accepting is None:
                late = {m.name: f"no answer within {seconds:.0f} s" for task, m in tasks.items() if not task.done()}
                return BroadcastResult(self._refused, self._failures | late)
            await next(task for task, member in tasks.items() if member is self._accepting)
            return None
        finally:
            for task in (*tasks, accepting):
                task.cancel()
            await asyncio.wait((*tasks, accepting))

    async def _wait(self, pending: set[asyncio.Task[None]], accepting: asyncio.Task[bool], seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while pending and self._accepting is None:
            timeout = None if len(pending) == 1 else max(0.0, end - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait({*pending, accepting}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            pending -= done

    async def _try(self, member: Member) -> None:
        try:
            async with member.in_use(), opened(member.replica, self._outgoing) as answer:
                if answer.status not in SUCCESS:
                    body = b"".join([chunk async for chunk in answer.chunks()])
                    self._refused[member.name] = WholeAnswer(answer.status, answer.headers, body)
                elif self._accepting is None:
                    self._accepting = member
                    self._accepted.set()
                    await self._reply.pass_on(answer)
        except ReplicaFailure as error:
            if member is not self._accepting:
                self._failures[member.name] = str(error)
                return
            lost = ReplicaLost(f"the server {member.name} was lost while it answered ({error}): send the request again")
            if not self._reply.begun:
                raise lost from error
            await self._reply.break_off(lost)
