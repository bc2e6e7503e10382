"""Runtime settings: those that can change while the server runs."""

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from darts_server.exceptions import InvalidRequest
from darts_server.removed import SETTINGS, value_remedy
from darts_server.settings.fields import RUNTIME, Settings
from darts_server.settings.sources import help_of, message_of


def runtime_values(settings: Settings) -> dict[str, Any]:
    """Return the runtime settings as JSON values."""
    return settings.model_dump(mode="json", include=set(_runtime_names()))


def runtime_schema() -> dict[str, Any]:
    """Return the JSON schema of an object with any of the runtime settings."""
    properties = Settings.model_json_schema()["properties"]
    return {
        "type": "object",
        "properties": {name: properties[name] for name in _runtime_names()},
        "additionalProperties": False,
    }


def apply_patch(settings: Settings, patch: Mapping[str, object]) -> Settings:
    """Return the settings with the runtime settings of ``patch`` replaced.

    The result is validated as at start, but strictly by JSON types: a string is not accepted for a number.

    Raises:
        InvalidRequest: names the key, the value and what is allowed.
    """
    for name in patch:
        if name not in _runtime_names():
            if name not in Settings.model_fields and (remedy := SETTINGS.get(name)) is not None:
                raise InvalidRequest(name, f"is gone; {remedy}")
            what = "cannot change while the server runs" if name in Settings.model_fields else "unknown setting"
            raise InvalidRequest(name, f"{what}; settings that can change are {', '.join(_runtime_names())}")
    try:
        return _StrictSettings(**settings.model_dump() | dict(patch))
    except ValidationError as error:
        raise _runtime_error(error.errors()[0], patch) from error


def _runtime_error(error: Any, patch: Mapping[str, object]) -> InvalidRequest:
    """Translate a validation error of a runtime change; it names the setting."""
    message = message_of(error)
    if not error["loc"]:
        name = next((name for name in patch if name in message), next(iter(patch)))
        return InvalidRequest(name, message.removeprefix(f"{name} "))
    name = str(error["loc"][0])
    if (remedy := value_remedy(name, error["input"])) is not None:
        return InvalidRequest(name, f"{error['input']!r} is gone; {remedy}")
    return InvalidRequest(name, f"{message}, got {shortened(error['input'])} ({help_of(Settings.model_fields[name])})")


class _StrictSettings(Settings):
    model_config = SettingsConfigDict(strict=True)

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # other sources are read only at start
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _runtime_names() -> list[str]:
    return [name for name, field in Settings.model_fields.items() if RUNTIME in field.metadata]
