"""The port to any inference engine: what the rollout room needs and nothing more.

``RequestT`` is whatever the adapter needs to start a candidate of one prompt, ``OutputT`` whatever it makes of a
finished one. Both pass through the rooms above unread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from darts_server.types import FinishReason, PromptSpec, Sample

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
OutputT_contra = TypeVar("OutputT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Ended(Generic[OutputT]):
    """A candidate's end. ``reason`` is ``None`` for one that was aborted, whoever asked for it.

    ``tokens`` is the number of generated tokens in ``output``.
    """

    tokens: int
    reason: FinishReason | None
    output: OutputT


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens of a candidate from some place on, and their log-probs if these were asked for.

    ``asked``: whether the request did. If not they are there for a `Probe`, and not for the caller.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    asked: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """``state``: the model's final hidden state at the last of a candidate's first ``tokens`` tokens, [width]."""

    tokens: int
    state: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Probe:
    """What is to be told of a candidate while it runs.

    ``detect_at``: numbers of generated tokens, ascending, at which its hidden state is taken; where a step makes
    several, after the first step at or past each. ``tell`` hears of each at most once, in their order, in the event
    loop, and possibly after the candidate's end; it returns fast and never raises. ``logprobs``: have log-probs at hand
    in `Running.generated`, though the request may ask for none.
    """

    detect_at: tuple[int, ...]
    tell: Callable[[Probed], None]
    logprobs: bool = False


class Running(Protocol[OutputT]):
    """A candidate that was started."""

    def tokens(self) -> int | None:
        """Tokens generated so far and not finished with; ``None`` once it has ended. Cheap, never blocks."""
        ...

    def generated(self, start: int) -> Generated | None:
        """What it has generated from token ``start`` on; ``None`` once it has ended. Cheap, never blocks.

        Its output will begin with just these tokens.
        """
        ...

    def stop(self) -> int:
        """Ask the engine to abort it. Returns at once, with the number of tokens that it has generated, running or not.

        :meth:`ended` then gives what there is.
        """
        ...

    async def ended(self) -> Ended[OutputT]:
        """Wait for its end.

        Raises:
            CandidateFailed, EngineRefused, EngineDead
        """
        ...


class Engine(Protocol[RequestT_contra, OutputT]):
    """An inference engine."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will be generated with."""
        ...

    @property
    def capacity(self) -> int | None:
        """Most candidates that it runs at once; others wait. ``None`` if there is no such bound."""
        ...

    @property
    def unfinished(self) -> int:
        """Candidates that it runs or keeps waiting, whoever started them."""
        ...

    @property
    def probe_width(self) -> int | None:
        """Width of the hidden states that a `Probe` is told; ``None`` if this engine cannot tell them."""
        ...

    async def start(self, request: RequestT_contra, index: int, probe: Probe | None = None) -> Running[OutputT]:
        """Start candidate ``index`` of the request's prompt.

        Raises:
            CandidateFailed, EngineRefused, EngineDead
        """
        ...

    def cut(self, request: RequestT_contra, output: OutputT, tokens: int) -> OutputT:
        """The first ``tokens`` tokens of an output, as if they had been the request's ``max_tokens``."""
        ...

    def generated(self, output: OutputT, start: int) -> Generated:
        """What an output holds from token ``start`` on."""
        ...

    def token_ids(self, request: RequestT_contra, output: OutputT) -> tuple[Sequence[int], Sequence[int]]:
        """Of the prompt, and of what was generated. Cheap: the engine's own lists."""
        ...


class Prompter(Protocol[RequestT, OutputT_contra]):
    """Makes an engine's requests from what callers say, and reads its outputs."""

    async def request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> RequestT:
        """A request for ``size`` trajectories, checked as far as it can be before it runs.

        Raises:
            InvalidRequest: names the field of ``prompt`` or ``sampling``.
        """
        ...

    def key(self, request: RequestT) -> str:
        """Under which the prompt's lengths are remembered where the caller names no key."""
        ...

    def tail_seed(self, request: RequestT) -> Sequence[int] | None:
        """Seed of the tail's lottery; ``None`` for a fresh one."""
        ...

    def sample(self, output: OutputT_contra) -> Sample:
        """What a trajectory holds."""
        ...
