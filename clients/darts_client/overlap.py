"""A trainer's log-probs while the rollout still runs: needs the extra `darts-client[overlap]`.

The forward pass over what has come already overlaps with the generation of the rest (DARTS, arXiv 2605.30859,
token-level streaming).

```python
overlap = Overlap(model.eval(), temperature=1.0)
for number, token_ids in enumerate(prompts):
    overlap.prompt(number, token_ids)
with client.stream_tokens(prompts, group_size=8, max_tokens=512) as events:
    for event in events:
        overlap.feed(event)
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

    from ._fed import Candidate, Fed, Prompt, next_batch
    from ._forward import forward, refuse_unsupported
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"{exc.msg}: darts_client.overlap needs darts-client[overlap]", name=exc.name) from exc

from ._events import Delta, Discard, Done, Event, GroupEvent, TrajectoryEvent

# The logits are the largest thing: 2.5 GB in bfloat16 if all tokens are new and the vocabulary has 150,000.
_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one step computed of a trajectory: its tokens `start` .. `start + len(logprobs)`.

    `logprobs` and `entropies` are in nats, float32, on the model's device; `entropies` is None unless asked for.
    """

    trajectory_id: str
    start: int
    logprobs: Tensor
    entropies: Tensor | None


class Overlap:
    """Log-probs of candidates that are still being generated, under the model as it stands.

    Each candidate's keys and values are kept, so that each token is forwarded once; a prompt's are computed once and
    shared. They go with `drop`, with `close`, and after `finish`. One `Overlap` is for one batch of prompts and one set
    of weights: make another after an update.

    Nothing here has a gradient: these are the log-probs of the old policy or of a reference, not those to
    differentiate. They equal one forward pass over the whole up to rounding.

    `model` is a causal LM of transformers in eval mode with full attention in every layer; ValueError for any other.
    `temperature` divides the logits. `entropy` asks for the entropy of each token's distribution too. `batch_tokens`
    bounds a forward pass: rows times (longest past + most new tokens); one row alone may have that many new ones.

    Not for several threads at once.
    """

    def __init__(
        self, model: Any, *, temperature: float = 1.0, entropy: bool = False, batch_tokens: int = _BATCH_TOKENS
    ) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a number above 0, got {temperature}")
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
        refuse_unsupported(model)
        self._model = model
        self._temperature = temperature
        self._entropy = entropy
        self._batch_tokens = batch_tokens
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._prompts: dict[int, Prompt] = {}
        self._candidates: dict[str, Candidate] = {}
        self._dropped: set[str] = set()

    def __contains__(self, trajectory_id: str) -> bool:
        """Whether the trajectory was added and not dropped."""
        return trajectory_id in self._candidates

    @property
    def waiting(self) -> int:
        """Tokens, of prompts too, that `step` could forward."""
        return sum(fed.waiting for fed in self._all())

    @property
    def kept_tokens(self) -> int:
        """Tokens whose keys and values are kept; those of a prompt count once."""
        return sum(len(fed.kept) for fed in self._all() if fed.kept is not None)

    def prompt(self, number: int, token_ids: Sequence[int]) -> None:
        """Name a prompt, as soon as it is known: it is forwarded before its candidates come."""
        if number in self._prompts:
            raise ValueError(f"prompt {number} is there already")
        if not token_ids:
            raise ValueError(f"prompt {number} has no tokens")
        self._prompts[number] = Prompt(self._checked(token_ids))

    def add(self, trajectory_id: str, number: int, token_ids: Sequence[int], start: int | None = None) -> None:
        """Queue tokens that prompt `number`'s candidate has generated.

        `start` is the place of the first of them, and is checked. Raises ValueError, and changes nothing, for tokens
        that are missing or repeated, an unknown or closed prompt, and a trajectory that is finished or dropped.
        """
        self._not_dropped(trajectory_id)
        tokens = self._checked(token_ids)
        known = self._candidates.get(trajectory_id)
        length = 0 if known is None else known.length
        if start is not None and start != length:
            kind = "are missing before" if start > length else "came already"
            raise ValueError(f"trajectory {trajectory_id!r}: tokens {kind}: {length} are there, these start at {start}")
        if known is None:
            known = self._started(trajectory_id, number)
        elif known.number != number:
            raise ValueError(f"trajectory {trajectory_id!r} belongs to prompt {known.number}, not {number}")
        elif known.finished:
            raise ValueError(f"trajectory {trajectory_id!r} is finished")
        known.tokens += tokens

    def finish(self, trajectory_id: str, length: int | None = None) -> None:
        """No token comes any more, and of those that came the first `length` count (all, if left out).

        What waits is still forwarded; its keys and values go then.
        """
        candidate = self._known(trajectory_id)
        if candidate.finished:
            raise ValueError(f"trajectory {trajectory_id!r} is finished")
        if length is not None and not 0 <= length <= candidate.length:
            raise ValueError(f"trajectory {trajectory_id!r}: has {length} tokens, but {candidate.length} came")
        candidate.finish(candidate.length if length is None else length)

    def drop(self, trajectory_id: str) -> None:
        """Forget a trajectory with everything computed for it. Nothing of it may be added again."""
        candidate = self._known(trajectory_id)
        del self._candidates[trajectory_id]
        self._dropped.add(trajectory_id)
        candidate.prompt.candidates.remove(candidate)
        candidate.prompt.forget_if_unused()

    def close(self, number: int) -> None:
        """Prompt `number` is decided: its candidates that are not finished are dropped, and none may come."""
        prompt = self._known_prompt(number)
        for candidate in [candidate for candidate in prompt.candidates if not candidate.finished]:
            self.drop(candidate.trajectory_id)
        prompt.closed = True
        prompt.forget_if_unused()

    def feed(self, event: Event) -> None:
        """Take an event of `stream_tokens`: tokens are added, and what is decided is finished, dropped and closed."""
        match event:
            case Delta():
                self.add(event.trajectory_id, event.number, event.token_ids, start=event.start)
            case TrajectoryEvent():
                self.finish(event.trajectory_id, len(event.token_ids))
            case Discard():
                self._discard(event.trajectory_id)
            case GroupEvent(group) if group.number is not None:
                self.close(group.number)
            case Done():
                for prompt in event.unfinished:
                    self.close(prompt.number)

    def feed_wire(self, name: str, data: Mapping[str, Any]) -> None:
        """Take a server-sent event of a token stream as it came: its name and its JSON."""
        match name:
            case "delta":
                self.add(data["trajectory_id"], data["number"], data["token_ids"], start=data["start"])
            case "trajectory":
                self.finish(data["trajectory_id"], data["length"])
            case "discard":
                self._discard(data["trajectory_id"])
            case "group":
                self.close(data["number"])
            case "done":
                for prompt in data["unfinished"]:
                    self.close(prompt["number"])

    def step(self) -> list[Chunk]:
        """Forward one batch of what waits and return the log-probs that came of it.

        Prompts go first; a step over prompts returns none, so loop over `waiting`, not over what is returned. If the
        forward pass fails nothing has changed.
        """
        prompts = [prompt for prompt in self._prompts.values() if prompt.waiting]
        candidates = [candidate for candidate in self._candidates.values() if candidate.waiting]
        batch = next_batch(prompts or candidates, self._batch_tokens)
        if not batch:
            return []
        rows = [row for _, row in batch]
        results = forward(self._model, rows, temperature=self._temperature, entropy=self._entropy)
        chunks = []
        for (fed, _), result in zip(batch, results, strict=True):
            if isinstance(fed, Candidate):
                chunks.append(Chunk(fed.trajectory_id, fed.fed, result.logprobs, result.entropies))
            fed.take(result)
        return chunks

    def logprobs(self, trajectory_id: str) -> Tensor:
        """Natural log-probs [tokens], float32, of all tokens added so far; what waits is forwarded first."""
        candidate = self._computed(trajectory_id)
        return candidate.joined(candidate.logprobs)

    def entropies(self, trajectory_id: str) -> Tensor:
        """Entropies [tokens], in nats, float32, of the distributions of these tokens, at the temperature."""
        if not self._entropy:
            raise ValueError("entropy was not asked for: make the Overlap with entropy=True")
        candidate = self._computed(trajectory_id)
        return candidate.joined(candidate.entropies)

    def _discard(self, trajectory_id: str) -> None:
        if trajectory_id in self:  # else it was discarded before its first token was told
            self.drop(trajectory_id)

    def _computed(self, trajectory_id: str) -> Candidate:
        candidate = self._known(trajectory_id)
        while candidate.waiting:
            self.step()
        return candidate

    def _all(self) -> list[Fed]:
        return [*self._prompts.values(), *self._candidates.values()]

    def _started(self, trajectory_id: str, number: int) -> Candidate:
        prompt = self._known_prompt(number)
        if prompt.closed:
            raise ValueError(f"prompt {number} is closed, trajectory {trajectory_id!r} comes too late")
        started = Candidate(prompt.tokens[-1:], trajectory_id=trajectory_id, number=number, prompt=prompt)
        prompt.candidates.append(started)
        self._candidates[trajectory_id] = started
        return started

    def _known(self, trajectory_id: str) -> Candidate:
        self._not_dropped(trajectory_id)
        if trajectory_id not in self._candidates:
            raise ValueError(f"unknown trajectory {trajectory_id!r}: add its first tokens before")
        return self._candidates[trajectory_id]

    def _not_dropped(self, trajectory_id: str) -> None:
        if trajectory_id in self._dropped:
            raise ValueError(f"trajectory {trajectory_id!r} was dropped")

    def _known_prompt(self, number: int) -> Prompt:
        if number not in self._prompts:
            raise ValueError(f"unknown prompt {number}: give its tokens with prompt() before")
        return self._prompts[number]

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """Outside the vocabulary a GPU would only say that an assertion failed."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary:
                raise ValueError(f"token id {token_id} is not among the {self._vocabulary} of the model's vocabulary")
        return list(token_ids)
