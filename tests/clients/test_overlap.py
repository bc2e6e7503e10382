"""Log-probs that are computed while tokens arrive, compared with one forward pass over the whole sequence."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from darts_client._forward import TokenSequence, next_batch
from darts_client.overlap import Chunk, Overlap
from tests.clients.causal_lms import SUPPORTED, assert_equal, expected_logprobs, scores, small, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def run_all_steps(overlap: Overlap) -> list[Chunk]:
    chunks = []
    while overlap.pending_tokens:
        chunks += overlap.step()
    return chunks


@dataclass
class Rollout:
    """A candidate, the sizes of its deltas, and its end."""

    number: int
    completion: list[int]
    delta_sizes: list[int]  # used in turn
    end: str  # "finish", "cut", "drop", "open"
    num_added: int = 0
    num_deltas: int = 0


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[list[int]], list[Rollout]]:
    seeds, sizes = st.integers(0, 10_000), st.integers(1, 9)
    prompts = draw(st.lists(st.builds(tokens, seeds, sizes), min_size=1, max_size=3))
    candidate = st.builds(
        Rollout,
        number=st.integers(0, len(prompts) - 1),
        completion=st.builds(tokens, seeds, st.integers(1, 24)),
        delta_sizes=st.lists(st.integers(1, 10), min_size=1, max_size=3),
        end=st.sampled_from(["finish", "finish", "cut", "drop", "open"]),
    )
    return prompts, draw(st.lists(candidate, min_size=1, max_size=6))


def play(overlap: Overlap, rollouts: list[Rollout], rng: Random, step_rate: float) -> list[Chunk]:
    """Add all deltas in random order with steps in between, and end each candidate as specified."""
    chunks, running = [], {f"t{i}": rollout for i, rollout in enumerate(rollouts)}
    while running:
        name = rng.choice(list(running))
        rollout = running[name]
        count = rollout.delta_sizes[rollout.num_deltas % len(rollout.delta_sizes)]
        new = rollout.completion[rollout.num_added : rollout.num_added + count]
        overlap.add_tokens(name, rollout.number, new, start=rollout.num_added)
        rollout.num_added, rollout.num_deltas = rollout.num_added + len(new), rollout.num_deltas + 1
        drop_early = rollout.end == "drop" and rng.random() < 0.3
        if rollout.num_added == len(rollout.completion) or drop_early:
            del running[name]
            if rollout.end == "drop":
                overlap.drop(name)
            elif rollout.end == "cut":
                rollout.completion = rollout.completion[: rng.randrange(len(rollout.completion) + 1)]
                overlap.finish(name, len(rollout.completion))
            elif rollout.end == "finish":
                overlap.finish(name)
        while rng.random() < step_rate:
            chunks += overlap.step()
    return chunks


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(each, marks=pytest.mark.nightly) for each in SUPPORTED if each != "qwen3")]
)
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["sdpa", "eager"]),
    rollouts(),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.4, 0.8]),
    st.sampled_from([1, 8, 50, 10_000]),
    st.sampled_from([1.0, 0.6]),
)
def test_logprobs_equal_those_of_one_forward_pass_however_tokens_arrive(
    name: str,
    attention: str,
    drawn: tuple[list[list[int]], list[Rollout]],
    seed: int,
    step_rate: float,
    batch_tokens: int,
    temperature: float,
) -> None:
    prompts, candidates = drawn
    model = small(name, attention)
    overlap = Overlap(model, temperature=temperature, batch_tokens=batch_tokens, entropy=True)
    for number, prompt in enumerate(prompts):
        overlap.add_prompt(number, prompt)
    chunks = play(overlap, candidates, Random(seed), step_rate) + run_all_steps(overlap)
    cached = 0
    for i, candidate in enumerate(candidates):
        if candidate.end == "drop":
            assert f"t{i}" not in overlap
            continue
        expected = scores(model, prompts[candidate.number], candidate.completion, temperature)
        length = len(candidate.completion)
        assert_equal(overlap.logprobs(f"t{i}"), expected[range(length), candidate.completion])
        assert_equal(overlap.entropies(f"t{i}"), -(expected.exp() * expected).sum(-1))
        pieces = [chunk for chunk in chunks if chunk.trajectory_id == f"t{i}"]
        assert [chunk.start for chunk in pieces] == [
            sum(len(earlier.logprobs) for earlier in pieces[:k]) for k in range(len(pieces))
        ]
        joined = torch.cat([torch.empty(0), *(chunk.logprobs for chunk in pieces)])[:length]
        assert torch.equal(joined, overlap.logprobs(f"t{i}"))
        cached += length if candidate.end == "open" else 0
    assert overlap.cached_tokens == cached + sum(len(prompt) - 1 for prompt in prompts)
    for number in range(len(prompts)):
        overlap.close_prompt(number)
    assert overlap.cached_tokens == overlap.pending_tokens == 0


class ForwardRecorder:
    """The shapes of a model's inputs: rows, new tokens, and tokens with the past."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.num_forwarded = 0
        self.handle = model.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, _: Any, __: Any, inputs: dict[str, torch.Tensor]) -> None:
        rows, new = inputs["input_ids"].shape
        self.calls.append((rows, new, inputs["attention_mask"].shape[1]))
        self.num_forwarded += int(inputs["attention_mask"][:, -new:].sum())


@pytest.fixture
def recorder() -> Iterator[ForwardRecorder]:
    recorder = ForwardRecorder(small())
    yield recorder
    recorder.handle.remove()


def test_each_token_but_the_last_is_forwarded_once(recorder: ForwardRecorder) -> None:
    overlap = Overlap(small(), batch_tokens=40)
    overlap.add_prompt(0, tokens(0, 9))
    for start in range(0, 20, 4):
        for name in ("a", "b", "c"):
            overlap.add_tokens(name, 0, tokens(start, 4), start=start)
        run_all_steps(overlap)
    assert recorder.num_forwarded == 8 + 3 * 20


@pytest.mark.parametrize("batch_tokens", [1, 10, 33, 200])
def test_a_forward_pass_stays_within_batch_tokens_unless_a_single_row_is_longer(
    recorder: ForwardRecorder, batch_tokens: int
) -> None:
    overlap = Overlap(small(), batch_tokens=batch_tokens)
    for number in range(4):
        overlap.add_prompt(number, tokens(number, 3 + 4 * number))
    for i in range(12):
        overlap.add_tokens(f"t{i}", i % 4, tokens(i, 2 + 3 * i))
        if i % 5 == 0:
            overlap.step()
    run_all_steps(overlap)
    assert all(rows * past_and_new <= batch_tokens for rows, _, past_and_new in recorder.calls if rows > 1)
    assert all(new <= batch_tokens for _, new, _ in recorder.calls)
    assert batch_tokens < 200 or max(rows for rows, _, _ in recorder.calls) > 1


def test_sequences_with_most_pending_tokens_are_forwarded_first() -> None:
    sequences = [TokenSequence(tokens(0, count + 1)) for count in (2, 9, 5, 9)]

    def batch(batch_tokens: int) -> list[tuple[int, int]]:
        return [(sequence.num_pending, len(row.inputs)) for sequence, row in next_batch(sequences, batch_tokens)]

    assert batch(27) == [(9, 9), (9, 9), (5, 5)]
    assert batch(4) == [(9, 4)]
    assert next_batch([], 4) == []


def test_a_closed_prompt_without_finished_candidates_is_not_forwarded(recorder: ForwardRecorder) -> None:
    overlap = Overlap(small())
    overlap.add_prompt(0, tokens(0, 9))
    overlap.add_tokens("a", 0, [1])
    overlap.close_prompt(0)
    assert overlap.step() == []
    assert (recorder.calls, overlap.pending_tokens, "a" in overlap) == ([], 0, False)


def test_logprobs_have_no_gradient_and_can_be_used_in_a_loss() -> None:
    overlap = Overlap(small())
    overlap.add_prompt(0, [1, 2])
    overlap.add_tokens("a", 0, [3, 4, 5])
    old = overlap.logprobs("a")
    assert (old.requires_grad, old.is_inference(), old.dtype) == (False, False, torch.float32)


def test_a_failed_forward_pass_changes_nothing() -> None:
    model, overlap = small(), Overlap(small())
    overlap.add_prompt(0, [1, 2, 3])
    overlap.add_tokens("a", 0, [4, 5])

    def fail(*_: Any) -> None:
        raise MemoryError

    for _ in range(2):  # over the prompt, over the candidate
        handle = model.register_forward_hook(fail)
        pending = overlap.pending_tokens
        cached = overlap.cached_tokens
        with pytest.raises(MemoryError):
            overlap.step()
        handle.remove()
        assert (overlap.pending_tokens, overlap.cached_tokens) == (pending, cached)
        overlap.step()
    assert_equal(overlap.logprobs("a"), expected_logprobs(model, [1, 2, 3], [4, 5]))
