"""Read the sampling parameters of our own routes, with the types that vLLM's engine gives them."""

import dataclasses
import re
from collections.abc import Mapping
from copy import copy
from types import UnionType
from typing import Any, Union, get_args, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.inspect import CustomType, type_info
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from darts_server.exceptions import InvalidRequest

REFUSALS: tuple[type[Exception], ...] = (VLLMClientError, ValueError, TypeError, OverflowError)
"""Exceptions that vLLM raises for requests that it rejects."""
RESERVED = frozenset({"n", "output_kind", "extra_args", "skip_clone", "stream_interval"})
NO_EFFECT_ON_DISTRIBUTION = frozenset(
    {
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "repetition_detection",
        "routed_experts_prompt_start",
        "trace_decode_token_ids",
        "watermarking",
    }
)
"""Sampling parameters that decide where a trajectory ends, or which of its values are returned. All others are assumed
to change the distribution that tokens are sampled from."""
PROCESSED_LOGPROBS = "processed_logprobs"
RAW_LOGPROBS = "raw_logprobs"
LOGPROBS = "logprobs"
NESTED = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
"""Sampling parameters that are objects. Their keys are checked here, because msgspec ignores unknown keys and accepts
private ones."""
# The place of a wrong value in msgspec's message, such as ``$.stop[1]``.
PLACE = re.compile(r" - at .*?\$\.?(?P<path>[^`]*)`$")


def parameter_names() -> list[str]:
    return sorted(set(get_type_hints(SamplingParams.from_optional)) - RESERVED - {"return"})


def check_logprobs(
    params: SamplingParams,
    logprobs_mode: str,
    field: str,
    remedy: str = "",
) -> None:
    """Check that the engine's log-probs are those of the distribution that it samples from.

    ``field``, ``remedy``: field of the error, and the beginning of its remedies.

    Raises:
        InvalidRequest: they are not.
    """
    if logprobs_mode == PROCESSED_LOGPROBS:
        return
    remedies = f"{remedy} start the server with --logprobs-mode {PROCESSED_LOGPROBS}".strip()
    if logprobs_mode != RAW_LOGPROBS:
        raise InvalidRequest(field, f"this engine returns no log-probs but {logprobs_mode}; {remedies}")

    # Raw log-probs are those of the model's own distribution, which sampling may change.
    defaults = SamplingParams()
    changing = []
    for name in parameter_names():
        if name in NO_EFFECT_ON_DISTRIBUTION or not hasattr(params, name):
            continue
        value = getattr(params, name)
        if name == "top_k":
            # 0 and -1 both stand for all tokens.
            value = max(value, 0)
        if value != getattr(defaults, name):
            changing.append(name)
    if changing:
        names = ", ".join(changing)
        raise InvalidRequest(
            field,
            f"this engine returns log-probs before {names} (--logprobs-mode {RAW_LOGPROBS}): they are "
            f"not those of the distribution that is sampled from; {remedies}, or leave out {names}",
        )


class SamplingReader:
    """Converts the ``sampling`` of a request to vLLM's sampling parameters.

    Defaults are vLLM's, and not those of the model's ``generation_config``: a trainer must know the distribution that
    it learns from.
    """

    def __init__(self, logprobs_mode: str) -> None:
        hints = get_type_hints(SamplingParams.from_optional)
        # Keys are texts in JSON. msgspec takes no union of two dicts.
        hints["logit_bias"] = dict[int, float] | None
        self._allowed = parameter_names()
        fields = [(name, json_type(hints[name]) | UnsetType, UNSET) for name in self._allowed]
        self._model: type[msgspec.Struct] = msgspec.defstruct("Sampling", fields)
        self._logprobs_mode = logprobs_mode
        self._latest: tuple[Mapping[str, object], SamplingParams] | None = None

    def read(self, sampling: Mapping[str, object], n: int) -> SamplingParams:
        """Make sampling parameters for ``n`` trajectories.

        The caller must not change lists of the result in place.

        Raises:
            InvalidRequest: names the parameter.
        """
        # All prompts of a batch come with the same mapping, which is parsed for the first prompt only. Parsing takes 20
        # microseconds, and more than 100 with a long ``logit_bias``.
        if self._latest is None or self._latest[0] is not sampling:
            self._latest = (sampling, self._parse(sampling))
        params = copy(self._latest[1])
        # vLLM's checks convert choices and grammars of a request in place.
        params.structured_outputs = copy(params.structured_outputs)
        params.n = n
        return params

    def _parse(self, sampling: Mapping[str, object]) -> SamplingParams:
        for name, value in sampling.items():
            if name not in self._allowed:
                problem = "is set by this server" if name in RESERVED else "is unknown"
                raise InvalidRequest(f"sampling.{name}", f"{problem}; allowed are {', '.join(self._allowed)}")
            if name in NESTED and isinstance(value, Mapping):
                allowed = [field.name for field in dataclasses.fields(NESTED[name]) if field.init]
                for key in value:
                    if key not in allowed:
                        raise InvalidRequest(f"sampling.{name}.{key}", f"is unknown; allowed are {', '.join(allowed)}")

        given: dict[str, Any] = dict(sampling)
        wants_logprobs = given.get(LOGPROBS)
        if isinstance(wants_logprobs, bool):
            # For vLLM 0 means the log-probs of the sampled tokens only.
            given[LOGPROBS] = 0 if wants_logprobs else None
        try:
            converted = msgspec.convert(given, self._model, str_keys=True)
            for name in given:
                given[name] = getattr(converted, name)
            return SamplingParams.from_optional(n=1, output_kind=RequestOutputKind.FINAL_ONLY, **given)
        except msgspec.ValidationError as error:
            field, message = split_validation_error(error)
            raise InvalidRequest(f"sampling.{field}", message) from error
        except REFUSALS as error:
            raise InvalidRequest(find_field_of_error(error, sampling) or "sampling", str(error)) from error

    def resolve(self, sampling: Mapping[str, object]) -> dict[str, object]:
        """Check the caller's parameters, and return all in force as values of JSON, except None and [].

        Raises:
            InvalidRequest: names the parameter. It is ``logprobs`` if the engine would return log-probs of another
                distribution than it samples from.
        """
        params = self.read(sampling, n=1)
        values = {name: getattr(params, name) for name in self._allowed if hasattr(params, name)}
        if params.logprobs is not None:
            check_logprobs(params, self._logprobs_mode, f"sampling.{LOGPROBS}", "leave it out, or")
        return {
            name: msgspec.to_builtins(value, str_keys=True) for name, value in values.items() if value not in (None, [])
        }


def json_type(hint: Any) -> Any:
    """Return the type of a parameter in JSON, without the arrays that vLLM also takes from Python callers."""
    # To msgspec arrays have a custom type.
    json_types = [kind for kind in get_args(hint) if not isinstance(type_info(kind), CustomType)]
    if isinstance(hint, UnionType) and json_types:
        return Union[tuple(json_types)]  # noqa: UP007
    return hint


def split_validation_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's message into the path of the wrong value, such as ``stop[1]``, and the problem."""
    text = str(error)
    found = PLACE.search(text)
    if found is None:
        return "", text
    return found["path"].removesuffix("[...]"), f"has the wrong type: {text[: found.start()]}"


def find_field_of_error(error: Exception, sampling: Mapping[str, object]) -> str | None:
    """Return ``sampling.NAME`` of the caller's parameter that vLLM's error is about, or None."""
    name = getattr(error, "parameter", None)
    if name not in sampling:
        text = str(error)
        named = [name for name in sampling if name in text]
        if not named:
            return None
        # The first name in the message; the longest if several begin there: stop_token_ids, and not stop.
        name = min(named, key=lambda name: (text.index(name), -len(name)))
    return f"sampling.{name}"
