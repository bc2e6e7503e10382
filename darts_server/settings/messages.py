"""Texts about settings: flags, help, and error messages about values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from darts_server.exceptions import InvalidRequest
from darts_server.removed import SETTINGS, value_remedy
from darts_server.settings.value_types import Dialect

Fields = Mapping[str, FieldInfo]


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def runtime_error(error: Any, patch: Mapping[str, object], fields: Fields) -> InvalidRequest:
    """Translate a validation error of a runtime change; it names the setting."""
    message = _message(error)
    if not error["loc"]:
        name = next((name for name in patch if name in message), next(iter(patch)))
        return InvalidRequest(name, message.removeprefix(f"{name} "))
    name = str(error["loc"][0])
    if (remedy := value_remedy(name, error["input"])) is not None:
        return InvalidRequest(name, f"{error['input']!r} is gone; {remedy}")
    return InvalidRequest(name, f"{message}, got {shortened(error['input'])} ({help_of(fields[name])})")


def startup_error(error: Any, given: Mapping[str, str | None], fields: Fields, prefix: str) -> str:
    """Describe a validation error at start: the flag, variable or key, its value and the allowed range."""
    location: Sequence[int | str] = error["loc"]
    message = _message(error)
    if not location:
        return message
    name = str(location[0])
    if error["type"] == "extra_forbidden":
        if (remedy := SETTINGS.get(name)) is not None:
            return f"{name} is gone; {remedy}"
        return f"{name}: unknown setting; known ones are {', '.join(fields)}"
    where = flag_of(name) if name in given else f"{name} (from {prefix}{name.upper()} or the file)"
    if (remedy := value_remedy(name, error["input"])) is not None:
        return f"{where} = {error['input']} is gone; {remedy}"
    return f"{where} = {error['input']}: {message} ({help_of(fields[name])})"


def _message(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def help_of(field: FieldInfo) -> str:
    """Return the help text of a setting: description, range and default."""
    value = field.default
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{field.description}{_range(field)}" + ("" if default in (None, "") else f" Default: {default}.")


def _range(field: FieldInfo) -> str:
    minimum = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    maximum = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    if minimum is None:
        return ""
    return f" At least {minimum}." if maximum is None else f" {minimum} to {maximum}."


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
    return "X" if field.annotation in (float, float | None) else "N"
