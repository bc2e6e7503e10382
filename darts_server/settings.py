"""Settings: flags before ``DARTS_*`` environment variables before a TOML file before defaults.

Every setting is checked here, once, at start. The rooms get plain values.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from darts_server.exceptions import InvalidRequest, InvalidSetting

ENV_PREFIX = "DARTS_"

_LIVE = object()
T = TypeVar("T")
Live = Annotated[T, _LIVE]
"""Marks a setting that can change while the server runs."""


Policy = Literal[
    "uniform",
    "darts",
    "darts_deadline",
    "darts_cut",
    "first_finish",
    "off",
    "shadow:uniform",
    "shadow:darts",
    "shadow:darts_deadline",
    "shadow:darts_cut",
    "shadow:first_finish",
]


class Settings(BaseSettings):
    """What ``darts-server serve`` adds to vLLM's flags."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", env_ignore_empty=True)

    policy: Live[Policy] = Field(
        "uniform",
        description="How groups are made. uniform: the same number of candidates for every prompt. darts: more for "
        "prompts whose lengths spread more. darts_deadline: the longest of those in time. darts_cut: a tail drawn by "
        "lot, cut at the deadline. first_finish: what the DARTS paper's public code does, as a baseline. off: "
        "unshaped. shadow:NAME: unshaped, but what NAME would have done is recorded.",
    )
    redundancy: Live[float] = Field(
        1.5, ge=1, le=16, description="Candidates started per trajectory returned; for all but uniform, on the average."
    )
    max_redundancy: Live[float] = Field(
        2.0, ge=1, le=16, description="All but uniform: candidates per trajectory that one prompt may get at most."
    )
    budget: Live[Literal["fixed", "cv_log", "utility"]] = Field(
        "fixed",
        description="What decides the mean number of candidates: --redundancy, the closed form of the DARTS paper's "
        "public code, or the best trade of shorter groups against rollout time by what was learned of both.",
    )
    budget_aversion: Live[float] = Field(
        1.0, ge=0, le=1000, description="utility: per cent that groups must get shorter for one per cent more time."
    )
    num_longest: Live[int] = Field(
        1, ge=0, le=1024, description="L: trajectories of a group that come from the tail. 0 keeps the shortest only."
    )
    num_shortest: Live[int | None] = Field(
        None, ge=1, le=1024, description="K: shortest trajectories kept. Left out, it is n - L; set, n must be K + L."
    )
    tail: Live[Literal["sampled", "longest"]] = Field(
        "sampled",
        description="Who gets the L places: drawn by lot from all that are not among the shortest, the others being "
        "stopped at once, or the longest (the DARTS paper's rule; everything then runs to its end).",
    )
    deadline_quantile: Live[float] = Field(
        0.9,
        ge=0.1,
        le=1,
        description="darts_deadline, darts_cut: the tail is waited for until this share of a batch's groups have as "
        "many finished candidates as they return; a prompt that needs longer itself gets longer.",
    )
    deadline_floor: Live[int] = Field(1, ge=1, description="The deadline is at least that many tokens.")
    deadline_ceiling: Live[int | None] = Field(
        None, ge=1, description="It is at most that many tokens, but for prompts that need longer themselves."
    )
    exploration: Live[float] = Field(
        0.05, ge=0, le=1, description="Share of batches that run past the deadline, to see what it takes away."
    )
    most_lost: Live[float] = Field(
        0.02,
        ge=0,
        le=1,
        description="Share of right answers that the deadline may take away, by the rewards reported for batches that "
        "ran past it; above it, the deadline is held back.",
    )
    group_size: Live[int | None] = Field(
        None,
        ge=2,
        le=1024,
        description="The group size your trainer asks for. Set, a shaped request must have that n, and requests with "
        "n = 1 and the same prompt are put together to groups of that size.",
    )
    group_wait: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Seconds without a further request after which a group of single requests is made of those there.",
    )
    max_group_size: Live[int] = Field(1024, ge=1, le=16384, description="Largest n that a request may ask for.")
    batch_window: float = Field(
        0.02, ge=0, le=1, description="Seconds within which groups that come together share one budget and deadline."
    )
    state_dir: Path | None = Field(
        None, description="Folder in which what was learned outlives a restart. Left out, it is kept in memory."
    )
    peek_interval: float = Field(
        0.02, ge=0.001, le=1, description="Seconds between two looks at how far running candidates are."
    )
    resume_seconds: float = Field(
        60.0,
        ge=1,
        le=86400,
        description="Seconds that a batch with an Idempotency-Key goes on when nobody listens, for its caller to come "
        "back; then it is cancelled.",
    )
    kept_seconds: float = Field(
        600.0, ge=0, le=604800, description="Seconds that such a batch is kept after its end, to be asked for again."
    )
    kept_batches: int = Field(
        64, ge=0, le=65536, description="Most ended batches that are kept, with all their tokens; the oldest go first."
    )

    weights_root: Path | None = Field(
        None, description="Folder that new weights may be read from. Left out, they can only be pushed."
    )
    weights_staging: Path | None = Field(
        None,
        description="Folder for pushed weights, with room for two models. Left out, the one for temporary files.",
    )
    weights_rule: Literal["finish", "keep"] = Field(
        "finish",
        description="What becomes of running groups when new weights come. finish: they are waited for, and no others "
        "begin meanwhile. keep: they stand still and go on with the new weights, marked as mixed.",
    )
    weights_wait: float = Field(
        600.0, ge=0.001, le=86400, description="Seconds that finish waits; then the old weights stay."
    )
    weights_timeout: float = Field(
        300.0, ge=0.001, le=86400, description="Seconds that any other step of an update may take."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shortest, longest, size = self.num_shortest, self.num_longest, self.group_size
        if self.policy not in ("off", "uniform", "shadow:uniform") and self.redundancy > self.max_redundancy:
            raise ValueError(
                f"redundancy must be at most max_redundancy = {self.max_redundancy}, got {self.redundancy}"
            )
        if self.deadline_ceiling is not None and self.deadline_ceiling < self.deadline_floor:
            raise ValueError(
                f"deadline_ceiling must be at least deadline_floor = {self.deadline_floor}, got {self.deadline_ceiling}"
            )
        if size is not None and shortest is not None and shortest + longest != size:
            raise ValueError(
                f"num_shortest + num_longest must equal group_size, got {shortest} + {longest} != {size}; "
                f"change one of the three or leave num_shortest out"
            )
        for folder in ("weights_root", "weights_staging"):
            if (path := getattr(self, folder)) is not None and not path.is_dir():
                raise ValueError(f"{folder} must be a folder that is there, got {path}")
        if size is not None and longest >= size:
            raise ValueError(f"num_longest must be smaller than group_size = {size}, got {longest}")
        if size is not None and size > self.max_group_size:
            raise ValueError(f"group_size must be at most max_group_size = {self.max_group_size}, got {size}")
        return self


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Our flags, in a group of their own. Values are checked later, by :func:`load`."""
    group = parser.add_argument_group(
        "shaped groups",
        f"Each can also be set as {ENV_PREFIX}NAME in the environment, or as a key in the file of --darts-config.",
    )
    group.add_argument("--darts-config", metavar="FILE", help="TOML file with these settings.")
    for name, field in Settings.model_fields.items():
        group.add_argument(flag_of(name), dest=name, metavar=_metavar(field), help=_help(field))


def load(flags: Mapping[str, str | None], config: str | None) -> Settings:
    """Settings from the flags that were given, the environment and the file.

    Raises:
        InvalidSetting: names the key, the value and what is allowed.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return _with_file(config)(**given)  # type: ignore[arg-type]  # pydantic turns the strings into values
    except ValidationError as error:
        raise InvalidSetting("\n".join(_explained(e, given) for e in error.errors())) from error
    except (SettingsError, ValueError, OSError) as error:
        raise InvalidSetting(f"--darts-config {config}: {error}") from error


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
        raise _refusal(error.errors()[0], patch) from error


class _Changed(Settings):
    model_config = SettingsConfigDict(strict=True)

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # the other sources were read at start
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _live_names() -> list[str]:
    return [name for name, field in Settings.model_fields.items() if _LIVE in field.metadata]


def _refusal(error: Any, patch: Mapping[str, object]) -> InvalidRequest:
    message = _message(error)
    if not error["loc"]:
        name = next((name for name in patch if name in message), next(iter(patch)))
        return InvalidRequest(name, message.removeprefix(f"{name} "))
    name = str(error["loc"][0])
    return InvalidRequest(name, f"{message}, got {shortened(error['input'])} ({_help(Settings.model_fields[name])})")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


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


def _explained(error: Any, given: Mapping[str, str | None]) -> str:
    location: Sequence[int | str] = error["loc"]
    message = _message(error)
    if not location:
        return message
    name = str(location[0])
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting; known ones are {', '.join(Settings.model_fields)}"
    where = flag_of(name) if name in given else f"{name} (from {ENV_PREFIX}{name.upper()} or the file)"
    return f"{where} = {error['input']}: {message} ({_help(Settings.model_fields[name])})"


def _message(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def _help(field: FieldInfo) -> str:
    default = "" if field.default is None else f" Default: {field.default}."
    return f"{field.description}{_range(field)}{default}"


def _range(field: FieldInfo) -> str:
    low = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    high = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    if low is None:
        return ""
    return f" At least {low}." if high is None else f" {low} to {high}."


def _metavar(field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(c, str) for c in choices):
        return "{" + ",".join(choices) + "}"
    if field.annotation == Path | None:
        return "FOLDER"
    return "X" if field.annotation is float else "N"
