"""Logging in every process of the server. No line has prompt text, tokens or keys."""

import json
import logging
import logging.config
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from darts_server.caller import caller
from darts_server.exceptions import InvalidSetting
from darts_server.records import CohortRecord, GroupRecord, UpdateRecord
from darts_server.types import UpdateOutcome

logger = logging.getLogger(__name__)

LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
"""vLLM reads both variables when it is imported, in each of its processes."""
OURS = "darts_server"
CONSOLE = "(darts-server pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"


def set_up(log_format: str, level: str | None) -> None:
    """Configure logging, before vLLM is imported. ``level``: None for the level in vLLM's variable.

    Raises:
        InvalidSetting: the format is ``json``, and a configuration of vLLM's logging is set.
    """
    level = level or os.environ.get(LEVEL_VARIABLE, "").upper() or "INFO"
    os.environ[LEVEL_VARIABLE] = level
    config = logging_config(log_format, level)
    if log_format == "json":
        vllm_config = os.environ.get(CONFIG_VARIABLE)
        if vllm_config:
            raise InvalidSetting(
                f"--log-format json and {CONFIG_VARIABLE} = {vllm_config} exclude each other; omit one"
            )
        # vLLM reads the file in each of its processes, which may start at any time. So the file is never deleted.
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="darts-log-",
            suffix=".json",
            delete=False,
        ) as file:
            json.dump(config, file)
        os.environ[CONFIG_VARIABLE] = file.name
    logging.config.dictConfig(config)


def logging_config(log_format: str, level: str) -> dict[str, Any]:
    """``json``: an object per line, for vLLM's and uvicorn's lines too. ``console``: our lines in vLLM's format."""
    formatter: dict[str, Any] = {"format": CONSOLE, "datefmt": "%m-%d %H:%M:%S"}
    levels = {OURS: level}
    if log_format == "json":
        formatter = {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "fmt": "%(asctime)s %(levelname)s %(name)s %(message)s %(process)d",
            "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
            "datefmt": "%Y-%m-%dT%H:%M:%S%z",
        }
        # uvicorn's DEBUG lines are left out.
        uvicorn_level = level if level in ("WARNING", "ERROR", "CRITICAL") else "INFO"
        levels |= {"vllm": level, "uvicorn": uvicorn_level, "uvicorn.access": uvicorn_level}

    loggers = {}
    for name, logger_level in levels.items():
        loggers[name] = {"handlers": [OURS], "level": logger_level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {OURS: formatter},
        "filters": {OURS: {"()": "darts_server.logs.RequestId"}},
        "handlers": {
            OURS: {
                "class": "logging.StreamHandler",
                "formatter": OURS,
                "filters": [OURS],
                "level": level,
                "stream": "ext://sys.stdout",
            }
        },
        "loggers": loggers,
    }


class RequestId(logging.Filter):
    """Adds ``X-Request-Id`` to lines that are logged while a request is handled."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = caller.get().request_id
        if request_id is not None:
            record.request_id = request_id
        # No line is dropped.
        return True


def log_group(record: GroupRecord) -> None:
    # Groups end often, and building the fields takes time.
    if not logger.isEnabledFor(logging.DEBUG):
        return
    fields = {
        "group_id": record.group_id,
        "prompt_key": record.prompt_key,
        "policy": record.policy,
        "outcome": str(record.outcome),
        "candidates": len(record.candidates),
        "returned": len(record.selected),
        "generated_tokens": record.generated_tokens,
        "returned_tokens": record.returned_tokens,
        "seconds": round(record.ended_at - record.started_at, 3),
        "deadline": record.deadline,
    }
    logger.debug("group %s", _format_fields(fields), extra=fields)


def log_cohort(record: CohortRecord) -> None:
    fields = {
        "policy": record.policy,
        "prompts": record.groups,
        "candidates": round(record.groups * record.mean_candidates),
        "generated_tokens": record.generated_tokens,
        "returned_tokens": record.returned_tokens,
        "seconds": round(record.measured_seconds, 3),
        "deadline": record.deadline,
        "explored": record.explored,
        "auto_choice": record.auto_choice,
    }
    logger.info("cohort %s", _format_fields(fields), extra=fields)


def log_start(model: str) -> None:
    # Nothing is logged until the engine has started.
    logger.info("starting the engine for %s: to load and compile a model can take minutes, most the first time", model)


def log_ready(
    url: str,
    model: str,
    policy: str,
    group_size: int | None,
) -> None:
    page = f"{url}/darts/"
    grouping = f"single requests of one prompt form groups of {group_size}"
    if group_size is None:
        grouping = "single requests that name no group are not grouped (--group-size)"
    fields = {"url": url, "page": page, "model": model, "policy": policy, "group_size": group_size}
    message = "darts-server is ready: %s (page: %s), model %s, policy %s, %s"
    logger.info(
        message,
        url,
        page,
        model,
        policy,
        grouping,
        extra=fields,
    )


def log_announced_update(version: int) -> None:
    logger.info("weight update announced version=%d", version, extra={"version": version})


def log_update(record: UpdateRecord) -> None:
    # Failures are logged by the code that finds them.
    if record.outcome is not UpdateOutcome.COMPLETED:
        return
    fields = {
        "version": record.version,
        "outcome": str(record.outcome),
        "source": record.source,
        "seconds": round(sum(record.seconds.values()), 3),
    }
    logger.info("weight update %s", _format_fields(fields), extra=fields)


def _format_fields(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
