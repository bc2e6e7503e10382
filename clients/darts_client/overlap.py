"""A trainer's log-probs while the rollout still runs: needs the extra `darts-client[overlap]`.

The forward pass over tokens that have arrived overlaps with the generation of the rest (DARTS, arXiv 2605.30859,
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
    """The result of one step for a trajectory: its tokens `start` .. `start + len(logprobs)`.

    `logprobs` and `entropies` are in nats, float32, on the model's device; `entropies` is None unless requested.
    """

    trajectory_id: str
    start: int
    logprobs: Tensor
    entropies: Tensor | None


class Overlap:
    """Log-probs, under the present weights of a model, of candidates that are still being generated.

    The keys and values of each candidate are cached, so that each token is forwarded once; those of a prompt are
    computed once and shared. `drop`, `close_prompt`, and the last step after `finish` free them. Make an `Overlap` for
    each batch of prompts and each version of the weights.

    The log-probs have no gradient: they are those of the old policy or of a reference, not those to differentiate. They
    equal those of one forward pass over the whole sequence up to rounding.

    `model` is a causal LM of transformers in eval mode with full attention in every layer; ValueError for any other.
    `temperature` divides the logits. With `entropy` the entropy of each token's distribution is computed too.
    `batch_tokens` bounds a forward pass: rows times (longest past + most new tokens); a single row may have that many
    new tokens.

    Not thread-safe.
    """

    def __init__(
        self, model: Any, *, temperature: float = 1.0, entropy: bool = False, batch_tokens: int = _BATCH_TOKENS
    ) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a number above 0, got {temperature}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        check_supported(model)
        self._model = model
        self._temperature = temperature
        self._entropy = entropy
        self._batch_tokens = batch_tokens
        self._vocabulary_size = int(model.get_input_embeddings().num_embeddings)
        self._prompts: dict[int, PromptSequence] = {}
        self._candidates: dict[str, CandidateSequence] = {}
        self._dropped: set[str] = set()

    def __contains__(self, trajectory_id: str) -> bool:
        """Return whether the trajectory was added and not dropped."""
        return trajectory_id in self._candidates

    @property
    def pending_tokens(self) -> int:
        """Tokens, of prompts too, that `step` can forward now."""
        return sum(sequence.num_pending for sequence in self._sequences())

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are cached; those of a prompt count once."""
        return sum(len(sequence.cache) for sequence in self._sequences() if sequence.cache is not None)

    def add_prompt(self, number: int, token_ids: Sequence[int]) -> None:
        """Add a prompt; it can be forwarded before its candidates arrive."""
        if number in self._prompts:
            raise ValueError(f"prompt {number} was already added")
        if not token_ids:
            raise ValueError(f"prompt {number} has no tokens")
        self._prompts[number] = PromptSequence(self._check_tokens(token_ids))

    def add_tokens(self, trajectory_id: str, number: int, token_ids: Sequence[int], start: int | None = None) -> None:
        """Append tokens that a candidate of prompt `number` has generated.

        `start` is the position of the first of them, and is checked. Raises ValueError, and changes nothing, for tokens
        that are missing or repeated, an unknown or closed prompt, and a trajectory that is finished or dropped.
        """
        self._check_not_dropped(trajectory_id)
        tokens = self._check_tokens(token_ids)
        candidate = self._candidates.get(trajectory_id)
        length = 0 if candidate is None else candidate.length
        if start is not None and start != length:
            problem = "are missing" if start > length else "are repeated"
            raise ValueError(f"trajectory {trajectory_id!r}: tokens {problem}: it has {length}, these start at {start}")
        if candidate is None:
            candidate = self._add_candidate(trajectory_id, number)
        elif candidate.number != number:
            raise ValueError(f"trajectory {trajectory_id!r} belongs to prompt {candidate.number}, not {number}")
        elif candidate.is_finished:
            raise ValueError(f"trajectory {trajectory_id!r} is finished")
        candidate.tokens += tokens

    def finish(self, trajectory_id: str, length: int | None = None) -> None:
        """Finish a trajectory with its first `length` tokens, or all of them.

        Its pending tokens are still forwarded; then its keys and values are freed.
        """
        candidate = self._candidate(trajectory_id)
        if candidate.is_finished:
            raise ValueError(f"trajectory {trajectory_id!r} is finished")
        if length is not None and not 0 <= length <= candidate.length:
            raise ValueError(f"trajectory {trajectory_id!r}: length is {length}, but {candidate.length} tokens came")
        candidate.finish(candidate.length if length is None else length)

    def drop(self, trajectory_id: str) -> None:
        """Remove a trajectory with everything computed for it. It cannot be added again."""
        candidate = self._candidate(trajectory_id)
        del self._candidates[trajectory_id]
        self._dropped.add(trajectory_id)
        candidate.prompt.candidates.remove(candidate)
        candidate.prompt.drop_cache_if_unused()

    def close_prompt(self, number: int) -> None:
        """Drop the candidates of a prompt that are not finished, and accept no more."""
        prompt = self._prompt(number)
        for candidate in [candidate for candidate in prompt.candidates if not candidate.is_finished]:
            self.drop(candidate.trajectory_id)
        prompt.is_closed = True
        prompt.drop_cache_if_unused()

    def add_event(self, event: Event) -> None:
        """Apply an event of `stream_tokens`: tokens are added, trajectories finished or dropped, prompts closed."""
        match event:
            case Delta():
                self.add_tokens(event.trajectory_id, event.number, event.token_ids, start=event.start)
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
        """Apply a server-sent event of a token stream, given by its name and its JSON."""
        match name:
            case "delta":
                self.add_tokens(data["trajectory_id"], data["number"], data["token_ids"], start=data["start"])
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
        """Forward one batch of pending tokens and return the log-probs that it computed.

        Prompts are forwarded first and return none, so loop until `pending_tokens` is 0, not until the result is empty.
        If the forward pass fails nothing has changed.
        """
        prompts = [prompt for prompt in self._prompts.values() if prompt.num_pending]
        candidates = [candidate for candidate in self._candidates.values() if candidate.num_pending]
        batch = next_batch(prompts or candidates, self._batch_tokens)
        if not batch:
            return []
        rows = [row for _, row in batch]
        results = forward(self._model, rows, temperature=self._temperature, entropy=self._entropy)
        chunks = []
        for (sequence, _), result in zip(batch, results, strict=True):
            if isinstance(sequence, CandidateSequence):
                start = sequence.num_forwarded
                chunks.append(Chunk(sequence.trajectory_id, start, result.logprobs, result.entropies))
            sequence.add_result(result)
        return chunks

    def logprobs(self, trajectory_id: str) -> Tensor:
        """Return the natural log-probs [tokens], float32, of all tokens added; pending ones are forwarded first."""
        candidate = self._forward_all(trajectory_id)
        return candidate.concat(candidate.logprobs)

    def entropies(self, trajectory_id: str) -> Tensor:
        """Return the entropies [tokens], in nats, float32, of the distributions of these tokens, at the temperature."""
        if not self._entropy:
            raise ValueError("entropies are not computed: make the Overlap with entropy=True")
        candidate = self._forward_all(trajectory_id)
        return candidate.concat(candidate.entropies)

    def _discard(self, trajectory_id: str) -> None:
        if trajectory_id in self:  # else it was discarded before its first delta
            self.drop(trajectory_id)

    def _forward_all(self, trajectory_id: str) -> CandidateSequence:
        candidate = self._candidate(trajectory_id)
        while candidate.num_pending:
            self.step()
        return candidate

    def _sequences(self) -> list[TokenSequence]:
        return [*self._prompts.values(), *self._candidates.values()]

    def _add_candidate(self, trajectory_id: str, number: int) -> CandidateSequence:
        prompt = self._prompt(number)
        if prompt.is_closed:
            raise ValueError(f"prompt {number} is closed, trajectory {trajectory_id!r} cannot be added")
        candidate = CandidateSequence(prompt.tokens[-1:], trajectory_id=trajectory_id, number=number, prompt=prompt)
        prompt.candidates.append(candidate)
        self._candidates[trajectory_id] = candidate
        return candidate

    def _candidate(self, trajectory_id: str) -> CandidateSequence:
        self._check_not_dropped(trajectory_id)
        if trajectory_id not in self._candidates:
            raise ValueError(f"unknown trajectory {trajectory_id!r}: add its first tokens before")
        return self._candidates[trajectory_id]

    def _check_not_dropped(self, trajectory_id: str) -> None:
        if trajectory_id in self._dropped:
            raise ValueError(f"trajectory {trajectory_id!r} was dropped")

    def _prompt(self, number: int) -> PromptSequence:
        if number not in self._prompts:
            raise ValueError(f"unknown prompt {number}: add it with add_prompt() before")
        return self._prompts[number]

    def _check_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Reject ids outside the vocabulary; on a GPU these would only fail an assertion without a message."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary_size:
                raise ValueError(f"token id {token_id} is not in the model's vocabulary of {self._vocabulary_size}")
        return list(token_ids)
