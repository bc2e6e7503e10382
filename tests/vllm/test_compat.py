import pytest

from darts_server.vllm.compat import is_tested, vllm_version


def test_the_installed_version_is_a_tested_one() -> None:
    assert is_tested(vllm_version())


@pytest.mark.parametrize("version", [None, "0.26.0", "0.310.0", "0.32.1"])
def test_others_are_not(version: str | None) -> None:
    assert not is_tested(version)
