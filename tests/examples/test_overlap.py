import argparse
import time
from collections.abc import Iterator

import pytest

from darts_client import Delta, Discard, Done, Event, Group, GroupEvent, Trajectory, TrajectoryEvent
from darts_client._models import Usage
from darts_client.overlap import Overlap
from examples.tiny_rl.overlap import Recording, Trainer, follow, forward_after
from tests.clients.causal_lms import assert_equal, expected_logprobs, tokens

FIRST, SECOND = tuple(tokens(1, 30)), tuple(tokens(2, 7))


def delta(name: str, start: int, token_ids: tuple[int, ...]) -> Delta:
    return Delta(trajectory_id=name, number=0, start=start, token_ids=token_ids, logprobs=None)


def returned(index: int, token_ids: tuple[int, ...]) -> Trajectory:
    return Trajectory(index, "", token_ids, None, "stop", trajectory_id=f"g:{index}")


# Two trajectories of one prompt and a third candidate that is stopped.
EVENTS: list[Event] = [
    delta("g:0", 0, FIRST[:20]),
    delta("g:2", 0, SECOND),
    Discard(trajectory_id="g:2", number=0, length=7, reason="surplus"),
    delta("g:0", 20, FIRST[20:]),
    TrajectoryEvent("g:0", 0, FIRST, None, "", "stop", cut=False),
    delta("g:1", 0, SECOND),
    TrajectoryEvent("g:1", 0, SECOND, None, "", "stop", cut=False),
    GroupEvent(Group("g", None, (returned(0, FIRST), returned(1, SECOND)), number=0)),
    Done(Usage(generated=44, returned=37, wasted=7, seconds=1.0), ()),
]


@pytest.fixture
def trainer(one_thread: None) -> Trainer:
    return Trainer(argparse.Namespace(prompts=1, group_size=2, chunk_tokens=20))


def test_batched_logprobs_equal_those_of_single_rows(trainer: Trainer) -> None:
    rows = [(str(i), tokens(i, 3 + i), tokens(9 + i, 12 - i)) for i in range(6)]
    found = forward_after(trainer.model, rows, batch_tokens=40)
    for name, prompt, completion in rows:
        assert_equal(found[name], expected_logprobs(trainer.model, prompt, completion))


def test_a_replayed_stream_is_no_faster_than_recorded_and_gives_the_same_logprobs(trainer: Trainer) -> None:
    recording = Recording([(0.02 * i, event) for i, event in enumerate(EVENTS)])
    replayed = trainer.replay(recording)
    assert replayed.error < 1e-5
    assert replayed.overlapped >= 0.02 * (len(EVENTS) - 1)
    assert replayed.sequential == 0.02 * (len(EVENTS) - 1) + replayed.sequential_tail


def test_prompts_are_forwarded_before_the_first_event(trainer: Trainer) -> None:
    overlap, waiting = Overlap(trainer.model), []
    overlap.add_prompt(0, tokens(0, 9))

    def late() -> Iterator[Event]:
        for _ in range(500):
            if not overlap.pending_tokens:
                break
            time.sleep(0.01)
        waiting.append(overlap.pending_tokens)
        yield from EVENTS

    groups, _ = follow(overlap, late())
    assert waiting == [0]
    assert [group.number for group in groups] == [0]
    assert overlap.cached_tokens == 0
