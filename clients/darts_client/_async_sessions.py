"""Requests about groups of sessions."""

from typing import Any

from ._async_transport import AsyncTransport
from ._models import parse_response
from ._prompts import drop_none
from ._requests import API, quote_segment
from ._sessions import CreatedGroup, SessionEvents, SessionGroupState, SessionState, SessionTrajectory

# Seconds beyond the time that the server waits for events.
ANSWER_TIMEOUT = 30.0


class AsyncSessionRequests:
    """Single requests, for programs that run sessions by themselves."""

    def __init__(self, transport: AsyncTransport) -> None:
        self.transport = transport

    async def create(self, prompt_key: str | None = None, *, size: int, **options: Any) -> CreatedGroup:
        """Create a group. The server returns `size` of its sessions.

        Args:
            prompt_key: name for statistics.
            options: `extra`, the number of further sessions; `policy`; `measure`, "tokens" or "seconds"; `metadata`;
                `stopped_as`, the finish reason of a stopped turn; `over_status`, the status of later turns.
        """
        body = drop_none({"prompt_key": prompt_key, "size": size, **options})
        # A second request would create a second group.
        response = await self.transport.request(
            "POST",
            f"{API}/sessions",
            idempotent=False,
            json=body,
        )
        return parse_response(CreatedGroup, response)

    async def end(self, session_id: str, **result: Any) -> SessionState:
        """End a session. See `RunningSession.end` for `result`."""
        # A session ends once, so a retry is safe.
        response = await self.transport.request("POST", f"{_session_path(session_id)}:end", json=result)
        return parse_response(SessionState, response)

    async def read(self, session_id: str) -> SessionTrajectory:
        """Return a session with its tokens so far."""
        response = await self.transport.request("GET", _session_path(session_id))
        return parse_response(SessionTrajectory, response)

    async def get(self, group_id: str) -> SessionGroupState:
        """Return a group. Raise NotFound if it is not kept."""
        response = await self.transport.request("GET", _group_path(group_id))
        return parse_response(SessionGroupState, response)

    async def trajectories(self, group_id: str) -> list[SessionTrajectory]:
        """Return the selected sessions of a complete group, by index."""
        group = await self.get(group_id)
        return [await self.read(session.id) for session in group.sessions if session.selected]

    async def events(self, group_id: str, *, after: int = 0, wait: float = 0.0) -> SessionEvents:
        """Return the events after the first `after`. Wait up to `wait` seconds for an event."""
        response = await self.transport.request(
            "GET",
            f"{_group_path(group_id)}/events",
            params={"after": after, "wait": wait},
            timeout=self.transport.options.request_timeout(wait + ANSWER_TIMEOUT),
        )
        return parse_response(SessionEvents, response)

    async def delete(self, group_id: str) -> None:
        """End a group, and stop its sessions."""
        await self.transport.request("DELETE", _group_path(group_id))


def _session_path(session_id: str) -> str:
    return f"{API}/sessions/{quote_segment(session_id)}"


def _group_path(group_id: str) -> str:
    return f"{API}/session-groups/{quote_segment(group_id)}"
