"""The noise of coupled sampling is exponential and independent, and drafts change no token."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from darts_server.vllm.engine_core import coupled
from darts_server.vllm.engine_core.coupled import (
    StepStreams,
    exponential_noise,
    noise_keys,
    sample,
    sample_after_drafts,
    step_streams,
    stream_of,
    verify_drafts,
)
from darts_server.vllm.engine_core.plugin import SEED
from darts_server.vllm.flags import can_compile

BINS = 16
VOCABULARY = 40


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Nothing is compiled, which takes ten seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def z_of_chi_square(counts: Any, expected: Any) -> float:
    """Return by how many standard deviations a chi-square statistic is too large."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def uniform(seeds: range, positions: range, size: int) -> np.ndarray[Any, Any]:
    """Return the noise as numbers from 0 to 1: [seeds, positions, size]."""
    streams = np.array([stream_of("", seed) for seed in seeds], np.uint64)
    keys = noise_keys(np.repeat(streams, len(positions)), np.tile(np.array(positions), len(seeds)))
    values = torch.exp(-exponential_noise(keys, size).double())
    return values.reshape(len(seeds), len(positions), size).numpy()


def test_the_noise_is_exponential() -> None:
    values = uniform(range(64), range(64), 256)
    counts, _ = np.histogram(values, bins=256, range=(0, 1))
    assert abs(z_of_chi_square(counts, values.size / 256)) < 4.5
    noise = -np.log(values)
    assert abs(noise.mean() - 1) < 4.5 / np.sqrt(noise.size)


def test_small_noise_is_right_so_that_improbable_tokens_are_sampled() -> None:
    keys = noise_keys(np.arange(30, dtype=np.uint64), np.zeros(30, np.int64))
    noise = torch.cat([exponential_noise(key, 500_000) for key in keys.split(1)])
    for limit in (1e-4, 1e-5, 1e-6):
        expected = noise.numel() * limit
        assert abs(int((noise < limit).sum()) - expected) < 4.5 * np.sqrt(expected)
    assert noise.isfinite().all()
    assert noise.min() > 0


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 64, 128])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
def test_noise_of_neighbours_is_independent(axis: int, distance: int) -> None:
    sizes = [32, 32, 32]
    sizes[axis] = 256
    seeds, positions, size = sizes
    values = uniform(range(7, 7 + seeds), range(100, 100 + positions), size)
    bins = (np.moveaxis(values, axis, 0) * BINS).astype(int)
    pairs = bins[:-distance] * BINS + bins[distance:]
    counts = np.bincount(pairs.ravel(), minlength=BINS**2)
    assert abs(z_of_chi_square(counts, counts.sum() / BINS**2)) < 4.5


def test_each_bit_of_stream_position_and_token_changes_half_of_the_noise() -> None:
    generator = np.random.default_rng(0)
    streams = generator.integers(0, 2**64, 500, dtype=np.uint64)
    positions = generator.integers(0, 2**17, 500)
    base = exponential_noise(noise_keys(streams, positions), 64)
    for bit in range(64):
        other = exponential_noise(noise_keys(streams ^ np.uint64(1 << bit), positions), 64)
        assert abs(float((base < other).double().mean()) - 0.5) < 4.5 * 0.5 / np.sqrt(base.numel())
    for bit in range(17):
        other = exponential_noise(noise_keys(streams, positions ^ (1 << bit)), 64)
        assert abs(float(np.corrcoef(base.ravel(), other.ravel())[0, 1])) < 4.5 / np.sqrt(base.numel())


def test_tokens_have_the_frequencies_of_vllms_sampler() -> None:
    logits = 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    probs = logits.softmax(-1).expand(50_000, -1).contiguous()
    expected = probs[0].double().numpy() * len(probs)
    keys = noise_keys(np.repeat(np.arange(500, dtype=np.uint64), 100), np.tile(np.arange(100), 500))
    torch.manual_seed(1)
    is_common = expected > 10
    for sampled in (sample(probs, keys), random_sample(probs.clone(), {})):
        counts = np.bincount(sampled.numpy(), minlength=VOCABULARY)
        assert abs(z_of_chi_square(counts[is_common], expected[is_common])) < 4.5


def test_tokens_without_probability_are_never_sampled() -> None:
    probs = torch.zeros(5000, 64)
    probs[:, 5] = 1.0
    sampled = sample(probs, noise_keys(np.arange(5000, dtype=np.uint64), np.zeros(5000, np.int64)))
    assert (sampled == 5).all()


def test_blocks_and_compilation_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.randn(300, VOCABULARY).softmax(-1)
    keys = noise_keys(np.arange(300, dtype=np.uint64), np.arange(300))
    sampled = sample(probs, keys)
    monkeypatch.setattr(coupled, "BLOCK_ON_CPU", 3 * VOCABULARY)
    assert torch.equal(sample(probs, keys), sampled)
    if can_compile():
        with torch.compiler.set_stance("default"):
            assert torch.equal(sample(probs, keys), sampled)


# --- drafts -------------------------------------------------------------------------


def step_by_step(logits: torch.Tensor, stream: int, position: int, *, greedy: bool) -> list[int]:
    """Return the tokens at the positions of ``logits``, sampled one at a time."""
    tokens = []
    for place, row in enumerate(logits):
        here = StepStreams(np.array([stream], np.uint64), np.array([position + place]), np.zeros(1, np.int64))
        sampled = row.argmax() if greedy else sample_after_drafts(row.softmax(-1).unsqueeze(0), here)
        tokens.append(int(sampled))
    return tokens


@pytest.mark.parametrize("kind", ["random", "greedy", "mixed"])
def test_a_step_emits_the_tokens_of_single_steps_up_to_the_first_wrong_draft(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    random = np.random.default_rng(3)
    for _ in range(30):
        counts = random.integers(0, 5, 6)
        counts[0] = 4
        streams = StepStreams(random.integers(0, 2**63, 6).astype(np.uint64), random.integers(5, 90, 6), counts)
        is_greedy = {"random": np.zeros(6), "greedy": np.ones(6), "mixed": random.integers(0, 2, 6)}[kind].astype(bool)

        drafts, distributions, following, expected = [], [], [], []
        for row in range(6):
            logits = 2 * torch.randn(counts[row] + 1, VOCABULARY, generator=generator)
            tokens = step_by_step(
                logits, int(streams.streams[row]), int(streams.next_positions[row]), greedy=bool(is_greedy[row])
            )
            right = int(random.integers(0, counts[row] + 1))
            draft = [*tokens[:right], *((token + 1) % VOCABULARY for token in tokens[right : counts[row]])]
            if right < counts[row] and random.random() < 0.3:
                draft[-1] = -1
            drafts += draft
            distributions.append(logits[:-1])
            following.append(tokens[-1:])
            emitted = tokens[: right + 1]
            expected.append(emitted + [-1] * (5 - len(emitted)))

        temperature = None if kind == "greedy" else torch.tensor(np.where(is_greedy, 0.0, 1.0))
        emitted_all = verify_drafts(
            torch.tensor(drafts, dtype=torch.int32),
            torch.tensor(following, dtype=torch.int32),
            4,
            torch.cat(distributions),
            temperature,
            streams,
        )
        assert emitted_all.tolist() == expected


# --- streams ------------------------------------------------------------------------


def test_a_stream_is_of_the_seed_or_of_the_name_of_a_request() -> None:
    assert stream_of("one", 3) == stream_of("other", 3)
    assert len({stream_of("one", None), stream_of("other", None), stream_of("one", 0), stream_of("one", -1)}) == 4


def runner_of(**requests: SimpleNamespace) -> SimpleNamespace:
    states = {name: SimpleNamespace(sampling_params=params) for name, params in requests.items()}
    batch = SimpleNamespace(
        num_reqs=len(states), req_ids=list(states), num_tokens_no_spec=np.array([9, 12, 0, 0], np.int32)
    )
    return SimpleNamespace(requests=states, input_batch=batch)


def test_a_resumed_request_keeps_its_first_seed() -> None:
    first = SimpleNamespace(seed=5, extra_args=None)
    resumed = SimpleNamespace(seed=77, extra_args={SEED: 5})
    runner = runner_of(first=first, resumed=resumed)
    for drafts in (None, [2, 0]):
        streams = step_streams(runner, drafts)
        assert streams.streams.tolist() == [stream_of("", 5)] * 2
        assert streams.next_positions.tolist() == [9, 12]
        assert streams.draft_counts.tolist() == (drafts or [0, 0])
    assert not streams, "vLLM takes it for no generators"
