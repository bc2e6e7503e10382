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

from darts_server.estimates.answers import create_extractor, last, normalise
from darts_server.verify.calls import columns_of
from darts_server.verify.channel import Item, Task
from darts_server.verify.specs import Kind

Function = Callable[[Sequence[Item]], Sequence[object]]
TRL_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns whose names TRL uses itself."""


class LoadError(Exception):
    """The function cannot be used. The message names the remedy."""


def load(task: Task) -> tuple[Function, bool]:
    """Load the function of a task, and return whether it has TRL's form.

    Raises:
        LoadError: and whatever the user's file raises.
    """
    if task.kind is Kind.MATH_VERIFY:
        return partial(_each, _math_verify()), False
    if task.kind in (Kind.BOXED, Kind.REGEX):
        extract = create_extractor(task.target or task.kind.value)

        def compare(item: Item) -> bool:
            wanted = normalise(str(_column(item, "answer")))
            return wanted is not None and wanted == last(extract(item.text.decode()))

        return partial(_each, compare), False

    function = _import(task.target, task.function)
    parameters = inspect.signature(function).parameters
    is_trl = "completions" in parameters
    if task.kind is Kind.FUNCTION and is_trl == ("solution_str" in parameters):
        raise LoadError(
            f"{task.function} has neither veRL's parameters (data_source, solution_str, ground_truth, extra_info) nor "
            f"TRL's (prompts, completions, completion_ids, **columns); write verl:... or trl:... to choose"
        )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wanted = None if takes_all else set(parameters)
    runner = asyncio.Runner()

    def run(arguments: Mapping[str, object]) -> object:
        given = {name: value for name, value in arguments.items() if wanted is None or name in wanted}
        returned = function(**given)
        return runner.run(returned) if inspect.iscoroutine(returned) else returned

    if task.kind is Kind.TRL or (task.kind is Kind.FUNCTION and is_trl):
        return partial(_call_trl, run), True
    return partial(_each, partial(_call_verl, run)), False


def _import(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file. Modules beside the file, and in the current folder, can be imported by it."""
    sys.path[:0] = [str(Path(path).parent), os.getcwd()]
    spec = importlib.util.spec_from_file_location(f"darts_verifier_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and the like look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        names = [each for each, _ in inspect.getmembers(module, inspect.isfunction)]
        raise LoadError(f"{path} has no function {name}; its functions are {', '.join(names) or 'none'}")
    return function


def _each(function: Callable[[Item], object], items: Sequence[Item]) -> list[object]:
    return [function(item) for item in items]


def _column(item: Item, name: str) -> Any:
    columns = columns_of(item.metadata)
    if name not in columns:
        raise ValueError(f"the prompt's metadata has no {name!r}, which the verifier needs")
    return columns[name]


# --- veRL -------------------------------------------------------------------


def _call_verl(run: Callable[[Mapping[str, object]], object], item: Item) -> object:
    columns = columns_of(item.metadata)
    return run(
        {
            "data_source": columns.get("data_source"),
            "solution_str": item.text.decode(),
            "ground_truth": _column(item, "ground_truth"),
            "extra_info": columns.get("extra_info"),
        }
    )


# --- TRL --------------------------------------------------------------------


def trl_key(item: Item) -> tuple[object, ...]:
    """Return the form of the prompt and the columns, which all answers of a call have in common."""
    return (isinstance(_prompt(item), list), *sorted(columns_of(item.metadata)))


def _prompt(item: Item) -> Any:
    """Return a list of messages, or a text. A prompt of token ids has its text in the column ``prompt``."""
    if item.messages is not None:
        return msgspec.json.decode(item.messages)
    if item.prompt_text is not None:
        return item.prompt_text.decode()
    return columns_of(item.metadata).get("prompt", "")


def _call_trl(run: Callable[[Mapping[str, object]], object], items: Sequence[Item]) -> list[object]:
    prompts = [_prompt(item) for item in items]
    completions: list[object] = [item.text.decode() for item in items]
    if isinstance(prompts[0], list):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    columns = [columns_of(item.metadata) for item in items]
    arguments: dict[str, object] = {
        name: [each[name] for each in columns] for name in columns[0] if name not in TRL_RESERVED
    }
    arguments |= {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(item.token_ids) for item in items],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    returned: Any = run(arguments)
    return list(returned)


def _ignore(*_: object) -> None:
    """Stand in for TRL's functions that log, because there is no trainer here."""


# --- the library math-verify --------------------------------------------------


def _math_verify() -> Callable[[Item], object]:
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
        return bool(verify(parse_gold(str(_column(item, "answer"))), parse(item.text.decode())))

    return check
