"""A group of sessions as tasks. The sync client has only the requests, because threads cannot be cancelled."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import httpx

from ._async_sessions import AsyncSessionRequests
from ._errors import DartsError, GroupFailed, SessionOver
from ._io import async_shield
from ._requests import auth_headers
from ._sessions import SessionAccess, SessionEvent, SessionState, SessionTrajectory
from ._sync_sessions import SessionRequests

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SessionsApi = SessionRequests
logger = logging.getLogger(__name__)

# Seconds of a long poll. Some proxies close a connection after 30 silent seconds.
EVENTS_WAIT = 20.0
# Seconds to delete a group. Silent sessions end half an hour later.
DELETE_TIMEOUT = 30.0
# Seconds after the group's end to close environments.
CLEANUP_TIMEOUT = 60.0

# Reading root certificates takes 80 ms, and each session has a client.
cached_ssl_context = cache(httpx.create_ssl_context)


class RunningSession:
    """A session of an agent: requests (turns) with tool time between them."""

    def __init__(self, requests: AsyncSessionRequests, access: SessionAccess) -> None:
        self._requests = requests
        self.id = access.id
        self.index = access.index
        self.base_url = access.base_url
        self.api_key = access.api_key
        self.headers = auth_headers(access.api_key)
        self.over = asyncio.Event()
        """Set when the server reports the end, events are lost, or the group ends."""
        self.is_ended = False
        """Set while the end is reported, by the agent or for it, and after."""
        self.clients: list[AsyncOpenAI] = []

    def openai(self, **options: Any) -> "AsyncOpenAI":
        """Return an OpenAI client whose requests are turns. The end of the group's block closes it.

        Without `max_retries` it sends no turn twice.
        """
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # A retry would be a second turn.
        options.setdefault("max_retries", 0)
        if "http_client" not in options:
            # After a stop, the agent waits in the hook until its task is cancelled.
            hooks = {"response": [self._wait_if_stopped]}
            options["http_client"] = DefaultAsyncHttpxClient(verify=cached_ssl_context(), event_hooks=hooks)
        client = AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)
        self.clients.append(client)
        return client

    async def post(self, path: str, json: Any) -> Any:
        """Send a turn to a path such as `chat/completions`, and return its JSON. Raise SessionOver if it is over."""
        try:
            response = await self._requests.transport.request(
                "POST",
                f"{self.base_url}/{path.lstrip('/')}",
                # A second request would sample again.
                idempotent=False,
                json=json,
                headers=self.headers,
            )
        except SessionOver:
            # The event of the end cancels the agent's task, which is better than an error in the agent.
            await self.over.wait()
            raise
        await self._wait_if_stopped(response)
        return response.json()

    async def end(
        self,
        *,
        reward: float | None = None,
        correct: bool | None = None,
        usable: bool = True,
        finish_reason: str = "stop",
        metadata: Mapping[str, Any] | None = None,
    ) -> SessionState:
        """End the session. A session that the server has stopped only gets the reward and the metadata.

        Args:
            correct: by default, whether the reward is above 0.
            usable: False if a tool failed. Another session takes the place.
            finish_reason: "length" if the agent reached its own limit.
        """
        # Set before the request, so that the event of the end does not cancel the agent.
        self.is_ended = True
        try:
            return await self._requests.end(
                self.id,
                reward=reward,
                correct=correct,
                usable=usable,
                finish_reason=finish_reason,
                metadata=metadata,
            )
        except BaseException:
            self.is_ended = False
            raise

    async def state(self) -> SessionTrajectory:
        """Return the session with its tokens so far."""
        return await self._requests.read(self.id)

    async def stopped(self) -> None:
        """Wait until the session is over."""
        await self.over.wait()

    async def _wait_if_stopped(self, response: Any) -> None:
        # The agent must not go on with this answer. The event of the stop cancels its task.
        if response.status_code == 410 or "state=over" in response.headers.get("X-Darts-Session", ""):
            await self.over.wait()


class SessionGroup:
    """A group of sessions. See `AsyncClient.sessions`."""

    def __init__(self, requests: AsyncSessionRequests, options: Mapping[str, Any]) -> None:
        self.id = ""
        """Name of the group."""
        self.trajectories: Sequence[SessionTrajectory] = ()
        """Returned sessions by index, after the block."""
        self._requests = requests
        self._options = options
        self._sessions: dict[str, RunningSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # New sessions for the loop, and None at the end of the group.
        self._started_sessions: asyncio.Queue[RunningSession | None] = asyncio.Queue()
        self._end_event: SessionEvent | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        created = await self._requests.create(**self._options)
        self.id = created.group_id
        self._watcher = asyncio.create_task(self._follow_events(), name=f"darts-{self.id}")
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        # If the block was left early, its agents are not awaited, and no error hides the caller's error.
        end_event = self._end_event if exc_type is None else None
        try:
            if end_event is not None and self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=CLEANUP_TIMEOUT)
        finally:
            await self._close()
        if end_event is None:
            return
        if end_event.type != "completed":
            raise GroupFailed(f"group of sessions {self.id}: {end_event.type}: {end_event.reason}")
        self.trajectories = await self._requests.trajectories(self.id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunningSession:
        while (session := await self._started_sessions.get()) is not None:
            if not session.over.is_set():
                return session
        # Further calls end, too.
        self._started_sessions.put_nowait(None)
        # The error of the watcher, if any, is raised here.
        await self._watcher
        raise StopAsyncIteration

    def run(self, session: RunningSession, agent: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run an agent as a task, which is cancelled when the server stops the session.

        A returned number is the reward, unless the agent has called `end`. An exception makes the session unusable.
        """
        if self._is_closed or session.id in self._tasks:
            agent.close()
            raise RuntimeError(f"session {session.id} has an agent already, or the block of its group has ended")
        task = asyncio.create_task(self._run_agent(session, agent), name=f"darts-{session.id}")
        # A task that is cancelled before its first step never awaits the agent.
        task.add_done_callback(lambda _: agent.close())
        self._tasks[session.id] = task
        return task

    def to_rows(self, advantages: Sequence[float | None] | None = None) -> list[dict[str, Any]]:
        """Return a dictionary for each row. `advantages` has a number for each trajectory, by default the server's."""
        if advantages is None:
            advantages = [trajectory.advantage for trajectory in self.trajectories]
        return [
            {
                **trajectory.model_dump(include={"index", "trajectory_id", "reward", "weight"}),
                **row.model_dump(),
                "advantage": advantage,
            }
            for trajectory, advantage in zip(self.trajectories, advantages, strict=True)
            for row in trajectory.rows
        ]

    async def _follow_events(self) -> None:
        try:
            num_read = 0
            while self._end_event is None:
                answer = await self._requests.events(self.id, after=num_read, wait=EVENTS_WAIT)
                num_read = answer.next
                for event in answer.events:
                    self._apply_event(event)
        finally:
            # Without events nothing may wait: neither the loop over sessions, nor an agent for its cancellation.
            self._started_sessions.put_nowait(None)
            for session in self._sessions.values():
                session.over.set()

    def _apply_event(self, event: SessionEvent) -> None:
        if event.start is not None:
            session = RunningSession(self._requests, event.start)
            self._sessions[session.id] = session
            self._started_sessions.put_nowait(session)
        elif event.type in ("completed", "failed", "cancelled"):
            self._end_event = event
        elif event.type in ("stopped", "ended"):
            # These events always name a session: `or` is for mypy.
            session = self._sessions[event.session or ""]
            session.over.set()
            # The agent of a finished session may still close its environment.
            is_finished = session.is_ended or event.reason == "finished"
            if session.id in self._tasks and not is_finished:
                self._tasks[session.id].cancel()

    async def _run_agent(self, session: RunningSession, agent: Coroutine[Any, Any, object]) -> None:
        result: object = None
        error: BaseException | None = None
        try:
            result = await agent
        except (Exception, asyncio.CancelledError) as exc:
            is_stopped = session.over.is_set() and not session.is_ended
            # The server's stop, or the end of the block, is no fault of the agent.
            if self._is_closed or is_stopped:
                raise
            error = exc
        is_failed = error is not None
        if not (session.is_ended or self._is_closed):
            reward = _reward_of_result(result, session.id)
            try:
                state = await session.end(reward=reward, usable=not is_failed)
            except DartsError as exc:
                logger.warning("session %s could not be ended: %s", session.id, exc)
                return
            # The error may be a turn that was refused after a stop whose event has not arrived yet.
            is_failed = state.end == "failed"
        if is_failed:
            logger.warning("the agent of session %s failed", session.id, exc_info=error)

    async def _close(self) -> None:
        self._is_closed = True
        tasks = [self._watcher, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        try:
            # Without its last event the group still runs on the server.
            if self._end_event is None:
                with suppress(DartsError), async_shield(DELETE_TIMEOUT):
                    await self._requests.delete(self.id)
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)
            for session in self._sessions.values():
                for client in session.clients:
                    await client.close()


def _reward_of_result(result: object, session_id: str) -> float | None:
    # A tensor with a single number is a reward, too. Tensors of several numbers raise an error.
    if not isinstance(result, SupportsFloat):
        return None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        reward = float(result)
        if isfinite(reward):
            return reward
    logger.warning("session %s gets no reward: its agent returned %r", session_id, result)
    return None


class AsyncSessionsApi(AsyncSessionRequests):
    """The call runs a whole group."""

    def __call__(self, prompt_key: str | None = None, *, size: int, **options: Any) -> SessionGroup:
        """Run a group of sessions. See `create` for the arguments.

        ```python
        async with client.sessions("prompt-17", size=8, extra=4) as group:
            async for session in group:
                group.run(session, agent(session))
        rewards = [trajectory.reward for trajectory in group.trajectories]
        ```

        The loop yields replacements of unusable sessions, too, and ends with the group. Then agents have a minute to
        close their environments. Leaving the loop early deletes the group.

        Raises:
            GroupFailed: too few sessions could finish, or the group was deleted.
        """
        return SessionGroup(self, {"prompt_key": prompt_key, "size": size, **options})
