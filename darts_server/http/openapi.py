"""What OpenAPI's description of our routes says beyond what FastAPI finds by itself."""

from typing import Any

from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field


class ErrorObject(BaseModel):
    """What was wrong, in OpenAI's form."""

    message: str = Field(description="What is wrong, and what to do.")
    type: str
    param: str | None = Field(description="The field that is wrong, as `prompts[3].text`.")
    code: int = Field(description="The status.")


class ErrorAnswer(BaseModel):
    """Any answer that is not what was asked for."""

    error: ErrorObject


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as it is. Nothing was changed."},
    "5XX": {"model": ErrorAnswer, "description": "The server or its engine is at fault, or is stopping."},
}
"""Of every route."""
BEARER = HTTPBearer(auto_error=False, description="A key that the server was started with.")
BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def json_body(model: type[BaseModel], *examples: dict[str, Any]) -> dict[str, Any]:
    """Describes a body that its route reads by itself."""
    schema = model.model_json_schema()
    content: dict[str, Any] = {"schema": _inlined(schema, schema.pop("$defs", {}))}
    if examples:
        content["examples"] = {str(i): {"value": example} for i, example in enumerate(examples)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def binary_body(description: str) -> dict[str, Any]:
    """Describes a body of bytes."""
    return {"requestBody": {"required": True, "description": description, "content": BYTES}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Without references, which would be looked for in the whole document and not in this part of it."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(part, definitions) for name, part in schema.items()}
