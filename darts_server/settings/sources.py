"""Load settings: flags override ``DARTS_*`` environment variables, these a TOML file, that the defaults."""

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsError, TomlConfigSettingsSource

from darts_server.exceptions import InvalidSetting
from darts_server.removed import SETTINGS, removed_flags
from darts_server.settings.fields import ENV_PREFIX, Settings
from darts_server.settings.messages import flag_of, help_of, metavar_of, startup_error


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
        raise InvalidSetting(
            "\n".join(startup_error(e, given, Settings.model_fields, ENV_PREFIX) for e in error.errors())
        ) from error
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
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = () if config is None else (TomlConfigSettingsSource(settings_cls, config),)
            return (init_settings, env_settings, *file)

    return WithFile
