"""The state of a request is changed when it is created, once, or the request fails."""

from types import SimpleNamespace
from typing import Any

import pytest

from darts_server.vllm.deferred import change_new_states, changing_state


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, str] = {}

    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = f"state of {request.request_id}"


def new_processor() -> Any:
    processor: Any = Processor()
    change_new_states(processor)
    return processor


def test_only_the_first_state_in_a_block_is_changed() -> None:
    processor, changed = new_processor(), list[Any]()
    processor.add_request(SimpleNamespace(request_id="before"))
    with changing_state(changed.append):
        processor.add_request(SimpleNamespace(request_id="one"))
        processor.add_request(SimpleNamespace(request_id="another"))
    processor.add_request(SimpleNamespace(request_id="after"))
    assert changed == ["state of one"]


def test_a_request_whose_state_was_not_changed_fails() -> None:
    with pytest.raises(RuntimeError, match="without OutputProcessor"), changing_state(lambda _: None):
        pass


def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), changing_state(lambda _: None):
        raise ZeroDivisionError
