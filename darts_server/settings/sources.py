"""Load settings: flags override ``DARTS_*`` environment variables, these a TOML file, that the defaults."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsError, TomlConfigSettingsSource

from darts_server.exceptions import InvalidSetting
from darts_server.removed import SETTINGS, removed_flags, value_remedy
from darts_server.settings.fields import ENV_PREFIX, Dialect, Settings


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
    _refuse_removed_variables()
    try:
        return _with_file(config)(**given)  # type: ignore[arg-type]  # pydantic parses the strings
    except ValidationError as error:
        raise InvalidSetting("\n".join(_startup_error(each, given) for each in error.errors())) from error
    except (SettingsError, ValueError, OSError) as error:
        raise InvalidSetting(f"--darts-config {config}: {error}") from error


def refuse_removed_flags(argv: Iterable[str]) -> None:
    """Check the arguments that are none of our flags.

    Raises:
        InvalidSetting: one was a flag of ours once; says what to use instead.
    """
    if gone := [f"{flag} is gone; {remedy}" for flag, remedy in removed_flags(argv)]:
        raise InvalidSetting("\n".join(gone))


def _refuse_removed_variables() -> None:
    """
    Raises:
        InvalidSetting: an environment variable of an earlier version is set.
    """
    for variable, value in os.environ.items():
        name = variable.upper().removeprefix(ENV_PREFIX).lower()
        if not value or name in Settings.model_fields or not variable.upper().startswith(ENV_PREFIX):
            continue
        if (remedy := SETTINGS.get(name)) is not None:
            raise InvalidSetting(f"{variable} is gone; {remedy}")


def _with_file(config: str | None) -> type[Settings]:
    if config is not None and not Path(config).is_file():
        raise InvalidSetting(f"--darts-config: {config} is not a file")

    class WithFile(Settings):
        @classmethod
        def settings_customise_sources(  # type: ignore[override]  # there are neither .env files nor folders of secrets
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            **_: Any,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = () if config is None else (TomlConfigSettingsSource(settings_cls, config),)
            return (init_settings, env_settings, *file)

    return WithFile


def _startup_error(error: Any, given: Mapping[str, str | None]) -> str:
    """Describe a validation error at start: the flag, variable or key, its value and the allowed range."""
    location: Sequence[int | str] = error["loc"]
    message = message_of(error)
    if not location:
        return message
    name = str(location[0])
    if error["type"] == "extra_forbidden":
        if (remedy := SETTINGS.get(name)) is not None:
            return f"{name} is gone; {remedy}"
        return f"{name}: unknown setting; known ones are {', '.join(Settings.model_fields)}"
    where = flag_of(name) if name in given else f"{name} (from {ENV_PREFIX}{name.upper()} or the file)"
    if (remedy := value_remedy(name, error["input"])) is not None:
        return f"{where} = {error['input']} is gone; {remedy}"
    return f"{where} = {error['input']}: {message} ({help_of(Settings.model_fields[name])})"


def message_of(error: Any) -> str:
    """Return the text of a validation error."""
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


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
