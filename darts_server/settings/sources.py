"""Loads settings. Flags override ``DARTS_*`` environment variables, variables override a TOML file."""

import argparse
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from darts_server.exceptions import InvalidRequest, InvalidSetting
from darts_server.settings.fields import ENV_PREFIX, RUNTIME, Dialect, Settings

RUNTIME_NAMES = [name for name, field in Settings.model_fields.items() if RUNTIME in field.metadata]
"""Settings that can change while the server runs."""


# --- at start -----------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to a parser. `load` validates their values."""
    group = parser.add_argument_group(
        "shaped groups",
        f"An environment variable {ENV_PREFIX}NAME, or a key in the --darts-config file, does the same as a flag.",
    )
    group.add_argument("--darts-config", metavar="FILE", help="TOML file with these settings.")
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            group.add_argument(
                flag_of(name),
                dest=name,
                action="store_const",
                const="true",
                help=field.description,
            )
        elif field.annotation == tuple[str, ...]:
            group.add_argument(
                flag_of(name),
                dest=name,
                action="append",
                metavar=metavar_of(name, field),
                help=help_of(field),
            )
        else:
            group.add_argument(
                flag_of(name),
                dest=name,
                metavar=metavar_of(name, field),
                help=help_of(field),
            )


def load(flags: Mapping[str, str | list[str] | None], config: str | None) -> Settings:
    """Load settings. ``flags``: values by setting, a list if the flag may be repeated; None if not given.

    Raises:
        InvalidSetting: names the key, the value and the allowed values.
    """
    from_flags = {name: value for name, value in flags.items() if value is not None}
    from_environment: dict[str, str] = {}
    for variable, value in os.environ.items():
        name = variable.lower().removeprefix(ENV_PREFIX.lower())
        if value and name != variable.lower() and name in Settings.model_fields:
            from_environment[name] = value

    if config is not None and not Path(config).is_file():
        raise InvalidSetting(f"--darts-config: {config} is not a file")
    from_file: dict[str, Any] = {}
    try:
        if config is not None:
            document = tomllib.loads(Path(config).read_text(encoding="utf-8"))
            from_file = {name.lower(): value for name, value in document.items()}
        return Settings(**from_file | from_environment | from_flags)
    except ValidationError as error:
        raise InvalidSetting("\n".join(_describe_error(detail, from_flags) for detail in error.errors())) from error
    except (ValueError, OSError) as error:
        raise InvalidSetting(f"--darts-config {config}: {error}") from error


def _describe_error(error: Any, from_flags: Mapping[str, str | list[str]]) -> str:
    message = _message_of(error)
    # An error of a combination of settings has no location.
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting; the settings are {', '.join(Settings.model_fields)}"
    source = f"{name} (from {ENV_PREFIX}{name.upper()} or the file)"
    if name in from_flags:
        source = flag_of(name)
    return f"{source} = {error['input']}: {message} ({help_of(Settings.model_fields[name])})"


def _message_of(error: Any) -> str:
    """Return pydantic's message for use inside a sentence."""
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


# --- while the server runs ------------------------------------------------------


def apply_patch(settings: Settings, patch: Mapping[str, object]) -> Settings:
    """Return the settings with the runtime settings of ``patch`` replaced.

    The result is validated as at start, but strictly by JSON types: a string is not accepted for a number.

    Raises:
        InvalidRequest: names the key, the value and the allowed values.
    """
    for name in patch:
        if name not in RUNTIME_NAMES:
            fault = "cannot change while the server runs" if name in Settings.model_fields else "unknown setting"
            raise InvalidRequest(name, f"{fault}; settings that can change are {', '.join(RUNTIME_NAMES)}")
    # Settings that were not set stay unset, because `make_planner` asks whether they were set.
    values = settings.model_dump(exclude_unset=True) | dict(patch)
    try:
        return Settings.model_validate(values, strict=True)
    except ValidationError as invalid:
        error: Any = invalid.errors()[0]
        message = _message_of(error)
        # An error of a combination names the settings in its text.
        if not error["loc"]:
            named = [name for name in patch if name in message]
            name = named[0] if named else next(iter(patch))
            raise InvalidRequest(name, message.removeprefix(f"{name} ")) from invalid
        name = str(error["loc"][0])
        allowed = help_of(Settings.model_fields[name])
        raise InvalidRequest(name, f"{message}, got {shortened(error['input'])} ({allowed})") from invalid


# --- how a setting is described ---------------------------------------------------


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def help_of(field: FieldInfo) -> str:
    """Return the description, range and default of a setting."""
    parts = [str(field.description)]
    minimum = None
    maximum = None
    for constraint in field.metadata:
        minimum = getattr(constraint, "ge", minimum)
        maximum = getattr(constraint, "le", maximum)
    if minimum is not None:
        parts.append(f"At least {minimum}." if maximum is None else f"{minimum} to {maximum}.")
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default not in (None, ""):
        parts.append(f"Default: {default}.")
    return " ".join(parts)


METAVARS: dict[Any, str] = {
    float: "X",
    float | None: "X",
    str: "NAME",
    str | None: "NAME",
    tuple[Dialect, ...]: "NAME",
    tuple[str, ...]: "SPEC",
    SecretStr | None: "KEY",
}


def metavar_of(name: str, field: FieldInfo) -> str:
    if name == "redundancy":
        return "{X,auto}"
    if field.annotation == Path | None:
        return "FILE" if name.endswith("_file") else "FOLDER"
    if field.annotation in METAVARS:
        return METAVARS[field.annotation]
    # For ``Literal[...] | None``.
    for kind in (field.annotation, *get_args(field.annotation)):
        if get_origin(kind) is Literal:
            return "{" + ",".join(get_args(kind)) + "}"
    # Whole numbers, and lists of them.
    return "N"
