"""Messages between the processes."""

import io
import struct

import numpy as np
import pytest

from darts_server.quality.evaluation import ScoreMetrics
from darts_server.quality.frames import LARGEST, Example, Frame, examples, read, read_examples, write
from darts_server.quality.report import TrainerReport
from darts_server.quality.types import HeadStatus


def test_messages_come_out_as_they_went_in_and_then_the_end() -> None:
    stream = io.BytesIO()
    sent = [Frame({"kind": "labels"}, b"\0\1"), Frame({"kind": "restore", "epoch": 3}), Frame({}, b"x" * 100_000)]
    for frame in sent:
        write(stream, frame)
    stream.seek(0)
    assert [read(stream) for _ in range(4)] == [*sent, None]


def test_a_message_that_was_cut_off_is_the_end() -> None:
    stream = io.BytesIO()
    write(stream, Frame({"kind": "labels"}, b"body"))
    whole = stream.getvalue()
    for length in range(len(whole)):
        assert read(io.BytesIO(whole[:length])) is None


def test_what_is_too_large_is_not_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        read(io.BytesIO(struct.pack("<IQ", 2, LARGEST)))


def test_examples_come_out_as_they_went_in() -> None:
    rng = np.random.default_rng(0)
    sent = [Example(rng.normal(size=5).astype(np.float16), 512 + i, 0.25 * i, 0.1 + 0.2 * i) for i in range(3)]
    got = read_examples(examples(sent))
    assert [(x.position, x.target, x.survival) for x in got] == [(x.position, x.target, x.survival) for x in sent]
    for one, other in zip(got, sent, strict=True):
        assert one.hidden.dtype == np.float32
        assert (one.hidden == other.hidden).all()


def test_a_report_comes_out_as_it_went_in() -> None:
    report = TrainerReport(HeadStatus.DIVERGED, 0.25, ScoreMetrics(7, 0.5, None, 0.125), 9, 8, 7, 0.5, 0.625, 1, 2)
    stream = io.BytesIO()
    write(stream, Frame(report.says()))
    stream.seek(0)
    frame = read(stream)
    assert frame is not None
    assert TrainerReport.read(frame.says) == report
