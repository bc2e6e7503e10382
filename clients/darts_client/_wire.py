"""JSON in, models out: how everything that the server sends is checked."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ._errors import ProtocolError


class Wire(BaseModel):
    """Part of an answer. Fields that a later server adds are ignored; a wrong type is not made to fit."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


WireT = TypeVar("WireT", bound=BaseModel)


def parsed(kind: type[WireT], content: str | bytes, where: str) -> WireT:
    """The model that `content` holds; ProtocolError, naming `where` and the field, if it holds another."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise ProtocolError(f"{where}: {place}: {first['msg']}") from exc
