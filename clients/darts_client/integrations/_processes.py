"""Calls of the server by the main process of a trainer that has several processes."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


def run_on_main(call: Callable[[], T]) -> T:
    """Run a call on the main process, and return its result on all processes.

    The main process raises the call's error. The other processes raise a RuntimeError with its text.
    """
    # The other processes wait for the result, so an error is broadcast, too. Its text is sent because not every
    # exception can be unpickled.
    message: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            message = [call(), None]
        except BaseException as error:
            broadcast_object_list([None, f"{type(error).__name__}: {error}"])
            raise
    broadcast_object_list(message)
    result, error_text = message
    if error_text is not None:
        raise RuntimeError(f"the main process failed: {error_text}")
    value: T = result
    return value
