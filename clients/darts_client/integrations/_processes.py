"""A trainer with several processes, of which the main one alone calls the server."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


def run_on_main(call: Callable[[], T]) -> T:
    """Return the result of a call on the main process, on all of them.

    Its error is raised on all of them too, which would wait for the result: by itself on the main process, elsewhere as
    a RuntimeError with its text, since not every exception can be unpickled.
    """
    sent: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            result = call()
        except BaseException as error:
            broadcast_object_list([None, f"{type(error).__name__}: {error}"])
            raise
        sent = [result, None]
    broadcast_object_list(sent)
    if sent[1] is not None:
        raise RuntimeError(f"the main process failed: {sent[1]}")
    value: T = sent[0]
    return value
