import io
import json
import logging
import logging.config
import os
from collections.abc import Iterator
from typing import Any

import pytest

from darts_server import logs
from darts_server.exceptions import InvalidSetting
from darts_server.journal import Journal
from darts_server.serving.admission import Caller, caller
from darts_server.types import CohortRecord, UpdateOutcome, UpdateRecord
from tests.metrics.test_rollouts import record

NAMES = (logs.OURS, "vllm", "uvicorn", "uvicorn.access")


@pytest.fixture(autouse=True)
def same_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As they were, after each test."""
    for name in (logs.LEVEL_VARIABLE, logs.CONFIG_VARIABLE):
        monkeypatch.setenv(name, "")
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one, list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


def logging_to(config: dict[str, Any]) -> io.StringIO:
    told = io.StringIO()
    config["handlers"][logs.OURS]["stream"] = told
    logging.config.dictConfig(config)
    return told


def test_each_line_is_an_object_with_what_it_is_about() -> None:
    told = logging_to(logs.as_json("DEBUG"))
    token = caller.set(Caller(request_id="mine"))
    try:
        Journal().group_ended(record())
    finally:
        caller.reset(token)
    logging.getLogger("vllm.engine").info("two\nlines")
    ours, theirs = map(json.loads, told.getvalue().splitlines())
    assert ours["level"] == "DEBUG"
    assert ours["logger"] == "darts_server.journal"
    assert (ours["group_id"], ours["candidates"], ours["generated_tokens"]) == ("g", 3, 80)
    assert ours["request_id"] == "mine"
    assert theirs["message"] == "two\nlines"
    assert "request_id" not in theirs


def test_groups_are_told_at_debug_batches_and_weights_at_info_and_nothing_is_told_twice() -> None:
    told = logging_to(logs.on_a_console("INFO"))
    journal = Journal()
    journal.group_ended(record())
    journal.candidates_started(3)
    journal.cohort_ended(CohortRecord("darts_cut", 64, 12.5, 60, False, 2.0, 2.5, 1000, 600))
    journal.update_announced(7)
    for outcome in UpdateOutcome:
        journal.update_ended(UpdateRecord(7, outcome, "push", "finish", False, {"load": 1.0}))
    lines = [line.partition("] ")[2] for line in told.getvalue().splitlines()]
    assert lines == [
        "batch policy=darts_cut prompts=64 candidates=800 generated_tokens=1000 returned_tokens=600 seconds=2.5 "
        "deadline=60 explored=False",
        "weights version=7 are coming",
        "weights version=7 outcome=completed source=push seconds=1.0",
    ]


def test_vllm_finds_the_same_in_its_own_variables() -> None:
    logs.set_up("json", "WARNING")
    assert os.environ[logs.LEVEL_VARIABLE] == "WARNING"
    with open(os.environ[logs.CONFIG_VARIABLE]) as file:
        config = json.load(file)
    assert config == logs.as_json("WARNING")
    assert set(NAMES) == set(config["loggers"])
    os.unlink(file.name)
    assert not logging.getLogger("vllm").isEnabledFor(logging.INFO)


def test_the_level_is_ours_before_vllms_variable_before_info(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.set_up("console", None)
    assert os.environ[logs.LEVEL_VARIABLE] == "INFO"
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "debug")
    logs.set_up("console", None)
    assert os.environ[logs.LEVEL_VARIABLE] == "DEBUG"
    assert logging.getLogger(logs.OURS).isEnabledFor(logging.DEBUG)
    logs.set_up("console", "ERROR")
    assert os.environ[logs.LEVEL_VARIABLE] == "ERROR"


def test_two_ways_to_log_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.CONFIG_VARIABLE, "/mine.json")
    with pytest.raises(InvalidSetting, match="--log-format"):
        logs.set_up("json", "INFO")
    logs.set_up("console", "INFO")
    assert os.environ[logs.CONFIG_VARIABLE] == "/mine.json"
