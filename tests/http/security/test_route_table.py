import pytest

from darts_server.http.security.access import Kind
from darts_server.http.security.route_table import OWN_LIMITS, TABLE, has_own_limits, kind_of, kind_of_route


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/health", Kind.PUBLIC),
        ("HEAD", "/health", Kind.PUBLIC),
        ("GET", "/metrics", Kind.PUBLIC),
        ("GET", "/metrics/", Kind.PUBLIC),
        ("GET", "/darts/", Kind.PUBLIC),
        ("POST", "/invocations", Kind.USE),
        ("WEBSOCKET", "/v1/realtime", Kind.USE),
        ("GET", "/darts/v1/groups/cmpl-1", Kind.USE),
        ("GET", "/darts/v1/prompts/a/b\nc", Kind.USE),
        ("DELETE", "/darts/v1/rollouts/batch-1", Kind.USE),
        ("GET", "/darts/v1/state", Kind.USE),
        ("PUT", "/darts/v1/state", Kind.ADMIN),
        ("PATCH", "/darts/v1/policy", Kind.ADMIN),
        ("POST", "/update_weights", Kind.ADMIN),
        ("DELETE", "/adapters/a", Kind.ADMIN),
        ("POST", "/collective_rpc", Kind.DANGEROUS),
        ("POST", "/health", None),
        ("DELETE", "/darts/v1/state", None),
        ("GET", "/darts/v1/groups/a/b", None),
        ("GET", "/darts/v1/groups/", None),
        ("GET", "/healthy", None),
        ("GET", "health", None),
        ("GET", "", None),
    ],
)
def test_a_request_is_of_the_kind_of_its_route(method: str, path: str, kind: Kind | None) -> None:
    assert kind_of(method, path) is kind


def test_no_route_is_of_two_kinds() -> None:
    pairs = [(m, path) for routes in TABLE.values() for path, methods in routes.items() for m in methods.split()]
    assert len(pairs) == len(set(pairs))


def test_patterns_do_not_reach_routes_of_other_kinds() -> None:
    for kind, routes in TABLE.items():
        for path, methods in routes.items():
            for method in methods.replace("*", "GET").split():
                assert kind_of_route(method, path) is kind
                if "{" not in path:
                    assert kind_of(method, path) is kind


def test_routes_with_limits_of_their_own_are_in_the_table() -> None:
    assert all(kind_of_route(*each) for each in OWN_LIMITS)
    assert has_own_limits("PUT", "/darts/v1/weights/lora/name")
    assert not has_own_limits("POST", "/darts/v1/weights/lora/name")
    assert not has_own_limits("PUT", "/darts/v1/weights/lora/a/b")
