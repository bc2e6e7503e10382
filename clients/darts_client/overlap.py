"""A trainer's log-probs while the rollout still runs. Needs the extra `darts-client[overlap]`.

The forward pass over tokens that have arrived overlaps with the generation of later tokens (DARTS, arXiv 2605.30859,
token-level streaming).

```python
overlap = Overlap(model.eval(), temperature=1.0)
for number, token_ids in enumerate(prompts):
    overlap.add_prompt(number, token_ids)
with client.stream_tokens(prompts, group_size=8, max_tokens=512) as events:
    for event in events:
        overlap.add_event(event)
        overlap.step()
old = {trajectory_id: overlap.logprobs(trajectory_id) for trajectory_id in returned}
```
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from torch import Tensor

    from ._forward import CandidateSequence, PromptSequence, TokenSequence, check_supported, forward, next_batch
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"{exc.msg}: darts_client.overlap needs darts-client[overlap]", name=exc.name) from exc

from ._models import Delta, Discard, Done, Event, GroupEvent, TrajectoryEvent

# The logits take the most memory: 2.5 GB in bfloat16 if all tokens are new and the vocabulary has 150,000.
_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Result of one step for the tokens `start` .. `start + len(logprobs)` of a trajectory.

    Log-probs and entropies are in nats, [tokens], float32, on the model's device.
    """

    trajectory_id: str
    start: int
    logprobs: Tensor
    entropies: Tensor | None


class Overlap:
    """Log-probs of candidates that are still being generated. Not thread-safe.

    Each token is forwarded once, because keys and values are cached. The candidates of a prompt share its cache. Create
    an `Overlap` for each batch of prompts and each version of the weights.

    The log-probs have no gradient: use them for the old policy or a reference. They equal the log-probs of one forward
    pass over the whole sequence up to rounding.

    Args:
        model: causal LM of transformers in eval mode, with full attention in every layer; ValueError for other models.
        temperature: divides the logits.
        entropy: whether to compute the entropy of each token's distribution.
        batch_tokens: limit of rows times (longest past + most new tokens) in a forward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        batch_tokens: int = _BATCH_TOKENS,
    ) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a number above 0, got {temperature}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        check_supported(model)
        self._model = model
        self._temperature = temperature
        self._with_entropy = entropy
        self._batch_tokens = batch_tokens
        self._vocabulary_size = int(model.get_input_embeddings().num_embeddings)
        self._prompts: dict[int, PromptSequence] = {}
        self._candidates: dict[str, CandidateSequence] = {}
        self._dropped: set[str] = set()

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._candidates

    @property
    def pending_tokens(self) -> int:
        """Number of tokens of prompts and candidates that `step` can forward now."""
        return sum(sequence.num_pending for sequence in self._sequences())

    @property
    def cached_tokens(self) -> int:
        """Number of tokens whose keys and values are cached."""
        return sum(len(sequence.cache) for sequence in self._sequences() if sequence.cache is not None)

    def add_prompt(self, number: int, token_ids: Sequence[int]) -> None:
        """Add a prompt. `step` can forward it before its candidates arrive."""
        if number in self._prompts:
            raise ValueError(f"prompt {number} was already added")
        if not token_ids:
            raise ValueError(f"prompt {number} has no tokens")
        self._prompts[number] = PromptSequence(self._checked_tokens(token_ids))

    def add_tokens(
        self,
        trajectory_id: str,
        number: int,
        token_ids: Sequence[int],
        start: int | None = None,
    ) -> None:
        """Append tokens that a candidate of prompt `number` has generated, from position `start` of its completion.

        Raises:
            ValueError: tokens are missing or repeated, or the prompt or trajectory accepts none. Nothing has changed.
        """
        self._check_not_dropped(trajectory_id)
        tokens = self._checked_tokens(token_ids)
        candidate = self._candidates.get(trajectory_id)
        length = 0 if candidate is None else candidate.length
        if start is not None and start != length:
            problem = "are missing" if start > length else "are repeated"
            raise ValueError(f"trajectory {trajectory_id!r}: tokens {problem}: it has {length}, these start at {start}")

        if candidate is None:
            prompt = self._get_prompt(number)
            if prompt.is_closed:
                raise ValueError(f"prompt {number} is closed, trajectory {trajectory_id!r} cannot be added")
            # The logits of the prompt's last token score the first generated token.
            last_token = prompt.tokens[-1:]
            candidate = CandidateSequence(
                last_token,
                trajectory_id=trajectory_id,
                number=number,
                prompt=prompt,
            )
            prompt.candidates.append(candidate)
            self._candidates[trajectory_id] = candidate
        elif candidate.number != number:
            raise ValueError(f"trajectory {trajectory_id!r} belongs to prompt {candidate.number}, not {number}")
        elif candidate.is_finished:
            raise ValueError(f"trajectory {trajectory_id!r} is finished")
        candidate.tokens += tokens

    def finish(self, trajectory_id: str, length: int | None = None) -> None:
        """Finish a trajectory with its first `length` tokens. `step` forwards pending tokens, and frees the cache."""
        candidate = self._get_candidate(trajectory_id)
        if candidate.is_finished:
            raise ValueError(f"trajectory {trajectory_id!r} is finished")
        if length is None:
            length = candidate.length
        if not 0 <= length <= candidate.length:
            raise ValueError(f"trajectory {trajectory_id!r}: length is {length}, but {candidate.length} tokens came")
        candidate.finish(length)

    def drop(self, trajectory_id: str) -> None:
        """Remove a trajectory with all its results. It cannot be added again."""
        candidate = self._get_candidate(trajectory_id)
        del self._candidates[trajectory_id]
        self._dropped.add(trajectory_id)
        candidate.prompt.candidates.remove(candidate)
        candidate.prompt.drop_cache_if_unused()

    def close_prompt(self, number: int) -> None:
        """Drop the candidates of a prompt that are not finished, and accept no new candidates."""
        prompt = self._get_prompt(number)
        for candidate in list(prompt.candidates):
            if not candidate.is_finished:
                self.drop(candidate.trajectory_id)
        prompt.is_closed = True
        prompt.drop_cache_if_unused()

    def add_event(self, event: Event) -> None:
        """Apply an event of `stream_tokens`: add tokens, finish or drop a trajectory, or close a prompt."""
        match event:
            case Delta():
                self.add_tokens(
                    event.trajectory_id,
                    event.number,
                    event.token_ids,
                    start=event.start,
                )
            case TrajectoryEvent():
                self.finish(event.trajectory_id, len(event.token_ids))
            case Discard():
                self._discard(event.trajectory_id)
            case GroupEvent(group) if group.number is not None:
                self.close_prompt(group.number)
            case Done():
                for prompt in event.unfinished:
                    self.close_prompt(prompt.number)

    def add_raw_event(self, name: str, data: Mapping[str, Any]) -> None:
        """Apply a server-sent event of a token stream from its name and its JSON."""
        match name:
            case "delta":
                self.add_tokens(
                    data["trajectory_id"],
                    data["number"],
                    data["token_ids"],
                    start=data["start"],
                )
            case "trajectory":
                self.finish(data["trajectory_id"], data["length"])
            case "discard":
                self._discard(data["trajectory_id"])
            case "group":
                self.close_prompt(data["number"])
            case "done":
                for prompt in data["unfinished"]:
                    self.close_prompt(prompt["number"])

    def step(self) -> list[Chunk]:
        """Forward one batch of pending tokens, and return its log-probs. If that fails, nothing has changed.

        Prompts are forwarded first and have no log-probs, so loop until `pending_tokens` is 0, not until the result is
        empty.
        """
        prompts = [prompt for prompt in self._prompts.values() if prompt.num_pending]
        candidates = [candidate for candidate in self._candidates.values() if candidate.num_pending]
        # Candidates attend to the cache of their prompt, so prompts are first.
        batch = next_batch(prompts or candidates, self._batch_tokens)
        if not batch:
            return []
        rows = [row for _, row in batch]
        results = forward(
            self._model,
            rows,
            temperature=self._temperature,
            entropy=self._with_entropy,
        )

        chunks = []
        for (sequence, _), result in zip(batch, results, strict=True):
            if isinstance(sequence, CandidateSequence):
                start = sequence.num_forwarded
                chunks.append(Chunk(sequence.trajectory_id, start, result.logprobs, result.entropies))
            sequence.add_result(result)
        return chunks

    def logprobs(self, trajectory_id: str) -> Tensor:
        """Return the natural log-probs of all its tokens: [tokens], float32. Pending tokens are forwarded first."""
        candidate = self._forward_all(trajectory_id)
        return candidate.concat_values(candidate.logprobs)

    def entropies(self, trajectory_id: str) -> Tensor:
        """Return the entropies of the tokens' distributions at the temperature: [tokens], in nats, float32."""
        if not self._with_entropy:
            raise ValueError("entropies are not computed: create the Overlap with entropy=True")
        candidate = self._forward_all(trajectory_id)
        return candidate.concat_values(candidate.entropies)

    def _discard(self, trajectory_id: str) -> None:
        # A candidate that is discarded before its first delta was never added.
        if trajectory_id in self:
            self.drop(trajectory_id)

    def _forward_all(self, trajectory_id: str) -> CandidateSequence:
        candidate = self._get_candidate(trajectory_id)
        while candidate.num_pending:
            self.step()
        return candidate

    def _sequences(self) -> list[TokenSequence]:
        return [*self._prompts.values(), *self._candidates.values()]

    def _get_candidate(self, trajectory_id: str) -> CandidateSequence:
        self._check_not_dropped(trajectory_id)
        if trajectory_id not in self._candidates:
            raise ValueError(f"unknown trajectory {trajectory_id!r}: add its first tokens before")
        return self._candidates[trajectory_id]

    def _check_not_dropped(self, trajectory_id: str) -> None:
        if trajectory_id in self._dropped:
            raise ValueError(f"trajectory {trajectory_id!r} was dropped")

    def _get_prompt(self, number: int) -> PromptSequence:
        if number not in self._prompts:
            raise ValueError(f"unknown prompt {number}: add it with add_prompt() before")
        return self._prompts[number]

    def _checked_tokens(self, token_ids: Sequence[int]) -> list[int]:
        # On a GPU an id outside the vocabulary would only fail an assertion without a message.
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary_size:
                raise ValueError(f"token id {token_id} is not in the model's vocabulary of {self._vocabulary_size}")
        return list(token_ids)
