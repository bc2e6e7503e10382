"""What the log looks like: vLLM's lines, the HTTP server's and ours, in every process of the server."""

import json
import logging
import logging.config
import os
import tempfile
from pathlib import Path
from typing import Any

from darts_server.exceptions import InvalidSetting
from darts_server.serving.admission import caller

LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
"""vLLM reads these when it is imported, and so do its processes."""
DEFAULT_LEVEL = "INFO"
OURS = "darts_server"
STREAM = "ext://sys.stdout"
CONSOLE = "(darts-server pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
CONSOLE_TIME = "%m-%d %H:%M:%S"
FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s %(process)d"
NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}


def set_up(form: str, level: str | None) -> None:
    """Log so from now on. To be called before vLLM is imported. ``level``: ``None`` for that of vLLM's variable.

    Raises:
        InvalidSetting: vLLM was told to log in another way.
    """
    level = level or os.environ.get(LEVEL_VARIABLE, "").upper() or DEFAULT_LEVEL
    os.environ[LEVEL_VARIABLE] = level
    if form == "json":
        if other := os.environ.get(CONFIG_VARIABLE):
            raise InvalidSetting(f"--log-format json and {CONFIG_VARIABLE} = {other} exclude each other; leave one out")
        config = as_json(level)
        os.environ[CONFIG_VARIABLE] = str(_written(config))
    else:
        config = on_a_console(level)
    logging.config.dictConfig(config)


def on_a_console(level: str) -> dict[str, Any]:
    """Ours as vLLM's lines look by themselves."""
    return _config({"format": CONSOLE, "datefmt": CONSOLE_TIME}, level, {OURS: level})


def as_json(level: str) -> dict[str, Any]:
    """One object a line, with what the line is about in fields of its own."""
    formatter = {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "fmt": FIELDS,
        "rename_fields": NAMES,
        "datefmt": "%Y-%m-%dT%H:%M:%S%z",
    }
    at_least_info = level if level in ("WARNING", "ERROR", "CRITICAL") else "INFO"
    levels = {OURS: level, "vllm": level, "uvicorn": at_least_info, "uvicorn.access": at_least_info}
    return _config(formatter, level, levels)


class RequestId(logging.Filter):
    """Has lines that are written on behalf of a request tell its id, as the caller gave it in ``X-Request-Id``."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (request_id := caller.get().request_id) is not None:
            record.request_id = request_id
        return True


def _config(formatter: dict[str, Any], level: str, loggers: dict[str, str]) -> dict[str, Any]:
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
                "stream": STREAM,
            }
        },
        "loggers": {name: {"handlers": [OURS], "level": each, "propagate": False} for name, each in loggers.items()},
    }


def _written(config: dict[str, Any]) -> Path:
    """In a file that stays as long as the machine keeps temporary files: processes may start at any time."""
    with tempfile.NamedTemporaryFile("w", prefix="darts-log-", suffix=".json", delete=False) as file:
        json.dump(config, file)
    return Path(file.name)
