"""Settings that change while the server runs."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from darts_server.exceptions import InvalidRequest
from darts_server.settings.fields import LIVE, Settings
from darts_server.settings.texts import refusal


def live(settings: Settings) -> dict[str, Any]:
    """The settings that can change while the server runs, as JSON values."""
    return settings.model_dump(mode="json", include=set(_live_names()))


def live_schema() -> dict[str, Any]:
    """JSON schema of an object with some of the settings that can change while the server runs."""
    properties = Settings.model_json_schema()["properties"]
    return {
        "type": "object",
        "properties": {name: properties[name] for name in _live_names()},
        "additionalProperties": False,
    }


def changed(settings: Settings, patch: Mapping[str, object]) -> Settings:
    """The settings with other values for some that can change while the server runs.

    All is checked as at start; but values have their JSON types, so a string is not taken for a number.

    Raises:
        InvalidRequest: names the key, the value and what is allowed.
    """
    for name in patch:
        if name not in _live_names():
            what = "is fixed while the server runs" if name in Settings.model_fields else "unknown setting"
            raise InvalidRequest(name, f"{what}; those that can be changed are {', '.join(_live_names())}")
    try:
        return _Changed(**settings.model_dump() | dict(patch))
    except ValidationError as error:
        raise refusal(error.errors()[0], patch, Settings.model_fields) from error


class _Changed(Settings):
    model_config = SettingsConfigDict(strict=True)

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # the other sources were read at start
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _live_names() -> list[str]:
    return [name for name, field in Settings.model_fields.items() if LIVE in field.metadata]
