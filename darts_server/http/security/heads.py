"""Limit the heads of requests, and the requests that wait on one connection, in the HTTP parser."""

import json
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from darts_server.http.body import STALL_SECONDS

MAX_HEAD_BYTES = 64 * 1024
"""The URL and all headers together. Clients and proxies send some kilobytes at most."""
MAX_HEADERS = 256
"""vLLM's default for its flag ``--h11-max-header-count``, which this server's parser ignores."""
MAX_PIPELINED = 32
"""Requests per connection. A queued request takes kilobytes, and only 30 bytes to send."""
SLICE_BYTES = 64 * 1024
"""Bytes that the parser gets at once. The parser joins the pieces of a header without a limit."""

_MESSAGES = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: (
        f"the URL and the headers must have at most {MAX_HEAD_BYTES} bytes, in at most {MAX_HEADERS} headers; "
        "send fewer or shorter ones, and data in the body"
    ),
    HTTPStatus.TOO_MANY_REQUESTS: (
        f"at most {MAX_PIPELINED} requests may wait on one connection; read the answers before you send more"
    ),
    HTTPStatus.REQUEST_TIMEOUT: f"the headers were not complete within {STALL_SECONDS:.0f} seconds; send them at once",
}


class _Refused(Exception):
    """The request that is being parsed is refused. uvicorn answers by `send_400_response`."""


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's faster HTTP protocol with limits. uvicorn itself has limits only for h11.

    At most three times `MAX_HEAD_BYTES` of a head are in memory. A refused connection is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        # The parser keeps these bytes of an incomplete header.
        self._bytes_since_callback = 0
        self._in_head = False
        self._head_timer: TimerHandle | None = None
        self._refusal = HTTPStatus.BAD_REQUEST
        self._unanswered: list[RequestResponseCycle] = []

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), SLICE_BYTES):
            part = data[begin : begin + SLICE_BYTES]
            self._bytes_since_callback += len(part)
            super().data_received(part)
            # The request was refused, or the connection was upgraded to a WebSocket.
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self._bytes_since_callback > MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return

        # Most heads arrive in one piece and need no timer. A head behind an unfinished answer has no timer either:
        # after that answer, uvicorn's own timer ends the connection.
        has_unfinished_answer = any(not cycle.response_complete for cycle in self._unanswered)
        if self._in_head and self._head_timer is None and not has_unfinished_answer:
            self._head_timer = self.loop.call_later(STALL_SECONDS, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def on_message_begin(self) -> None:
        self._bytes_since_callback = 0
        self._head_bytes = 0
        self._in_head = True
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HTTPStatus.TOO_MANY_REQUESTS
            raise _Refused
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # The parser also calls this for a trailer, a header after a body in chunks.
        self._count_head_bytes(len(name) + len(value))
        super().on_header(name, value)

    def _count_head_bytes(self, size: int) -> None:
        self._bytes_since_callback = 0
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise _Refused

    def on_headers_complete(self) -> None:
        self._bytes_since_callback = 0
        self._in_head = False
        self._cancel_head_timer()
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if self.cycle and not self.cycle.response_complete:
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._bytes_since_callback = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_since_callback = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        # uvicorn cancels only the last request. Answers to the others would be written to a closed socket.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        # uvicorn also calls this for all errors of the parser.
        if self._refusal is HTTPStatus.BAD_REQUEST:
            super().send_400_response(msg)
        else:
            self._refuse(self._refusal)

    def _refuse(self, status: HTTPStatus) -> None:
        if any(cycle.response_started and not cycle.response_complete for cycle in self._unanswered):
            # The client would take an error in the middle of an earlier answer for a part of that answer.
            self.transport.close()
            return
        error = {"message": _MESSAGES[status], "type": status.phrase, "param": None, "code": status.value}
        body = json.dumps({"error": error}).encode()
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + headers + body)
        self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
