"""Change vLLM's state of a request in this process before the engine's first output for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

StateChange = Callable[[RequestState], None]

_changes: ContextVar[list[StateChange] | None] = ContextVar("changes", default=None)


def change_new_states(processor: OutputProcessor) -> None:
    """Let `changing_state` work for requests that are added to this processor. Harmless if it does already.

    In the call that creates the state, because the first output may come before `AsyncLLM.add_request` returns.
    """
    if "add_request" in vars(processor):
        return
    add_request = processor.add_request

    def add_changed_request(request: EngineCoreRequest, *args: Any, **more: Any) -> None:
        add_request(request, *args, **more)
        if changes := _changes.get():
            changes.pop()(processor.request_states[request.request_id])

    processor.add_request = add_changed_request  # type: ignore[method-assign]  # of this one, not of its class


@contextmanager
def changing_state(change: StateChange) -> Iterator[None]:
    """Call ``change`` with the new state of the request that this task adds in the block.

    Raises:
        RuntimeError: it was not called: this version of vLLM adds requests in another way.
    """
    changes = [change]  # emptied by the call: tasks of vLLM's that begin in the block keep this context
    token = _changes.set(changes)
    try:
        yield
    finally:
        _changes.reset(token)
    if changes:
        raise RuntimeError("vLLM has added a request without OutputProcessor.add_request, which its state depends on")
