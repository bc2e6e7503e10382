"""Set up logging: vLLM's lines, the HTTP server's and ours, in every process of the server."""

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
"""vLLM reads these when it is imported, in each of its processes."""
DEFAULT_LEVEL = "INFO"
OURS = "darts_server"
STREAM = "ext://sys.stdout"
CONSOLE = "(darts-server pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
CONSOLE_TIME = "%m-%d %H:%M:%S"
FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s %(process)d"
NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}


def set_up(form: str, level: str | None) -> None:
    """Configure logging; call it before vLLM is imported. ``level``: ``None`` for the one in vLLM's variable.

    Raises:
        InvalidSetting: JSON, and vLLM has a logging configuration of its own.
    """
    level = level or os.environ.get(LEVEL_VARIABLE, "").upper() or DEFAULT_LEVEL
    os.environ[LEVEL_VARIABLE] = level
    if form == "json":
        if other := os.environ.get(CONFIG_VARIABLE):
            raise InvalidSetting(f"--log-format json and {CONFIG_VARIABLE} = {other} exclude each other; omit one")
        config = json_config(level)
        os.environ[CONFIG_VARIABLE] = str(_write(config))
    else:
        config = console_config(level)
    logging.config.dictConfig(config)


def console_config(level: str) -> dict[str, Any]:
    """Return a logging configuration with our lines in the format of vLLM's."""
    return _config({"format": CONSOLE, "datefmt": CONSOLE_TIME}, level, {OURS: level})


def json_config(level: str) -> dict[str, Any]:
    """Return a logging configuration with one JSON object per line, with our values as fields."""
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
    """Add the caller's ``X-Request-Id`` to lines logged while its request is handled."""

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


def _write(config: dict[str, Any]) -> Path:
    """Write the configuration to a temporary file that is never deleted: processes may start at any time."""
    with tempfile.NamedTemporaryFile("w", prefix="darts-log-", suffix=".json", delete=False) as file:
        json.dump(config, file)
    return Path(file.name)
