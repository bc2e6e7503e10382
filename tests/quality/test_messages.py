from collections.abc import Iterator
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from darts_server.quality import messages
from darts_server.quality.evaluation import ScoreMetrics
from darts_server.quality.messages import Example, Message, pack_examples, receive, send, unpack_examples
from darts_server.quality.report import TrainerReport
from darts_server.quality.types import HeadStatus

Ends = tuple[messages.PipeEnd, messages.PipeEnd]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Where messages come out, and where they go in."""
    inbox, outbox = Pipe(duplex=False)
    with inbox, outbox:
        yield inbox, outbox


def test_messages_are_received_as_they_were_sent_until_the_end(ends: Ends) -> None:
    inbox, outbox = ends
    sent = [
        Message({"kind": "labels"}, b"\0\1"),
        Message({"kind": "restore", "restores": 3}),
        Message({}, b"x" * 9_000),
    ]
    for message in sent:
        send(outbox, message)
    outbox.close()
    assert [receive(inbox) for _ in range(4)] == [*sent, None]


def test_a_message_without_its_body_is_the_end(ends: Ends) -> None:
    inbox, outbox = ends
    outbox.send_bytes(b"{}")
    outbox.close()
    assert receive(inbox) is None


def test_a_message_of_a_process_that_died_while_it_sent_is_an_error(ends: Ends) -> None:
    inbox, outbox = ends
    with open(outbox.fileno(), "wb", closefd=False) as raw:
        raw.write(b"\0\0\0\7half")
    outbox.close()
    with pytest.raises(OSError, match="end of file"):
        receive(inbox)


def test_a_message_that_is_too_large_is_not_read(ends: Ends) -> None:
    inbox, outbox = ends
    with open(outbox.fileno(), "wb", closefd=False) as raw:
        raw.write((messages.MAX_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(OSError, match="bad message length"):
        receive(inbox)


def test_a_pickle_is_not_unpickled(ends: Ends) -> None:
    inbox, outbox = ends
    outbox.send({"kind": "labels"})
    outbox.send_bytes(b"")
    with pytest.raises(ValueError, match=r"codec|JSON|Expecting"):
        receive(inbox)


def test_examples_are_unpacked_as_they_were_packed() -> None:
    rng = np.random.default_rng(0)
    sent = [Example(rng.normal(size=5).astype(np.float16), 512 + i, 0.25 * i, 0.1 + 0.2 * i) for i in range(3)]
    received = unpack_examples(pack_examples(sent))
    assert [(x.position, x.target, x.survival) for x in received] == [(x.position, x.target, x.survival) for x in sent]
    for one, other in zip(received, sent, strict=True):
        assert one.hidden.dtype == np.float32
        assert (one.hidden == other.hidden).all()


def test_a_report_is_received_as_it_was_sent(ends: Ends) -> None:
    inbox, outbox = ends
    report = TrainerReport(HeadStatus.DIVERGED, 0.25, ScoreMetrics(7, 0.5, None, 0.125), 9, 8, 7, 0.5, 0.625, 1, 2)
    send(outbox, Message(report.to_json()))
    message = receive(inbox)
    assert message is not None
    assert TrainerReport.from_json(message.fields) == report
