"""Parts of our OpenAPI description that FastAPI does not derive from the routes."""

from typing import Any

from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    message: str = Field(description="What is wrong, and how to fix it.")
    type: str
    param: str | None = Field(description="The invalid field, such as `prompts[3].text`.")
    code: int = Field(description="The HTTP status.")


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorObject


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is invalid or refused. Nothing was changed."},
    "5XX": {"model": ErrorAnswer, "description": "The server or its engine failed, or is stopping."},
}
BEARER = HTTPBearer(auto_error=False, description="An API key of the server.")
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def json_body(model: type[BaseModel], *examples: dict[str, Any]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that parses its JSON body without FastAPI."""
    schema = model.model_json_schema()
    # FastAPI adds no definitions of models that it does not parse itself, so they are put into the schema.
    definitions = schema.pop("$defs", {})
    content: dict[str, Any] = {"schema": _inline_references(schema, definitions)}
    if examples:
        content["examples"] = {str(number): {"value": example} for number, example in enumerate(examples)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def binary_body(description: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "description": description, "content": BYTES}}


def _inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline_references(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        # A reference reads "#/$defs/NAME".
        name = schema["$ref"].rpartition("/")[2]
        return _inline_references(definitions[name], definitions)
    return {name: _inline_references(part, definitions) for name, part in schema.items()}
