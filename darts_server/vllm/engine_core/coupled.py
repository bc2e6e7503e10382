"""Coupled sampling: the noise of a token depends on its request's stream and its position, and on nothing else.

The token at a position has the largest p / e, where p is its probability, and e is exponential noise of (stream,
position, token). That is an exact sample of p. A draft is accepted while it equals these tokens. So drafts, other
requests and resumption change no token, up to rounding of the logits.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from darts_server.vllm.engine_core.plugin import COUPLED, SEED

LOW_BITS = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2 ** 64 divided by the golden ratio: SplitMix64's step."""
ODD = 0x21F0AAAD
OTHER_ODD = 0x735A2D97
"""Multipliers of the hash. Below 2 ** 31, so that no product with 32 bits overflows."""
LARGEST = 1 - 2.0**-24
"""Largest float32 below 1."""
BLOCK_ON_CPU = 1 << 17
BLOCK = 1 << 24
"""Numbers that are hashed at once: more leave the cache of a CPU, or would take 128 MB of each temporary tensor."""

Unsigned = NDArray[np.uint64]


class StepStreams(dict[int, Any]):
    """The requests of a step. vLLM passes it to its samplers in place of random generators, so for vLLM it is empty.

    ``streams``: uint64 [requests]. ``next_positions``: int64 [requests], in the sequence. ``draft_counts``: int64
    [requests], the number of drafted tokens in this step.
    """

    def __init__(self, streams: Unsigned, next_positions: NDArray[np.int64], draft_counts: NDArray[np.int64]) -> None:
        super().__init__()
        self.streams = streams
        self.next_positions = next_positions
        self.draft_counts = draft_counts


def stream_of(request_id: str, seed: int | None) -> int:
    # vLLM makes the id of a request random and unique.
    text = f"name {request_id}" if seed is None else f"seed {seed}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def noise_keys(streams: Unsigned, positions: NDArray[np.int64]) -> torch.Tensor:
    """Return the key of the noise at each position: int64 [positions, 3], of 32 bits each."""
    first = _hash(_hash(streams) + positions.astype(np.uint64) * np.uint64(GOLDEN))
    second = _hash(first + np.uint64(GOLDEN))
    words = np.stack([first & LOW_BITS, first >> 32, second & LOW_BITS], axis=1)
    return torch.from_numpy(words.astype(np.int64))


def _hash(values: Unsigned) -> Unsigned:
    # The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def exponential_noise(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return exponential noise for ``size`` tokens under each key: float32 [keys, size]."""
    tokens = torch.arange(size, device=keys.device)
    # Hash each token to 32 bits. Each round mixes in another word of the key.
    first, second, third = keys.unsqueeze(-1).unbind(1)
    bits = tokens ^ first
    bits = ((bits ^ (bits >> 16)) * ODD) & LOW_BITS
    bits = bits ^ second
    bits = ((bits ^ (bits >> 15)) * OTHER_ODD) & LOW_BITS
    bits = bits ^ third
    bits = ((bits ^ (bits >> 15)) * ODD) & LOW_BITS
    bits = bits ^ (bits >> 15)
    # Small numbers keep all of their bits, so the noise is right for tokens with a probability of 1e-9, too.
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp(max=LARGEST))


@torch.compile(dynamic=True, backend=current_platform.simple_compile_backend)
def _sample_block(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    # The token with the smallest noise / p wins an exponential race, with probability p.
    return probs.div(exponential_noise(keys, probs.shape[1])).argmax(-1)


def sample(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample a token for each key: int64 [keys]. ``probs``: float32 [keys, vocabulary]."""
    block_size = BLOCK_ON_CPU if probs.device.type == "cpu" else BLOCK
    rows = max(1, block_size // probs.shape[1])
    blocks = zip(probs.split(rows), keys.to(probs.device).split(rows), strict=True)
    return torch.cat([_sample_block(*block) for block in blocks])


def sample_after_drafts(probs: torch.Tensor, streams: StepStreams) -> torch.Tensor:
    """Sample the token after all drafted tokens of each request: int64 [requests]."""
    return sample(probs, noise_keys(streams.streams, streams.next_positions + streams.draft_counts))


def verify_drafts(
    draft_tokens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    longest: int,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    streams: StepStreams,
) -> torch.Tensor:
    """Sample at all drafted positions, and return the tokens that a step emits: int32 [requests, longest + 1].

    Each request emits sampled tokens up to the first that differs from its draft. If none differs, its bonus token is
    the last. The rest is -1.

    ``draft_tokens``: [tokens], of all requests in order. ``bonus_tokens``: [requests, 1]. ``longest``: the most tokens
    of a draft. ``logits``: [tokens, vocabulary], of the distributions that are sampled from. ``temperature``:
    [requests], 0 for greedy requests, or None if all are greedy.
    """
    # Request of each drafted token, and the token's place in the draft.
    counts = streams.draft_counts
    requests = np.repeat(np.arange(counts.size), counts)
    first_tokens = np.cumsum(counts) - counts
    places = np.arange(requests.size) - np.repeat(first_tokens, counts)
    row = torch.from_numpy(requests).to(logits.device)
    column = torch.from_numpy(places).to(logits.device)

    # Sample a token at each drafted position.
    sampled = logits.argmax(-1)
    if temperature is not None:
        keys = noise_keys(streams.streams[requests], streams.next_positions[requests] + places)
        random = sample(logits.softmax(-1, dtype=torch.float32), keys)
        sampled = torch.where(temperature[row] == 0, sampled, random)

    # Write the sampled tokens into rows, and the bonus token behind them.
    shape = (counts.size, longest + 1)
    emitted = torch.full(shape, rejection_sampler.PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=logits.device)
    emitted[row, column] = sampled.int()
    all_rows = torch.arange(counts.size, device=logits.device)
    bonus_column = torch.from_numpy(counts).to(logits.device)
    emitted[all_rows, bonus_column] = bonus_tokens.flatten().int()

    # Remove the tokens behind the first token that differs from its draft.
    is_right = torch.zeros(shape, dtype=torch.int32, device=logits.device)
    is_right[row, column] = (sampled == draft_tokens).int()
    accepted = is_right.cumprod(1).sum(1, keepdim=True)
    is_behind = torch.arange(longest + 1, device=logits.device) > accepted
    return emitted.masked_fill_(is_behind, rejection_sampler.PLACEHOLDER_TOKEN_ID)


def step_streams(runner: Any, draft_counts: Sequence[int] | None) -> StepStreams:
    batch = runner.input_batch
    count = batch.num_reqs
    streams = np.zeros(count, np.uint64)
    for place, request_id in enumerate(batch.req_ids):
        state = runner.requests[request_id]
        # Hash once, and not in each step.
        if not hasattr(state, "darts_stream"):
            params = state.sampling_params
            state.darts_stream = stream_of(request_id, (params.extra_args or {}).get(SEED, params.seed))
        streams[place] = state.darts_stream
    counts = np.zeros(count, np.int64) if draft_counts is None else np.array(draft_counts, np.int64)
    return StepStreams(streams, batch.num_tokens_no_spec[:count].astype(np.int64), counts)


def bind_sampling() -> None:
    """Let the model runners of this process couple their sampling if vLLM's configuration has :data:`COUPLED`."""
    vllms_sample = GPUModelRunner._sample
    vllms_random_sample = topk_topp_sampler.random_sample
    vllms_rejection_sample = rejection_sampler.rejection_sample

    def sample_step(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if COUPLED in self.vllm_config.additional_config:
            draft_counts = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
            # vLLM passes the generators on to the two functions below.
            self.input_batch.sampling_metadata.generators = step_streams(self, draft_counts)
            # FlashInfer and vLLM's other samplers make their own noise.
            sampler = self.sampler.topk_topp_sampler
            sampler.forward = sampler.forward_native
        return vllms_sample(self, logits, spec_decode_metadata)

    def random_sample(
        probs: torch.Tensor,
        generators: Any,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        if isinstance(generators, StepStreams):
            return sample_after_drafts(probs, generators)
        return vllms_random_sample(probs, generators, *more, **options)

    def rejection_sample(
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: Any,
        **options: Any,
    ) -> torch.Tensor:
        # vLLM calls this by position and by name, so the parameters have vLLM's names.
        if isinstance(sampling_metadata.generators, StepStreams):
            temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
            return verify_drafts(
                draft_token_ids,
                bonus_token_ids,
                max_spec_len,
                target_logits,
                temperature,
                sampling_metadata.generators,
            )
        return vllms_rejection_sample(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            **options,
        )

    GPUModelRunner._sample = sample_step  # type: ignore[method-assign]
    topk_topp_sampler.random_sample = random_sample
    rejection_sampler.rejection_sample = rejection_sample  # type: ignore[assignment]
