import io
import json
import logging
import logging.config
import os
from collections.abc import Iterator
from typing import Any

import pytest

from darts_server import logs
from darts_server.caller import Caller, caller
from darts_server.exceptions import InvalidSetting
from darts_server.logs import log_announced_update, log_cohort, log_group, log_ready, log_update
from darts_server.records import CohortRecord, UpdateRecord
from darts_server.types import UpdateOutcome
from tests.metrics.test_rollouts import record

NAMES = (logs.OURS, "vllm", "uvicorn", "uvicorn.access")


@pytest.fixture(autouse=True)
def same_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the loggers after each test."""
    for name in (logs.LEVEL_VARIABLE, logs.CONFIG_VARIABLE):
        monkeypatch.setenv(name, "")
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one, list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:] = handlers
        one.propagate = propagate
        one.setLevel(level)


def logging_to(config: dict[str, Any]) -> io.StringIO:
    output = io.StringIO()
    config["handlers"][logs.OURS]["stream"] = output
    logging.config.dictConfig(config)
    return output


def test_json_lines_have_their_values_as_fields() -> None:
    output = logging_to(logs.logging_config("json", "DEBUG"))
    token = caller.set(Caller(request_id="mine"))
    try:
        log_group(record())
    finally:
        caller.reset(token)
    logging.getLogger("vllm.engine").info("two\nlines")
    ours, theirs = map(json.loads, output.getvalue().splitlines())
    assert ours["level"] == "DEBUG"
    assert ours["logger"] == "darts_server.logs"
    assert (ours["group_id"], ours["candidates"], ours["generated_tokens"]) == ("g", 3, 80)
    assert ours["request_id"] == "mine"
    assert theirs["message"] == "two\nlines"
    assert "request_id" not in theirs


def test_the_ready_line_has_the_address_and_the_size_of_groups() -> None:
    output = logging_to(logs.logging_config("console", "INFO"))
    log_ready("http://127.0.0.1:8000", "m", "auto", None)
    log_ready("http://127.0.0.1:8000", "m", "off", 8)
    ungrouped, grouped = output.getvalue().splitlines()
    assert "darts-server is ready: http://127.0.0.1:8000 (page: http://127.0.0.1:8000/darts/)" in ungrouped
    assert ungrouped.endswith("model m, policy auto, single requests that name no group are not grouped (--group-size)")
    assert grouped.endswith("model m, policy off, single requests of one prompt form groups of 8")
    output = logging_to(logs.logging_config("json", "INFO"))
    log_ready("http://127.0.0.1:8000", "m", "auto", None)
    line = json.loads(output.getvalue())
    assert (line["url"], line["policy"], line["group_size"]) == ("http://127.0.0.1:8000", "auto", None)


def test_groups_are_logged_at_debug_and_cohorts_and_updates_at_info() -> None:
    output = logging_to(logs.logging_config("console", "INFO"))
    log_group(record())
    log_cohort(CohortRecord("darts_cut", 64, 12.5, 60, False, 2.5, 1000, 600))
    log_cohort(CohortRecord("auto", 8, 8.0, None, False, 2.5, 1000, 1000, "6 of 8 prompts run"))
    log_announced_update(7)
    for outcome in UpdateOutcome:
        log_update(UpdateRecord(7, outcome, "push", "finish", False, {"load": 1.0}))
    lines = [line.partition("] ")[2] for line in output.getvalue().splitlines()]
    events = [line.partition("=")[0] for line in lines]
    assert events == ["cohort policy", "cohort policy", "weight update announced version", "weight update version"]
    assert lines[1].endswith(" auto_choice=6 of 8 prompts run")


def test_vllm_gets_the_same_configuration_in_its_own_variables() -> None:
    logs.set_up("json", "WARNING")
    assert os.environ[logs.LEVEL_VARIABLE] == "WARNING"
    with open(os.environ[logs.CONFIG_VARIABLE]) as file:
        config = json.load(file)
    assert config == logs.logging_config("json", "WARNING")
    assert set(NAMES) == set(config["loggers"])
    os.unlink(file.name)
    assert not logging.getLogger("vllm").isEnabledFor(logging.INFO)


def test_our_level_overrides_vllms_variable_which_overrides_info(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.set_up("console", None)
    assert os.environ[logs.LEVEL_VARIABLE] == "INFO"
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "debug")
    logs.set_up("console", None)
    assert os.environ[logs.LEVEL_VARIABLE] == "DEBUG"
    assert logging.getLogger(logs.OURS).isEnabledFor(logging.DEBUG)
    logs.set_up("console", "ERROR")
    assert os.environ[logs.LEVEL_VARIABLE] == "ERROR"


def test_json_and_a_configuration_of_vllm_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.CONFIG_VARIABLE, "/mine.json")
    with pytest.raises(InvalidSetting, match="--log-format"):
        logs.set_up("json", "INFO")
    logs.set_up("console", "INFO")
    assert os.environ[logs.CONFIG_VARIABLE] == "/mine.json"
