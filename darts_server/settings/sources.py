"""Where settings come from: flags before ``DARTS_*`` environment variables before a TOML file before defaults."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsError, TomlConfigSettingsSource

from darts_server.exceptions import InvalidSetting
from darts_server.settings.fields import ENV_PREFIX, Settings
from darts_server.settings.texts import explained, flag_of, help_of, metavar_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Our flags, in a group of their own. Values are checked later, by :func:`load`."""
    group = parser.add_argument_group(
        "shaped groups",
        f"Each can also be set as {ENV_PREFIX}NAME in the environment, or as a key in the file of --darts-config.",
    )
    group.add_argument("--darts-config", metavar="FILE", help="TOML file with these settings.")
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            group.add_argument(flag_of(name), dest=name, action="store_const", const="true", help=field.description)
        else:
            group.add_argument(flag_of(name), dest=name, metavar=metavar_of(name, field), help=help_of(field))


def load(flags: Mapping[str, str | None], config: str | None) -> Settings:
    """Settings from the flags that were given, the environment and the file.

    Raises:
        InvalidSetting: names the key, the value and what is allowed.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return _with_file(config)(**given)  # type: ignore[arg-type]  # pydantic turns the strings into values
    except ValidationError as error:
        raise InvalidSetting(
            "\n".join(explained(e, given, Settings.model_fields, ENV_PREFIX) for e in error.errors())
        ) from error
    except (SettingsError, ValueError, OSError) as error:
        raise InvalidSetting(f"--darts-config {config}: {error}") from error


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
