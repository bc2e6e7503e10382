"""Model runners that compute nothing, and a scheduler that does all that vLLM's may do.

The state of request r at its p-th token is [r, p], so that a row shows where it was taken. Rejected drafts and
padding rows are [-1, -1].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from darts_server.vllm.probe.capture import (
    ARGUMENT,
    FAULT,
    STATES,
    Capture,
    CapturedRows,
    create_message,
    unpack_states,
)

WIDTH = 2


@dataclass
class Request:
    number: int
    request_id: str
    prompt: int
    length: int
    points: tuple[int, ...]
    generated: int = 0
    computed: int = 0
    announced: bool = False
    overestimated: int = 0
    """By how much the host overestimates the computed tokens: rejected drafts of the last step."""
    certain: list[int] = field(default_factory=list)
    """Generated tokens that were certain after each of its steps."""

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return self.generated >= self.length


@dataclass(frozen=True)
class Part:
    """The part of a request that a step computes: known tokens, then drafts, of which the first ones are accepted."""

    request: Request
    known: int
    drafts: int
    accepted: int

    def row(self, place: int) -> list[float]:
        """Create the state of its ``place``-th token."""
        is_certain = place < self.known + self.accepted
        return [float(self.request.number), float(self.request.computed + place + 1)] if is_certain else [-1.0, -1.0]


class Runner:
    """Base of both runners. ``max_drafts``: per step."""

    is_pooling_model = False
    device = torch.device("cpu")
    announces_again: bool
    """Whether a preempted request comes back as if it were new."""

    def __init__(self, max_drafts: int) -> None:
        self.model_config = SimpleNamespace(get_hidden_size=lambda: WIDTH)
        self.vllm_config = SimpleNamespace(num_speculative_tokens=max_drafts)
        self.execute_model_state: Any = None
        self.parts: Sequence[Part] = ()

    def execute_model(self, scheduled: Any, *_: Any, dummy_run: bool = False) -> None:
        if self.parts and not dummy_run:
            self._forward(scheduled)

    def _forward(self, scheduled: Any) -> None:
        raise NotImplementedError


class FirstRunner(Runner):
    announces_again = False

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.input_batch = SimpleNamespace()

    def _forward(self, scheduled: Any) -> None:
        ids = [part.request.request_id for part in self.parts]
        self.input_batch.req_ids = ids
        self.input_batch.req_id_to_index = {request_id: place for place, request_id in enumerate(ids)}
        self.input_batch.num_computed_tokens_cpu = np.array([p.request.computed for p in self.parts], dtype=np.int32)
        rows = [p.row(place) for p in self.parts for place in range(p.known - 1, p.known + p.drafts)]
        self.execute_model_state = SimpleNamespace(
            scheduler_output=scheduled, sample_hidden_states=torch.tensor(rows, dtype=torch.bfloat16)
        )


class SecondRunner(Runner):
    announces_again = True

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.num_speculative_steps = max_drafts
        self.req_states = self.pcp_manager = None
        self.model_state = SimpleNamespace(num_new_sampled_tokens_per_step=1)

    def _forward(self, scheduled: Any) -> None:
        hidden, indices, first = list[list[float]](), list[int](), [0]
        for p in self.parts:
            indices += range(len(hidden) + p.known - 1, len(hidden) + p.known + p.drafts)
            hidden += [p.row(place) for place in range(p.known + p.drafts)]
            first.append(len(indices))
        estimated = [p.request.computed + p.request.overestimated for p in self.parts]
        batch = SimpleNamespace(
            req_ids=[p.request.request_id for p in self.parts],
            num_computed_tokens_np=np.array(estimated, dtype=np.int32),
            cu_num_logits=torch.tensor(first, dtype=torch.int32),
            logits_indices=torch.tensor(indices, dtype=torch.int64),
            seq_lens=torch.tensor([p.request.computed + p.known + p.drafts for p in self.parts], dtype=torch.int32),
        )
        self.execute_model_state = SimpleNamespace(
            input_batch=batch, hidden_states=torch.tensor([*hidden, [-1.0, -1.0]], dtype=torch.float32)
        )


class FakeScheduler:
    """A scheduler over one of the runners, with the probe installed. ``sent``: tokens and states by request number."""

    def __init__(self, runner: Runner, rng: Random, requests: Sequence[Request]) -> None:
        self.sent: dict[int, list[tuple[int, list[float]]]] = {}
        self.faults: list[bytes] = []
        self._runner = runner
        self._rng = rng
        self._max_drafts = int(runner.vllm_config.num_speculative_tokens)
        self._waiting = list(requests)
        self._running: list[Request] = []
        self._finished: set[str] = set()
        self._queue: list[CapturedRows | Sequence[bytes]] = []
        self._capture = Capture(runner, self._queue.append)
        self._capture.start()

    def run(self) -> None:
        """Run until all requests have ended, and one step more."""
        while self._waiting or self._running:
            self._step()
        self._step()
        self._deliver(len(self._queue))

    @property
    def tracked(self) -> int:
        return len(self._capture.requests)

    def _step(self) -> None:
        rng = self._rng
        for request in [r for r in self._running if r.done or rng.random() < 0.01]:  # or aborted
            self._running.remove(request)
            self._finished.add(request.request_id)
        names = {r.request_id for r in self._running}
        while self._waiting and self._waiting[0].request_id not in names and rng.random() < 0.7:
            names.add(self._waiting[0].request_id)
            self._running.append(self._waiting.pop(0))
        for request in self._running:
            if request.announced and rng.random() < 0.1:  # preempted
                request.computed = request.overestimated = 0
                request.announced = not self._runner.announces_again
        chosen = [r for r in self._running if rng.random() < 0.8]
        rng.shuffle(chosen)
        new, parts = [], []
        for request in chosen:
            if not request.announced:
                request.announced = True
                if rng.random() < 0.3:  # a prefix is in the cache
                    request.computed = rng.randrange(request.known)
                new.append(self._new(request))
            missing = request.known - request.computed
            known = rng.randint(1, missing) if rng.random() < 0.5 else missing
            drafts = rng.randint(0, self._max_drafts) if known == missing else 0
            parts.append(Part(request, known, drafts, rng.randint(0, drafts)))
        self._runner.parts = parts
        self._runner.execute_model_state = None
        self._runner.execute_model(
            SimpleNamespace(
                scheduled_new_reqs=new,
                finished_req_ids=self._finished,
                num_scheduled_tokens={p.request.request_id: p.known + p.drafts for p in parts},
                scheduled_spec_decode_tokens={p.request.request_id: [0] * p.drafts for p in parts if p.drafts},
            ),
            None,
        )
        self._finished = set()
        for part in parts:
            request = part.request
            request.computed += part.known
            request.certain.append(request.computed - request.prompt)
            if request.computed == request.known:
                request.computed += part.accepted
                request.generated += part.accepted + 1
                request.overestimated = part.drafts - part.accepted
        self._deliver(rng.randrange(len(self._queue) + 1))

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            taken = self._queue.pop(0)
            frames = create_message(taken) if isinstance(taken, CapturedRows) else taken
            if frames is None:
                continue
            kind, *rest = frames
            if kind == FAULT:
                self.faults += rest
            elif kind == STATES:
                for number, tokens, state in unpack_states(*rest):
                    self.sent.setdefault(number, []).append((tokens, state.tolist()))

    @staticmethod
    def _new(request: Request) -> Any:
        extra = {"other": 1, ARGUMENT: [request.number, *request.points]} if request.points else None
        return SimpleNamespace(
            req_id=request.request_id,
            prompt_token_ids=[0] * request.prompt,
            prompt_embeds=None,
            sampling_params=SimpleNamespace(extra_args=extra),
        )
