"""Sixty requests of the fuzzer in every push; `scripts/fuzz` sends more every night."""

from pathlib import Path

import pytest

from darts_server.demo.server import Launch
from faults.fuzz import Fuzzer, server_to_fuzz

pytestmark = pytest.mark.engine
REQUESTS = 60


def test_whatever_callers_send_the_server_goes_on(forks: Launch, tmp_path: Path) -> None:
    with Fuzzer(server_to_fuzz(forks), tmp_path) as fuzzer:
        assert fuzzer.run(1, REQUESTS), fuzzer.report
    assert fuzzer.answers.total() >= REQUESTS
    assert {"200", "400", "404"} <= {status for _, status in fuzzer.answers}
