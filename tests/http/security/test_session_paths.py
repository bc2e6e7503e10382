"""The paths below a session's base URL, as the router sees them."""

from typing import Any

import pytest

from darts_server.http.security.session_paths import SESSION_KEY, SESSIONS, TURN_PATHS, SessionPaths

pytestmark = pytest.mark.anyio
ID = "ses-1f"


async def pass_on(path: str, root_path: str = "", kind: str = "http") -> dict[str, Any]:
    """Return the scope in which the app behind the middleware is called."""
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": kind, "path": path, "raw_path": path.encode(), "root_path": root_path, "state": {"other": 1}}
    await SessionPaths(app)(scope, None, None)  # type: ignore[arg-type]
    (passed,) = seen
    return passed


@pytest.mark.parametrize("root_path", ["", "/api"])
@pytest.mark.parametrize("turn", sorted(TURN_PATHS))
async def test_turns_reach_their_usual_route_with_the_id_in_the_state(turn: str, root_path: str) -> None:
    # A base URL ends with /v1, whether the route begins with it or not.
    below = {f"{SESSIONS}{ID}{turn}", f"{SESSIONS}{ID}/v1/{turn.removeprefix('/v1').lstrip('/')}"}
    for path in below:
        scope = await pass_on(root_path + path, root_path)
        assert scope["path"] == root_path + turn
        assert scope["raw_path"] == (root_path + turn).encode()
        assert scope["state"] == {"other": 1, SESSION_KEY: ID}


async def test_a_proxy_may_have_removed_the_root_path() -> None:
    scope = await pass_on(f"{SESSIONS}{ID}/v1/completions", "/api")
    assert (scope["path"], scope["state"][SESSION_KEY]) == ("/v1/completions", ID)


@pytest.mark.parametrize(
    "path",
    [
        f"{SESSIONS}{ID}",
        f"{SESSIONS}{ID}:end",
        f"{SESSIONS}{ID}/events",
        f"{SESSIONS}{ID}/pause",
        f"{SESSIONS}{ID}/v1/../pause",
        f"{SESSIONS}{ID}/darts/v1/sessions/{ID}/v1/completions",
        f"{SESSIONS}{ID}//v1/completions",
        f"{SESSIONS}{ID}/v1/completions/",
        f"{SESSIONS}{ID}/v1/completions\n",
        f"{SESSIONS}a:b/v1/completions",
        f"{SESSIONS}/v1/completions",
        f"/other{SESSIONS}{ID}/v1/completions",
        "/v1/completions",
    ],
)
async def test_other_paths_stay_as_they_are(path: str) -> None:
    scope = await pass_on(path)
    assert scope["path"] == path
    assert SESSION_KEY not in scope["state"]


async def test_websockets_are_no_turns() -> None:
    scope = await pass_on(f"{SESSIONS}{ID}/v1/completions", kind="websocket")
    assert SESSION_KEY not in scope["state"]
