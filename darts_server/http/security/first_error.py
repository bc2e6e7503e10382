"""Ends the validation of bodies on vLLM's routes at the first wrong item of a list.

FastAPI validates a body in the event loop, and pydantic collects some 300 bytes for each wrong item: a prompt of 1
million wrong token ids took 10 s and 1.3 GB. Our own models have pydantic's ``Field(fail_fast=True)``. pydantic has no
public way to change a model of another package, so this module changes the schema that pydantic has built.
"""

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic_core import SchemaValidator
from pydantic_core.core_schema import no_info_wrap_validator_function

LISTS = ("list", "tuple", "set")
KEYS_OF_DATA = ("default", "metadata")


def end_at_first_error(application: FastAPI) -> None:
    for route in application.routes:
        if not isinstance(route, APIRoute):
            continue
        for field in route.dependant.body_params:
            adapter = field._type_adapter
            _set_fail_fast(adapter.core_schema)
            guarded_schema = no_info_wrap_validator_function(_validate_or_raise_value_error, adapter.core_schema)
            # Prebuilt validators of the models would ignore the changed schema.
            adapter.validator = SchemaValidator(guarded_schema, _use_prebuilt=False)


def _set_fail_fast(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in LISTS:
            schema["fail_fast"] = True
        for key, part in schema.items():
            # Data may look like a schema, and must not change.
            if key not in KEYS_OF_DATA:
                _set_fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _set_fail_fast(part)


def _validate_or_raise_value_error(body: object, validate: Callable[[object], object]) -> object:
    # vLLM's validators see fields before their types are checked: ``"structured_outputs": 1`` is an AttributeError.
    try:
        return validate(body)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        # pydantic reports a ValueError to the caller.
        raise ValueError(f"has a field of a wrong type ({type(error).__name__}: {error})") from error
