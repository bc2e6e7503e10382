"""Read the sampling parameters of our own routes, with the types that vLLM's engine gives them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from darts_server.exceptions import InvalidRequest
from darts_server.vllm.compat.engine import REFUSALS

RESERVED = frozenset({"n", "output_kind", "extra_args", "skip_clone", "stream_interval"})
"""Sampling parameters that callers cannot set, since this server sets them."""
LOGPROBS = "logprobs"
LOGPROBS_OF_FLAG = {True: 0, False: None}
"""vLLM's number for ``logprobs: true``, the sampled token only, and for ``false``."""
NESTED = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
"""Sampling parameters that are objects. Decoding ignores keys that it does not know, and accepts private ones."""
AT = re.compile(r" - at .*?\$\.?(?P<path>[^`]*)`$")
"""Where msgspec's message names the place of a wrong value, such as ``$.stop[1]``."""


class SamplingReader:
    """Converts the ``sampling`` of a request. ``defaults``: the model's own values, used where a request has none."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        hints = get_type_hints(SamplingParams.from_optional)
        hints["logit_bias"] = dict[int, float] | None  # keys are text in JSON; msgspec takes no union of two dicts
        self._allowed = sorted(set(hints) - RESERVED - {"return"})
        fields = [(name, hints[name] | UnsetType, UNSET) for name in self._allowed]
        self._model: type[msgspec.Struct] = msgspec.defstruct("Sampling", fields)
        self._defaults = defaults

    def read(self, sampling: Mapping[str, object], size: int) -> SamplingParams:
        """Make sampling parameters for ``size`` trajectories.

        Raises:
            InvalidRequest: names the parameter.
        """
        self._check_names(sampling)
        try:
            values = {**self._defaults, **self._convert(sampling)}
            params = SamplingParams.from_optional(n=1, output_kind=RequestOutputKind.FINAL_ONLY, **values)
        except InvalidRequest:
            raise
        except REFUSALS as error:
            raise InvalidRequest(named_parameter(error, sampling) or "sampling", str(error)) from error
        params.n = size
        return params

    def _check_names(self, sampling: Mapping[str, object]) -> None:
        for name, value in sampling.items():
            if name not in self._allowed:
                what = "is set by this server" if name in RESERVED else "is unknown"
                raise InvalidRequest(f"sampling.{name}", f"{what}; allowed are {', '.join(self._allowed)}")
            if name in NESTED and isinstance(value, Mapping):
                allowed = [field.name for field in dataclasses.fields(NESTED[name]) if field.init]
                for key in value:
                    if key not in allowed:
                        raise InvalidRequest(f"sampling.{name}.{key}", f"is unknown; allowed are {', '.join(allowed)}")

    def _convert(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(sampling)
        if isinstance(given.get(LOGPROBS), bool):
            given[LOGPROBS] = LOGPROBS_OF_FLAG[given[LOGPROBS]]
        try:
            converted = msgspec.convert(given, self._model, str_keys=True)
        except msgspec.ValidationError as error:
            field, message = split_place(error)
            raise InvalidRequest(f"sampling.{field}", message) from error
        return {name: value for name, value in msgspec.structs.asdict(converted).items() if value is not UNSET}


def split_place(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's message into the path of the wrong value, such as ``stop[1]``, and what is wrong with it."""
    text = str(error)
    found = AT.search(text)
    if found is None:
        return "", text
    return found["path"].removesuffix("[...]"), f"has the wrong type: {text[: found.start()]}"


def named_parameter(error: Exception, sampling: Mapping[str, object]) -> str | None:
    """Return the given sampling parameter that vLLM's error is about, if it names one."""
    text, name = str(error), getattr(error, "parameter", None)
    if name not in sampling:
        # The first one in the message, and the longest there: stop_token_ids rather than stop.
        found = [(text.index(name), -len(name), name) for name in sampling if name in text]
        name = min(found)[2] if found else None
    return None if name is None else f"sampling.{name}"
