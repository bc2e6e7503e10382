"""Log-probs that are computed while tokens come, against one forward pass over the whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from darts_client._fed import Fed, next_batch
from darts_client.overlap import Chunk, Overlap
from tests.clients.causal_lms import SUPPORTED, assert_equal, scores, small, tiny, tokens, whole


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drained(overlap: Overlap) -> list[Chunk]:
    chunks = []
    while overlap.waiting:
        chunks += overlap.step()
    return chunks


@dataclass
class Rollout:
    """A candidate, how its tokens come, and what becomes of it."""

    number: int
    completion: list[int]
    chunks: list[int]  # lengths, used in a circle
    fate: str  # "finish", "cut", "drop", "open"
    came: int = 0
    turn: int = 0


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[list[int]], list[Rollout]]:
    seeds, sizes = st.integers(0, 10_000), st.integers(1, 9)
    prompts = draw(st.lists(st.builds(tokens, seeds, sizes), min_size=1, max_size=3))
    candidate = st.builds(
        Rollout,
        number=st.integers(0, len(prompts) - 1),
        completion=st.builds(tokens, seeds, st.integers(1, 24)),
        chunks=st.lists(st.integers(1, 10), min_size=1, max_size=3),
        fate=st.sampled_from(["finish", "finish", "cut", "drop", "open"]),
    )
    return prompts, draw(st.lists(candidate, min_size=1, max_size=6))


def play(overlap: Overlap, rollouts: list[Rollout], rng: Random, step_rate: float) -> list[Chunk]:
    """Add all chunks in random order with steps in between; each candidate meets its fate."""
    chunks, running = [], {f"t{i}": rollout for i, rollout in enumerate(rollouts)}
    while running:
        name = rng.choice(list(running))
        rollout = running[name]
        count = rollout.chunks[rollout.turn % len(rollout.chunks)]
        new = rollout.completion[rollout.came : rollout.came + count]
        overlap.add(name, rollout.number, new, start=rollout.came)
        rollout.came, rollout.turn = rollout.came + len(new), rollout.turn + 1
        dropped = rollout.fate == "drop" and rng.random() < 0.3
        if rollout.came == len(rollout.completion) or dropped:
            del running[name]
            if rollout.fate == "drop":
                overlap.drop(name)
            elif rollout.fate == "cut":
                rollout.completion = rollout.completion[: rng.randrange(len(rollout.completion) + 1)]
                overlap.finish(name, len(rollout.completion))
            elif rollout.fate == "finish":
                overlap.finish(name)
        while rng.random() < step_rate:
            chunks += overlap.step()
    return chunks


@pytest.mark.parametrize("name", SUPPORTED)
@settings(max_examples=20, deadline=None)
@given(
    rollouts(),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.4, 0.8]),
    st.sampled_from([1, 8, 50, 10_000]),
    st.sampled_from([1.0, 0.6]),
)
def test_however_the_tokens_come_the_logprobs_are_those_of_one_forward_pass(
    name: str,
    drawn: tuple[list[list[int]], list[Rollout]],
    seed: int,
    step_rate: float,
    batch_tokens: int,
    temperature: float,
) -> None:
    prompts, candidates = drawn
    model = small(name)
    overlap = Overlap(model, temperature=temperature, batch_tokens=batch_tokens, entropy=True)
    for number, prompt in enumerate(prompts):
        overlap.prompt(number, prompt)
    chunks = play(overlap, candidates, Random(seed), step_rate) + drained(overlap)
    kept = 0
    for i, candidate in enumerate(candidates):
        if candidate.fate == "drop":
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
        kept += length if candidate.fate == "open" else 0
    assert overlap.kept_tokens == kept + sum(len(prompt) - 1 for prompt in prompts)
    for number in range(len(prompts)):
        overlap.close(number)
    assert overlap.kept_tokens == overlap.waiting == 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_trained_model_with_long_answers_gives_the_same_logprobs(attention: str) -> None:
    model, rng = small("qwen3", attention) if attention == "eager" else tiny(), Random(5)
    prompts = [tokens(seed, rng.randrange(5, 29)) for seed in range(3)]
    longest = 30 if attention == "eager" else 256
    candidates = [
        Rollout(i % 3, tokens(100 + i, rng.randrange(1, longest)), [rng.choice([7, 16, 100])], "open")
        for i in range(12)
    ]
    overlap = Overlap(model, batch_tokens=500)
    for number, prompt in enumerate(prompts):
        overlap.prompt(number, prompt)
    play(overlap, candidates, rng, step_rate=0.3)
    for i, candidate in enumerate(candidates):
        expected = whole(model, prompts[candidate.number], candidate.completion)
        assert_equal(overlap.logprobs(f"t{i}"), expected)


def test_the_first_token_follows_the_last_of_the_prompt_even_if_that_is_all_of_it() -> None:
    model, overlap = small(), Overlap(small())
    overlap.prompt(0, [7])
    assert overlap.waiting == 0  # the token goes with each candidate
    overlap.add("a", 0, [3])
    [chunk] = overlap.step()
    assert_equal(chunk.logprobs, whole(model, [7], [3]))
    assert (chunk.trajectory_id, chunk.start, chunk.entropies) == ("a", 0, None)


class Watched:
    """Shapes of what a model is given: rows, new tokens, and tokens with the past."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.fed = 0
        self.handle = model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, _: Any, __: Any, given: dict[str, torch.Tensor]) -> None:
        rows, new = given["input_ids"].shape
        self.calls.append((rows, new, given["attention_mask"].shape[1]))
        self.fed += int(given["attention_mask"][:, -new:].sum())


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched(small())
    yield watched
    watched.handle.remove()


def test_no_token_is_forwarded_twice_and_the_last_one_not_at_all(watched: Watched) -> None:
    overlap = Overlap(small(), batch_tokens=40)
    overlap.prompt(0, tokens(0, 9))
    for start in range(0, 20, 4):
        for name in ("a", "b", "c"):
            overlap.add(name, 0, tokens(start, 4), start=start)
        drained(overlap)
    assert watched.fed == 8 + 3 * 20


@pytest.mark.parametrize("batch_tokens", [1, 10, 33, 200])
def test_a_forward_pass_keeps_to_its_token_budget_unless_a_row_is_longer_by_itself(
    watched: Watched, batch_tokens: int
) -> None:
    overlap = Overlap(small(), batch_tokens=batch_tokens)
    for number in range(4):
        overlap.prompt(number, tokens(number, 3 + 4 * number))
    for i in range(12):
        overlap.add(f"t{i}", i % 4, tokens(i, 2 + 3 * i))
        if i % 5 == 0:
            overlap.step()
    drained(overlap)
    assert all(rows * past_and_new <= batch_tokens for rows, _, past_and_new in watched.calls if rows > 1)
    assert all(new <= batch_tokens for _, new, _ in watched.calls)
    assert batch_tokens < 200 or max(rows for rows, _, _ in watched.calls) > 1


def test_those_with_most_waiting_go_first() -> None:
    fed = [Fed(tokens(0, count + 1)) for count in (2, 9, 5, 9)]
    assert [(item.waiting, len(row.inputs)) for item, row in next_batch(fed, 27)] == [(9, 9), (9, 9), (5, 5)]
    assert [(item.waiting, len(row.inputs)) for item, row in next_batch(fed, 4)] == [(9, 4)]
    assert next_batch([], 4) == []


def test_a_prompt_is_kept_once_and_every_candidate_for_itself() -> None:
    overlap = Overlap(small())
    overlap.prompt(0, tokens(0, 9))
    drained(overlap)
    assert overlap.kept_tokens == 8
    for name in ("a", "b"):
        overlap.add(name, 0, tokens(1, 6))
    drained(overlap)
    assert overlap.kept_tokens == 8 + 2 * 6


def test_a_dropped_candidate_frees_its_cache_and_what_it_waited_for() -> None:
    overlap = Overlap(small())
    overlap.prompt(0, tokens(0, 9))
    for name, count in (("a", 6), ("b", 4)):
        overlap.add(name, 0, tokens(1, count))
    drained(overlap)
    overlap.add("a", 0, tokens(1, 5))
    overlap.drop("a")
    assert (overlap.kept_tokens, overlap.waiting) == (8 + 4, 0)
    assert "a" not in overlap
    assert "b" in overlap


def test_a_finished_candidate_frees_its_cache_when_all_of_it_is_computed_and_the_prompt_goes_with_the_last() -> None:
    model, overlap = small(), Overlap(small())
    prompt, first, second = tokens(0, 9), tokens(1, 6), tokens(2, 7)
    overlap.prompt(0, prompt)
    overlap.add("a", 0, first)
    drained(overlap)
    overlap.add("b", 0, second)
    overlap.finish("a")
    overlap.finish("b")
    overlap.close(0)
    assert overlap.kept_tokens == 8
    drained(overlap)
    assert overlap.kept_tokens == 0
    assert_equal(overlap.logprobs("a"), whole(model, prompt, first))
    assert_equal(overlap.logprobs("b"), whole(model, prompt, second))


def test_closing_a_prompt_that_nothing_came_of_forwards_nothing(watched: Watched) -> None:
    overlap = Overlap(small())
    overlap.prompt(0, tokens(0, 9))
    overlap.add("a", 0, [1])
    overlap.close(0)
    assert overlap.step() == []
    assert (watched.calls, overlap.waiting, "a" in overlap) == ([], 0, False)


def test_a_cut_trajectory_loses_what_was_computed_past_its_end() -> None:
    model, overlap = small(), Overlap(small(), entropy=True)
    overlap.prompt(0, [1, 2, 3])
    overlap.add("a", 0, tokens(1, 10))
    drained(overlap)
    overlap.add("a", 0, tokens(2, 5))
    overlap.finish("a", 7)
    assert (overlap.waiting, overlap.kept_tokens) == (0, 2)
    assert_equal(overlap.logprobs("a"), whole(model, [1, 2, 3], tokens(1, 7)))
    assert len(overlap.entropies("a")) == 7


def test_what_is_computed_has_no_gradient_and_can_stand_in_a_loss() -> None:
    model, overlap = small(), Overlap(small())
    overlap.prompt(0, [1, 2])
    overlap.add("a", 0, [3, 4, 5])
    old = overlap.logprobs("a")
    assert not old.requires_grad
    assert old.dtype == torch.float32
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 1:-1]
    new = logits.log_softmax(-1)[range(3), [3, 4, 5]]
    (new - old).exp().sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    model.zero_grad()


def test_a_forward_pass_that_fails_changes_nothing() -> None:
    model, overlap = small(), Overlap(small())
    overlap.prompt(0, [1, 2, 3])
    overlap.add("a", 0, [4, 5])

    def fail(*_: Any) -> None:
        raise MemoryError

    for _ in range(2):  # over the prompt, over the candidate
        handle = model.register_forward_hook(fail)
        waiting, kept = overlap.waiting, overlap.kept_tokens
        with pytest.raises(MemoryError):
            overlap.step()
        handle.remove()
        assert (overlap.waiting, overlap.kept_tokens) == (waiting, kept)
        overlap.step()
    assert_equal(overlap.logprobs("a"), whole(model, [1, 2, 3], [4, 5]))
