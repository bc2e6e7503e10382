import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.http.headers import read_options


@pytest.mark.parametrize("name", ["X-Darts-Policy", "x-darts-policy", "X-DARTS-POLICY"])
def test_the_policy_is_read_whatever_the_case_of_the_name(name: str) -> None:
    assert read_options({name: " off ", "Authorization": "x"}).policy == "off"


def test_without_our_headers_nothing_is_asked_for() -> None:
    assert read_options({"Content-Type": "application/json"}).policy is None


@pytest.mark.parametrize("headers", [{"X-Darts-Polcy": "off"}, {"X-Darts-Policy": ""}, {"X-Darts-Policy": "  "}])
def test_a_misspelt_or_empty_header_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        read_options(headers)
