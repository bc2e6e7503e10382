"""Load settings: flags override ``DARTS_*`` environment variables, these a TOML file, that the defaults.

Some of them, the runtime settings, can change while the server runs.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from darts_server.exceptions import InvalidRequest, InvalidSetting
from darts_server.settings.fields import ENV_PREFIX, RUNTIME, Dialect, Settings

RUNTIME_NAMES = [name for name, field in Settings.model_fields.items() if RUNTIME in field.metadata]


# --- at start -----------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to a parser, as an argument group. `load` validates their values."""
    group = parser.add_argument_group(
        "shaped groups",
        f"Each can also be set by the environment variable {ENV_PREFIX}NAME or by a key in the --darts-config file.",
    )
    group.add_argument("--darts-config", metavar="FILE", help="TOML file with these settings.")
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            group.add_argument(flag_of(name), dest=name, action="store_const", const="true", help=field.description)
        else:
            group.add_argument(flag_of(name), dest=name, metavar=metavar_of(name, field), help=help_of(field))


def load(flags: Mapping[str, str | None], config: str | None) -> Settings:
    """Load settings from the given flags, the environment and the file.

    Raises:
        InvalidSetting: names the key, the value and what is allowed.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    variables = dict[str, str]()
    for variable, value in os.environ.items():
        name = variable.lower().removeprefix(ENV_PREFIX.lower())
        if not value or name == variable.lower():
            continue
        if name in Settings.model_fields:
            variables[name] = value
    if config is not None and not Path(config).is_file():
        raise InvalidSetting(f"--darts-config: {config} is not a file")
    try:
        file = {} if config is None else tomllib.loads(Path(config).read_text(encoding="utf-8"))
        return Settings(**{name.lower(): value for name, value in file.items()} | variables | given)
    except ValidationError as error:
        raise InvalidSetting("\n".join(_startup_error(each, given) for each in error.errors())) from error
    except (ValueError, OSError) as error:
        raise InvalidSetting(f"--darts-config {config}: {error}") from error


def _startup_error(error: Any, given: Mapping[str, str | None]) -> str:
    """Describe a validation error at start: the flag, variable or key, its value and the allowed range."""
    message = _message_of(error)
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting; known ones are {', '.join(Settings.model_fields)}"
    where = flag_of(name) if name in given else f"{name} (from {ENV_PREFIX}{name.upper()} or the file)"
    return f"{where} = {error['input']}: {message} ({help_of(Settings.model_fields[name])})"


def _message_of(error: Any) -> str:
    """Return the text of a validation error."""
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


# --- while the server runs ------------------------------------------------------


def apply_patch(settings: Settings, patch: Mapping[str, object]) -> Settings:
    """Return the settings with the runtime settings of ``patch`` replaced.

    The result is validated as at start, but strictly by JSON types: a string is not accepted for a number.

    Raises:
        InvalidRequest: names the key, the value and what is allowed.
    """
    for name in patch:
        if name not in RUNTIME_NAMES:
            what = "cannot change while the server runs" if name in Settings.model_fields else "unknown setting"
            raise InvalidRequest(name, f"{what}; settings that can change are {', '.join(RUNTIME_NAMES)}")
    try:
        return Settings.model_validate(settings.model_dump() | dict(patch), strict=True)
    except ValidationError as invalid:
        error: Any = invalid.errors()[0]
        message = _message_of(error)
        if not error["loc"]:  # of a combination
            name = next((name for name in patch if name in message), next(iter(patch)))
            raise InvalidRequest(name, message.removeprefix(f"{name} ")) from invalid
        name = str(error["loc"][0])
        allowed = help_of(Settings.model_fields[name])
        raise InvalidRequest(name, f"{message}, got {shortened(error['input'])} ({allowed})") from invalid


# --- how a setting is described ---------------------------------------------------


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def help_of(field: FieldInfo) -> str:
    """Return the help text of a setting: description, range and default."""
    minimum = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    maximum = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    limits = f"At least {minimum}." if maximum is None else f"{minimum} to {maximum}."
    value = field.default
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    parts = (field.description, minimum is not None and limits, default not in (None, "") and f"Default: {default}.")
    return " ".join(str(part) for part in parts if part)


def metavar_of(name: str, field: FieldInfo) -> str:
    """Return the placeholder of the value in ``--help``."""
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(c, str) for c in choices):
        return "{" + ",".join(choices) + "}"
    if field.annotation == Path | None:
        return "FILE" if name.endswith("_file") else "FOLDER"
    if field.annotation == SecretStr | None:
        return "KEY"
    if field.annotation in (str, tuple[Dialect, ...]):
        return "NAME"
    if field.annotation in (float, float | None):
        return "X"
    return "{X,auto}" if name == "redundancy" else "N"
