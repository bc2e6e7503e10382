"""The functions that a verifier's process runs. Each gets a list of answers, and returns the verifier's values.

Functions of veRL's form get one answer at a time, and functions of TRL's form get several. The server never imports
this module, because the functions are the user's code.
"""

import asyncio
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from darts_server.estimates.answers import create_extractor, last_answer, normalise
from darts_server.verify.calls import decode_columns
from darts_server.verify.channel import Item, Task
from darts_server.verify.specs import Kind

Function = Callable[[Sequence[Item]], Sequence[object]]
TRL_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns whose names TRL uses itself."""


class LoadError(Exception):
    """The function cannot be used. The message names the remedy."""


def load_function(task: Task) -> tuple[Function, bool]:
    """Load the function of a task, and return whether it has TRL's form.

    Raises:
        LoadError: and whatever the user's file raises.
    """
    if task.kind is Kind.MATH_VERIFY:
        return partial(_call_each, _load_math_verify()), False
    if task.kind in (Kind.BOXED, Kind.REGEX):
        extract = create_extractor(task.target or task.kind.value)

        def compare(item: Item) -> bool:
            right_answer = normalise(str(_require_column(item, "answer")))
            return right_answer is not None and right_answer == last_answer(extract(item.text.decode()))

        return partial(_call_each, compare), False

    function = _import_function(task.target, task.function)
    parameters = inspect.signature(function).parameters
    # Only TRL passes `completions`, and only veRL passes `solution_str`.
    is_trl = "completions" in parameters
    if task.kind is Kind.FUNCTION and is_trl == ("solution_str" in parameters):
        raise LoadError(
            f"{task.function} has neither veRL's parameters (data_source, solution_str, ground_truth, extra_info) nor "
            f"TRL's (prompts, completions, completion_ids, **columns); write verl:... or trl:... to choose"
        )
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    event_loop = asyncio.Runner()

    def call(arguments: Mapping[str, object]) -> object:
        accepted = {name: value for name, value in arguments.items() if takes_any_name or name in parameters}
        returned = function(**accepted)
        return event_loop.run(returned) if inspect.iscoroutine(returned) else returned

    if task.kind is Kind.TRL or (task.kind is Kind.FUNCTION and is_trl):
        return partial(_call_trl, call), True
    return partial(_call_each, partial(_call_verl, call)), False


def _import_function(path: str, name: str) -> Callable[..., Any]:
    # The file may import modules beside it and in the current folder.
    sys.path[:0] = [str(Path(path).parent), os.getcwd()]
    spec = importlib.util.spec_from_file_location(f"darts_verifier_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and the like look their module up while the file runs.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        names = [each for each, _ in inspect.getmembers(module, inspect.isfunction)]
        raise LoadError(f"{path} has no function {name}; its functions are {', '.join(names) or 'none'}")
    return function


def _call_each(function: Callable[[Item], object], items: Sequence[Item]) -> list[object]:
    return [function(item) for item in items]


def _require_column(item: Item, name: str) -> Any:
    columns = decode_columns(item.metadata)
    if name not in columns:
        raise ValueError(f"the prompt's metadata has no {name!r}, which the verifier needs")
    return columns[name]


# --- veRL -------------------------------------------------------------------


def _call_verl(call: Callable[[Mapping[str, object]], object], item: Item) -> object:
    columns = decode_columns(item.metadata)
    return call(
        {
            "data_source": columns.get("data_source"),
            "solution_str": item.text.decode(),
            "ground_truth": _require_column(item, "ground_truth"),
            "extra_info": columns.get("extra_info"),
        }
    )


# --- TRL --------------------------------------------------------------------


def trl_call_key(item: Item) -> tuple[object, ...]:
    """Return a key that is equal for answers that may be in one call."""
    is_chat = isinstance(_decode_prompt(item), list)
    return (is_chat, *sorted(decode_columns(item.metadata)))


def _decode_prompt(item: Item) -> Any:
    if item.messages is not None:
        return msgspec.json.decode(item.messages)
    if item.prompt_text is not None:
        return item.prompt_text.decode()
    # The prompt was sent as token ids.
    return decode_columns(item.metadata).get("prompt", "")


def _call_trl(call: Callable[[Mapping[str, object]], object], items: Sequence[Item]) -> list[object]:
    prompts = [_decode_prompt(item) for item in items]
    completions: list[object] = [item.text.decode() for item in items]
    # All answers of a call have the same form and columns.
    if isinstance(prompts[0], list):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    rows = [decode_columns(item.metadata) for item in items]
    arguments: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0] if name not in TRL_RESERVED}
    arguments |= {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(item.token_ids) for item in items],
        "trainer_state": None,
        # TRL's functions that log do nothing here, because there is no trainer.
        "log_extra": _do_nothing,
        "log_metric": _do_nothing,
    }
    returned: Any = call(arguments)
    return list(returned)


def _do_nothing(*_: object) -> None: ...


# --- the library math-verify --------------------------------------------------


def _load_math_verify() -> Callable[[Item], object]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise LoadError(
            f"the library math-verify cannot be imported ({error}); pip install 'darts-server[math]'"
        ) from error

    @lru_cache(1024)
    def parse_gold(answer: str) -> Any:
        gold = parse(rf"\boxed{{{answer}}}")
        if not gold:
            raise ValueError(f"math-verify cannot parse metadata.answer = {answer[:100]!r}")
        return gold

    def check(item: Item) -> object:
        gold = parse_gold(str(_require_column(item, "answer")))
        return bool(verify(gold, parse(item.text.decode())))

    return check
