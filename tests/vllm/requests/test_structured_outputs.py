"""Limits of the cost of checking a schema, grammar or regular expression, with vLLM's own checks."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from darts_server.caller import Caller, caller
from darts_server.exceptions import RETRY_SECONDS, InvalidRequest, Overloaded
from darts_server.serving.fair_cache import FairCache
from darts_server.vllm.requests import structured_outputs
from darts_server.vllm.requests.sampling import REFUSALS
from darts_server.vllm.requests.structured_outputs import (
    MAX_BRACKETS,
    MAX_DEPTH,
    MAX_SAMPLING_BYTES,
    WaitBudget,
    limit_checks,
)
from examples.tiny_rl.tokenizer import build_tokenizer

TOKENIZER: Any = build_tokenizer()
"""A fast tokenizer, which vLLM 0.33 needs for guidance."""
STRING: Any = {"type": "string"}
PATH = STRING | {"description": "of the file :( such as (a/b", "pattern": r"^[^\0]{1,64}$"}
ID = STRING | {"pattern": "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"}
EDIT = {"type": "object", "properties": {"old": STRING, "new": {"anyOf": [STRING, {"type": "null"}]}}}
TOOL = {
    "type": "object",
    "properties": {"path": PATH, "id": ID, "edits": {"type": "array", "items": EDIT}},
    "required": ["path", "id"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_checks()
    monkeypatch.setattr(structured_outputs, "CHECK_SECONDS", 60)
    monkeypatch.setattr(structured_outputs, "WAITED_SECONDS", 3600)
    monkeypatch.setattr(structured_outputs, "_wait_budget", WaitBudget())
    monkeypatch.setattr(structured_outputs, "_checks", FairCache(structured_outputs.MAX_CACHED))


def params(**outputs: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))


def check(checked: SamplingParams, backend: str = "auto") -> SamplingParams:
    """Check as vLLM does for each prompt and candidate."""
    model = SimpleNamespace(is_diffusion=False)
    config = SimpleNamespace(backend=backend)
    checked._validate_structured_outputs(model, config, TOKENIZER)  # type: ignore[arg-type]  # fakes
    return checked


def arrays(depth: int) -> Any:
    schema: Any = STRING
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def pattern(brackets: int) -> Any:
    return STRING | {"pattern": "(" * brackets + "a" + ")" * brackets}


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": {"type": "object", "properties": {f"tool {i}": TOOL for i in range(80)}}},
        {"json": json.dumps(TOOL)},
        {"json": arrays(MAX_DEPTH - 1)},
        {"json": pattern(MAX_BRACKETS)},
        {"regex": r"\(\d{3}\) [0-9]+"},
        {"choice": [f"answer {i}" for i in range(3000)]},
        {"grammar": 'root ::= "a" | "(" root ")"'},
    ],
)
def test_usual_and_large_schemas_pass(outputs: dict[str, Any]) -> None:
    check(params(**outputs))


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance", "outlines"])
@pytest.mark.parametrize(
    ("outputs", "field"),
    [
        ({"json": arrays(MAX_DEPTH)}, ".json"),
        ({"json": json.dumps(arrays(MAX_DEPTH))}, ".json"),
        ({"json": "[" * 30_000}, ".json"),
        ({"json": pattern(MAX_BRACKETS + 1)}, ".json"),
        ({"json": pattern(30_000)}, ".json"),
        ({"json": {"type": "object", "patternProperties": {"(" * 30_000 + ")" * 30_000: STRING}}}, ".json"),
        ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, ".regex"),
        ({"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000}, ".grammar"),
        (
            {"structural_tag": json.dumps({"format": {"type": "json_schema", "json_schema": arrays(62)}})},
            ".structural_tag",
        ),
        ({"json": {"enum": ["a" * MAX_SAMPLING_BYTES]}}, ""),
    ],
)
def test_too_deep_or_too_large_input_is_refused_before_a_library_sees_it(
    outputs: dict[str, Any], field: str, backend: str
) -> None:
    with pytest.raises((InvalidRequest, VLLMValidationError)) as refused:
        check(params(**outputs), backend)
    if isinstance(refused.value, InvalidRequest):
        assert refused.value.field == f"structured_outputs{field}"
    else:
        # vLLM 0.33 limits the depth of JSON itself, before it calls our checks.
        assert field == ".json"
        assert "nested too deeply" in str(refused.value)


def test_outlines_is_not_chosen_for_schemas_that_other_backends_refuse() -> None:
    schema = {"type": "object", "properties": {"a": STRING}, "patternProperties": {"b": STRING, "c": STRING}}
    with pytest.raises(VLLMValidationError, match="neither xgrammar nor guidance"):
        check(params(json=schema))
    check(params(json=schema), "outlines")


def test_each_schema_is_checked_once_for_all_prompts_and_candidates() -> None:
    count, validate = counted()
    for outputs in ({"json": TOOL}, {"json": TOOL}, {"json": STRING}, {"json": TOOL}):
        validate(params(**outputs))
    assert count() == 2


def test_a_refusal_is_cached_too() -> None:
    bad = {"regex": "(?<=a)b"}
    messages = set()
    for _ in range(3):
        with pytest.raises(REFUSALS) as refused:
            check(params(**bad))
        messages.add(str(refused.value))
    assert len(messages) == 1
    assert structured_outputs._checks.size == 2, "xgrammar's and guidance's"


def test_choices_that_a_check_converts_are_converted_each_time() -> None:
    made = [check(params(choice=["a", "b"])).structured_outputs for _ in range(2)]
    assert [(one.choice, one.grammar) for one in made if one] == [(None, 'root ::= "a" | "b"')] * 2


def test_no_request_waits_for_the_end_of_a_long_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_outputs, "CHECK_SECONDS", 0.01)
    go_on = threading.Event()
    count, validate = counted(go_on)
    with pytest.raises(Overloaded, match="simplify it"):
        validate(params(json=TOOL))
    for other in (TOOL, STRING):
        with pytest.raises(Overloaded, match="still being checked"):
            validate(params(json=other))
    assert count() == 1
    token = caller.set(Caller("another"))
    # The check of another caller begins at once.
    with pytest.raises(Overloaded, match="simplify it"):
        validate(params(json=STRING))
    caller.reset(token)
    assert count() == 2
    go_on.set()
    monkeypatch.setattr(structured_outputs, "CHECK_SECONDS", 60)
    for verdict in structured_outputs._checks.entries_of("").values():
        verdict.result(60)
    validate(params(json=TOOL))
    validate(params(json=STRING))
    assert count() == 3


def test_checks_of_one_caller_run_one_after_another_and_their_results_are_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured_outputs, "CHECK_SECONDS", 0)
    go_on = threading.Event()
    count, validate = counted(go_on)
    schemas = [STRING | {"title": str(number)} for number in range(structured_outputs.MAX_PENDING + 1)]
    for schema in schemas:
        with pytest.raises(Overloaded):
            validate(params(json=schema))
    assert count() == 1
    verdicts = [*structured_outputs._checks.entries_of("").values()]
    assert len(verdicts) == structured_outputs.MAX_PENDING
    go_on.set()
    for verdict in verdicts:
        verdict.result(60)
    assert count() == len(verdicts)
    for schema in schemas[:-1]:
        validate(params(json=schema))
    assert count() == len(verdicts)


def test_all_checks_share_one_time_budget_and_every_caller_gets_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured_outputs, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(structured_outputs, "WAITED_SECONDS", 1.0)
    now = 100.0
    waits = WaitBudget(lambda: now)
    granted: dict[str, float] = {}
    for who in ("greedy", "second", "third"):
        for _ in range(40):
            left = waits.remaining_seconds(who)
            granted[who] = granted.get(who, 0.0) + left
            waits.add(who, left)
    assert granted == pytest.approx({"greedy": 0.5, "second": 0.25, "third": 0.125})
    now += 60
    assert waits.remaining_seconds("greedy") == pytest.approx(0.5)
    assert waits._waited == {}, "callers are forgotten"


def test_many_long_checks_block_the_event_loop_only_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_outputs, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(structured_outputs, "WAITED_SECONDS", 0.02)
    go_on = threading.Event()
    count, validate = counted(go_on)
    granted: list[float] = []

    class Recorded(WaitBudget):
        def remaining_seconds(self, who: str) -> float:
            granted.append(super().remaining_seconds(who))
            return granted[-1]

    monkeypatch.setattr(structured_outputs, "_wait_budget", Recorded(lambda: 0.0))
    for number in range(40):
        token = caller.set(Caller(str(number)))
        with pytest.raises(Overloaded) as refused:
            validate(params(json=STRING | {"title": str(number)}))
        caller.reset(token)
        assert refused.value.retry_after == RETRY_SECONDS
    go_on.set()
    assert count() == 40, "each check goes on, so that it is known when the request is sent again"
    assert sum(granted) <= 0.02


def test_a_panic_of_a_library_refuses_the_request() -> None:
    class Panic(BaseException):
        """A panic, as Rust libraries raise it."""

    def validate(_: SamplingParams) -> None:
        raise Panic

    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="Panic"):
            structured_outputs._limit_check(validate)(params(json=TOOL))


def counted(go_on: threading.Event | None = None) -> tuple[Any, Any]:
    """Return the number of calls of a check, and the check within our limits. It ends when it may ``go_on``."""
    calls = []

    def validate(checked: SamplingParams) -> None:
        calls.append(checked)
        if go_on is not None:
            go_on.wait(60)

    return lambda: len(calls), structured_outputs._limit_check(validate)
