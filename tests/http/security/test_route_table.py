import pytest

from darts_server.http.security.access import RouteAccess
from darts_server.http.security.middleware import find_route_access
from darts_server.http.security.route_table import OWN_LIMITS, TABLE


@pytest.mark.parametrize(
    ("method", "path", "access"),
    [
        ("GET", "/health", RouteAccess.PUBLIC),
        ("HEAD", "/health", RouteAccess.PUBLIC),
        ("GET", "/metrics/", RouteAccess.PUBLIC),
        ("GET", "/darts/", RouteAccess.PUBLIC),
        ("WEBSOCKET", "/v1/realtime", RouteAccess.USE),
        ("GET", "/darts/v1/prompts/a/b", RouteAccess.USE),
        ("DELETE", "/darts/v1/rollouts/batch-1", RouteAccess.USE),
        ("GET", "/darts/v1/state", RouteAccess.USE),
        ("PUT", "/darts/v1/state", RouteAccess.ADMIN),
        ("DELETE", "/adapters/a", RouteAccess.ADMIN),
        ("POST", "/collective_rpc", RouteAccess.DANGEROUS),
        # New in vLLM 0.32.
        ("POST", "/v1/systemone", RouteAccess.USE),
        ("POST", "/shutdown_weight_transfer_engine", RouteAccess.ADMIN),
        ("POST", "/inference/v1/abort_requests", RouteAccess.ADMIN),
        ("POST", "/weight_checker", RouteAccess.DANGEROUS),
        # New in vLLM 0.33.
        ("POST", "/v1/decisions", RouteAccess.USE),
        ("DELETE", "/darts/v1/state", None),
        ("GET", "/darts/v1/groups/a/b", RouteAccess.USE),
        ("GET", "/darts/v1/groups", RouteAccess.USE),
        ("GET", "/darts/v1/prompts", None),
        ("GET", "/", RouteAccess.PUBLIC),
        ("GET", "/healthy", None),
        ("GET", "health", None),
        ("GET", "", None),
        # The router does not find it either.
        ("GET", "/darts/v1/prompts/a\nb", None),
    ],
)
def test_a_request_has_the_access_of_its_route(method: str, path: str, access: RouteAccess | None) -> None:
    assert find_route_access(method, path)[0] is access


def test_no_route_is_listed_twice_or_matched_by_a_pattern_with_other_access() -> None:
    for access, routes in TABLE.items():
        for path, methods in routes.items():
            for method in methods.replace("*", "GET").split():
                # A pattern matches itself.
                assert find_route_access(method, path)[0] is access


def test_routes_with_their_own_limits_are_in_the_table() -> None:
    assert all(find_route_access(*each)[1] for each in OWN_LIMITS)
    assert find_route_access("PUT", "/darts/v1/weights/lora/name") == (RouteAccess.ADMIN, True)
    assert find_route_access("POST", "/darts/v1/weights/lora/name") == (RouteAccess.ADMIN, False)
    assert find_route_access("PUT", "/darts/v1/weights/lora/a/b") == (None, False)
