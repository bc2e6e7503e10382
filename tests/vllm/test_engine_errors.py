"""vLLM's own limits on its queue, `--max-num-queued-reqs` and `--max-num-queued-tokens`."""

from http import HTTPStatus
from typing import Any

import pytest
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

from darts_server.exceptions import EngineBusy
from darts_server.http.errors import body_of, headers_of, status_of
from darts_server.vllm.engine import raise_vllm_errors, translate

FULL: list[Any] = [QueueOverflowError, MaxQueuedTokensError]


@pytest.mark.parametrize("error_class", FULL)
def test_a_full_queue_of_vllm_has_its_status_and_says_when_to_retry(error_class: Any) -> None:
    full = error_class()
    error = translate(full)
    assert isinstance(error, EngineBusy)
    assert status_of(error) == full.http_status == HTTPStatus.SERVICE_UNAVAILABLE
    assert headers_of(error)["Retry-After"]
    assert body_of(error)["error"] == {
        "message": full.message,
        "type": "InternalServerError",
        "param": None,
        "code": 503,
    }


def test_vllms_own_routes_get_its_own_exception() -> None:
    full = FULL[0]()
    with pytest.raises(QueueOverflowError) as raised, raise_vllm_errors():
        raise translate(full) from full
    assert raised.value is full
