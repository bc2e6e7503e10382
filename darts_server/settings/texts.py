"""What is said of settings: their flags and help, and what is wrong with a value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from darts_server.exceptions import InvalidRequest

Fields = Mapping[str, FieldInfo]


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def refusal(error: Any, patch: Mapping[str, object], fields: Fields) -> InvalidRequest:
    """A value that was refused while the server runs."""
    message = _message(error)
    if not error["loc"]:
        name = next((name for name in patch if name in message), next(iter(patch)))
        return InvalidRequest(name, message.removeprefix(f"{name} "))
    name = str(error["loc"][0])
    return InvalidRequest(name, f"{message}, got {shortened(error['input'])} ({help_of(fields[name])})")


def explained(error: Any, given: Mapping[str, str | None], fields: Fields, prefix: str) -> str:
    """A value that was refused at start."""
    location: Sequence[int | str] = error["loc"]
    message = _message(error)
    if not location:
        return message
    name = str(location[0])
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting; known ones are {', '.join(fields)}"
    where = flag_of(name) if name in given else f"{name} (from {prefix}{name.upper()} or the file)"
    return f"{where} = {error['input']}: {message} ({help_of(fields[name])})"


def _message(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def help_of(field: FieldInfo) -> str:
    """What it means, which values it takes, and its default."""
    value = field.default
    default = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{field.description}{_range(field)}" + ("" if default is None else f" Default: {default}.")


def _range(field: FieldInfo) -> str:
    low = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    high = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    if low is None:
        return ""
    return f" At least {low}." if high is None else f" {low} to {high}."


def metavar_of(name: str, field: FieldInfo) -> str:
    """What stands for its value in the help."""
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(c, str) for c in choices):
        return "{" + ",".join(choices) + "}"
    if field.annotation == Path | None:
        return "FILE" if name.endswith("_file") else "FOLDER"
    if field.annotation == SecretStr | None:
        return "KEY"
    if field.annotation is str:
        return "NAME"
    return "X" if field.annotation in (float, float | None) else "N"
