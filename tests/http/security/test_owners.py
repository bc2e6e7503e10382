"""Each of our routes shows the data of a key only to that key, or shows data that belong to no key."""

from pathlib import Path

from darts_server.http.security.route_table import USE

OURS = "/darts/v1/"
OWNED = {
    "/darts/v1/rollouts",
    "/darts/v1/rollouts/{batch_id}",
    "/darts/v1/vote",
    "/darts/v1/groups",
    "/darts/v1/groups/{group_id:path}",
    "/darts/v1/live",
    "/darts/v1/sessions",
    "/darts/v1/sessions/{session_id}",
    "/darts/v1/sessions/{session_id}:end",
    "/darts/v1/sessions/{session_id}/events",
    "/darts/v1/session-groups/{group_id}",
    "/darts/v1/session-groups/{group_id}/events",
}
"""Routes with data of a key. `tests/integration/test_shares.py` calls each with another key."""
SHARED = {
    "/darts/v1/rewards",
    "/darts/v1/prompts/{prompt_key:path}",
    "/darts/v1/state",
    "/darts/v1/policy",
    "/darts/v1/policy/schema",
    "/darts/v1/weights",
}
"""Routes with numbers and settings of the server."""


def test_every_route_of_ours_is_owned_or_shared() -> None:
    assert {route for route in USE if route.startswith(OURS)} == OWNED | SHARED


def test_the_security_document_lists_them_all() -> None:
    document = (Path(__file__).parents[3] / "SECURITY.md").read_text("utf-8")
    section = document.split("### What belongs to a key")[1].split("\n## ")[0]
    for route in OWNED | SHARED:
        assert f"{route.replace(':path', '')}`" in section, route
